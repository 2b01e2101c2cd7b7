"""The prompts, fixed beforehand, on which speculation must not change a token; and the comparison itself.

Texts are the running Python's own sources and documentation, and questions written here. Lengths cross every boundary:
page and prefill chunk (512), and for the pair's window W = 256 and block B = 7: W-1, W, W+1, W+B, 3W and their like.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from foldspec import Engine, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write a short poem about rain.",
    "How do I boil an egg?",
    "Explain what a prime number is to a child.",
    "What is 17 times 23? Show your steps.",
    "Give me five names for a grey cat.",
    "Translate 'good morning' into Spanish and French.",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Summarise the plot of a story about a lost key in three sentences.",
    "A train travels 60 km in 45 minutes. How fast is it in km per hour?",
    "List the steps to change a bicycle tyre.",
    "What is the difference between a list and a tuple in Python?",
    "Write an email that asks a colleague for the minutes of a meeting.",
    "Which planets have rings?",
    "Tell me a joke about computers.",
    "Write SQL that counts the orders of each customer.",
    "How many seconds are there in a week?",
    "Describe the water cycle.",
    "Correct this sentence: 'She don't likes apples.'",
    "What should I pack for a weekend in the mountains?",
)
CODE = (
    ("heapq", 10), ("bisect", 40), ("json.decoder", 100), ("argparse", 255), ("ast", 256), ("cmd", 257),
    ("csv", 263), ("dis", 300), ("enum", 511), ("functools", 512), ("inspect", 513), ("shlex", 640), ("tarfile", 767),
    ("zipfile", 768), ("tempfile", 769), ("textwrap", 775), ("typing", 1024), ("statistics", 1500),
    ("subprocess", 2048), ("decimal", 3000), ("difflib", 4096),
)  # fmt: skip
DOCUMENTS = (
    ("lambda", 12), ("assert", 64), ("class", 128), ("import", 255), ("function", 256), ("try", 257), ("with", 263),
    ("operator-summary", 400), ("slicings", 511), ("yield", 512), ("strings", 768), ("for", 900), ("exceptions", 1024),
    ("naming", 1536), ("typesseq", 2000), ("debugger", 2500), ("formatstrings", 3500), ("types", 5000),
    ("specialnames", 6500), ("bltin-null-object", 8000),
)  # fmt: skip
METHODS: tuple[dict[str, object], ...] = (
    {"context": "full"},
    {"context": "window"},
    {"context": "fold", "alpha": 1.0},
    {"context": "fold", "alpha": 2.0},
    {"context": "fold", "alpha": 4.0},
)


@dataclass(frozen=True)
class Prompt:
    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """Where a method's output leaves plain decoding's, and plain decoding's own top-2 logit gap there."""

    prompt: str
    method: dict[str, object]
    index: int
    gap: float


def prompts(engine: Engine) -> list[Prompt]:
    """All 63."""
    assert engine.tokenizer is not None
    found = [Prompt(f"chat {i}", engine.encode([{"role": "user", "content": q}])) for i, q in enumerate(QUESTIONS)]
    for kind, table, read in (("code", CODE, _source), ("document", DOCUMENTS, _document)):
        for name, length in table:
            ids = engine.tokenizer.encode(read(name), special=False)
            found.append(Prompt(f"{kind} {name} {length}", tuple(_exactly(ids, length))))
    return found


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _document(topic: str) -> str:
    """The documentation from this topic on, so that any length can be had of it."""
    names = sorted(topics)
    at = next((i for i, name in enumerate(names) if name >= topic), 0)
    return "\n".join(topics[name] for name in (*names[at:], *names[:at]))


def _exactly(ids: Sequence[int], length: int) -> list[int]:
    repeated = list(ids)
    while len(repeated) < length:
        repeated += ids
    return repeated[:length]


def compare(
    engine: Engine, prompt: Prompt, tokens: int, methods: Sequence[dict[str, object]] = METHODS
) -> Iterator[tuple[dict[str, object], int, float | None, Difference | None]]:
    """For each method: (method, tokens compared, tau, the first difference from plain decoding or None)."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with engine.prefill(prompt.ids) as prefix:
        plain = engine.using(draft_tokens=0).generate(prefix, params).token_ids
        for method in methods:
            done = engine.using(**method).generate(prefix, params)
            index = next((i for i, (a, b) in enumerate(zip(plain, done.token_ids, strict=True)) if a != b), None)
            if index is None:
                yield method, len(plain), done.tau, None
            else:
                # after a difference the two texts are two prompts: nothing more can be compared
                with engine.prefill((*prompt.ids, *plain[:index])) as at:
                    top = at.logits[0].topk(2).values
                yield method, index + 1, done.tau, Difference(prompt.name, method, index, float(top[0] - top[1]))


def judge(differences: Sequence[Difference], compared: int, report: Callable[[str], object] = print) -> bool:
    """Whether the differences are excused: each at a near tie of plain decoding, and at most 1 token in 500. Compiled
    kernels need no excuse; torch's, where there is no compiler, do."""
    for d in differences:
        report(f"differs: {d.prompt}, {d.method}, token {d.index}, top-2 gap {d.gap:.2e}")
    return all(d.gap < 1e-4 for d in differences) and len(differences) * 500 <= compared
