"""Prompts for training data, drawn from folders of code and prose by a seed; nothing that a bench reads.

A file's name decides which side it is on: ``tasks.held_out`` files belong to the bench, of the others one in sixteen
is kept for validation.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from foldspec.errors import UsageError
from foldspec.tasks.held_out import held_out
from foldspec.text.chat import ChatTemplate
from foldspec.text.tokenizer import Tokenizer

__all__ = ["Prompt", "Prompts", "Source"]

CODE, PROSE = (".py",), (".rst", ".txt", ".md")
SKIPPED = ("site-packages", "__pycache__", "locale", "licenses", "idlelib", "lib2to3", "pydoc_data", "encodings")
MISSES = 20_000  # draws in a row without a usable prompt, after which there is none
LARGEST = 400_000  # bytes of a file: what is larger is a table, mostly

ABOUT_PROSE = (
    "Summarise the text above.",
    "Summarise the text above in one sentence.",
    "What is the text above about?",
    "List the main points of the text.",
    "Explain the text above to a beginner.",
    "Explain {name} as the text describes it.",
    "What does the text say about {name}?",
    "What is {name}?",
    "How is {name} used? Answer from the text.",
    "Write an example that uses {name}.",
    "Summarise the section on {name}.",
    "Quote the part of the text that mentions {name}.",
    "Rewrite the text in simpler words.",
    "Which questions does this text answer?",
)
ABOUT_CODE = (
    "What does this code do?",
    "Explain this code step by step.",
    "Write a docstring for {name}.",
    "Write a test for {name}.",
    "Rewrite this code so that it is easier to read.",
    "Add comments to this code.",
    "Find a possible error in this code and correct it.",
    "Explain {name}.",
    "Continue this code.",
)
ALONE = (
    "What is {name}?",
    "Explain {name} with an example.",
    "Write a Python function that is called {name}.",
    "Write a short text about {name}.",
    "How do I use {name} in Python?",
    "Give me five facts about {name}.",
    "What is the difference between {name} and {other}?",
    "Write a Python class for {name} and {other}.",
    "Tell me a story about {name}.",
)
# share of each kind of prompt
MIX = {"code": 0.30, "prose": 0.10, "about_prose": 0.28, "about_code": 0.14, "alone": 0.10, "pairs": 0.08}


@dataclass(frozen=True)
class Source:
    """A folder of files: ``name`` stands for it in the names that split the data, ``kind`` is code or prose."""

    name: str
    folder: Path
    kind: str

    def files(self) -> list[tuple[str, Path]]:
        """(name, path) of each usable file, in order of name."""
        endings = CODE if self.kind == "code" else PROSE
        found = []
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            if path.suffix not in endings or any(part in SKIPPED for part in relative.parts) or not path.is_file():
                continue
            if 2_000 <= path.stat().st_size <= LARGEST:
                found.append((f"{self.name}/{relative.as_posix()}", path))
        return found


@dataclass(frozen=True)
class Prompt:
    """``kind`` is a key of :data:`MIX`, ``source`` the file's name (empty where there is none)."""

    ids: tuple[int, ...]
    kind: str
    source: str
    validation: bool


class Prompts:
    """An endless draw of prompts of ``shortest`` to ``longest`` tokens."""

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        shortest: int = 48,
        longest: int = 288,
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._shortest, self._longest = shortest, longest
        names = [(source.kind, source.name) for source in sources]
        for source in sources:
            if names.count((source.kind, source.name)) > 1:
                raise UsageError("two sources have this name", where=f"--source {source.kind}:{source.name}")
        files = [(source.kind, *file) for source in sources for file in source.files()]
        for source in sources:
            if not any(name.startswith(f"{source.name}/") for _, name, _ in files):
                kinds = ", ".join(CODE if source.kind == "code" else PROSE)
                what = f"has no file of 2 to {LARGEST // 1000} kB that ends in {kinds}"
                raise UsageError(what, where=str(source.folder))
        self._files = {
            kind: [(name, path) for k, name, path in files if k == kind and not held_out(name)]
            for kind in ("code", "prose")
        }
        makers: dict[str, Callable[[random.Random], Prompt | None]] = {
            "code": lambda rng: self._raw(rng, "code"),
            "prose": lambda rng: self._raw(rng, "prose"),
            "about_prose": lambda rng: self._about(rng, "prose"),
            "about_code": lambda rng: self._about(rng, "code"),
            "alone": self._alone,
            "pairs": self._pairs,
        }
        wanted = {"code": "code", "about_code": "code", "prose": "prose", "about_prose": "prose"}
        chats = {"about_code", "about_prose", "alone", "pairs"}
        self._makers = {
            kind: make
            for kind, make in makers.items()
            if (kind not in wanted or self._files[wanted[kind]]) and (template is not None or kind not in chats)
        }

    @property
    def counts(self) -> dict[str, int]:
        """Files of each kind that prompts are drawn from."""
        return {kind: len(files) for kind, files in self._files.items()}

    def draw(self, rng: random.Random) -> Iterator[Prompt]:
        """Prompts without end, all from ``rng``."""
        kinds = sorted(self._makers)
        weights = [MIX[kind] for kind in kinds]
        misses = 0
        while misses < MISSES and kinds:
            kind = rng.choices(kinds, weights)[0]
            prompt = self._makers[kind](rng)
            misses += 1
            if prompt is not None and self._shortest <= len(prompt.ids) <= self._longest:
                misses = 0
                yield prompt
        what = f"no prompt of {self._shortest} to {self._longest} tokens is found"
        raise UsageError(what, where="the sources", do="name a --source with longer texts, or more --length")

    def _lines(self, rng: random.Random, kind: str) -> tuple[str, list[str]] | None:
        """A file's name, and its lines from a random one on."""
        name, path = rng.choice(self._files[kind])
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, ValueError):
            return None
        start = rng.randrange(max(1, len(lines) - 20))
        return name, lines[start : start + 80]

    def _raw(self, rng: random.Random, kind: str) -> Prompt | None:
        """Text of a file as it stands, cut anywhere."""
        found = self._lines(rng, kind)
        if found is None:
            return None
        ids = self._tokenizer.encode_prompt("".join(found[1]))
        length = rng.choice((64, 96, 128, 192, 256))
        return self._prompt(ids[: min(length, self._longest)], kind, found[0])

    def _about(self, rng: random.Random, kind: str) -> Prompt | None:
        """A piece of a file and a question about it, in either order."""
        found = self._lines(rng, kind)
        if found is None:
            return None
        lines = found[1][: rng.randint(6, 24)]
        piece = "".join(lines).strip("\n")
        names = _names(piece, kind)
        questions = ABOUT_PROSE if kind == "prose" else ABOUT_CODE
        question = rng.choice(questions).format(name=rng.choice(names) if names else "this")
        if kind == "code":
            piece = f"```python\n{piece}\n```"
        text = f"{piece}\n\n{question}" if rng.random() < 0.7 else f"{question}\n\n{piece}"
        return self._chat(text, f"about_{kind}", found[0])

    def _alone(self, rng: random.Random) -> Prompt | None:
        """A short question about a name, with no text beside it."""
        found = self._lines(rng, rng.choice([kind for kind, files in self._files.items() if files]))
        if found is None:
            return None
        names = _names("".join(found[1]), "prose" if rng.random() < 0.5 else "code")
        if len(names) < 2:
            return None
        name, other = rng.sample(names, 2)
        return self._chat(rng.choice(ALONE).format(name=name, other=other), "alone", found[0])

    def _pairs(self, rng: random.Random) -> Prompt:
        """A few keys and values, and a question for one of them."""
        count = rng.randint(2, 4)
        pairs = {str(_uuid(rng)): str(_uuid(rng)) for _ in range(count)}
        key = rng.choice(list(pairs))
        text = f"Here is a JSON object.\n\n{json.dumps(pairs)}\n\nWhich value belongs to the key {key}?"
        return self._chat(text, "pairs", f"pairs/{key}")

    def _chat(self, text: str, kind: str, source: str) -> Prompt:
        assert self._template is not None
        rendered = self._template.render([{"role": "user", "content": text}])
        return self._prompt(self._tokenizer.encode(rendered, special=False), kind, source)

    def _prompt(self, ids: Sequence[int], kind: str, source: str) -> Prompt:
        # the bench's bits are the last two of the first four bytes: validation looks at others
        validation = hashlib.sha256(source.encode()).digest()[8] % 16 == 0
        return Prompt(tuple(ids), kind, source, validation)


def _uuid(rng: random.Random) -> uuid.UUID:
    return uuid.UUID(int=rng.getrandbits(128), version=4)


def _names(text: str, kind: str) -> list[str]:
    """What a question about this text can name: its definitions, or its marked and capitalised words."""
    if kind == "code":
        return sorted(set(re.findall(r"(?:def|class) (\w{3,})", text)) or set(re.findall(r"\b([a-z]+_\w+)\b", text)))
    return sorted(set(re.findall(r"`{1,2}~?\.?([\w.]{3,})`", text)) or set(re.findall(r"\b([A-Z][a-z]{3,}\w*)", text)))
