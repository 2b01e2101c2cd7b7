"""The tokenizer of a checkpoint folder, and the ids at which its text ends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from foldspec.errors import CheckpointError, UsageError

# words, case, numbers, white space, code, accents, other scripts, emoji: what tokenizers cut in different ways
PROBE = (
    "The unbelievable Re-Tokenizer's 1,234.5678 tests don't  matter;\n\n\tfor (int i=0; i<10; ++i) { x += 'a\\n'; }\r\n"
    "na\u00efve fa\u00e7ade \u2014 \u00c4rger \u0416\u0438\u0437\u043d\u044c \u4f60\u597d\u4e16\u754c \u3053\u3093"
    " \ud55c\uad6d \u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f44d\U0001f3fd e\u0301 \ufb01 \u00bd 20000000  "
)

__all__ = ["Tokenizer", "mask_id", "one_line", "read_json", "stop_ids", "token_text"]


def one_line(error: Exception) -> str:
    """An error's message without its line breaks."""
    return " ".join(str(error).split())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. CheckpointError if it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be read as JSON: {one_line(error)}", where=str(path)) from None
    if not isinstance(value, dict):
        raise CheckpointError("holds no JSON object", where=str(path))
    return value


def token_text(config: Mapping[str, Any], key: str, where: str) -> str | None:
    """A special token of tokenizer_config.json, which writes it as a string or as {"content": string}."""
    value = config.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{key} must be a string, not {value!r}", where=where)
    return value or None


class Tokenizer:
    """``tokenizer.json`` with what ``tokenizer_config.json`` says about BOS and EOS.

    ``bos_id`` and ``eos_id`` are None where the checkpoint names none. ``adds_bos``: whether an encoded prompt starts
    with BOS, because the post-processor of tokenizer.json puts it there or tokenizer_config.json says
    ``add_bos_token: true`` (DeepSeek's files say only that). ``false`` takes away nothing, as in transformers 5.
    """

    def __init__(self, core: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None, *, where: str = "") -> None:
        config = config or {}
        # Some files carry the padding and the length limit of their training; a prompt must never be cut in silence.
        core.no_truncation()
        core.no_padding()
        self._core, self._where = core, where
        self._special = frozenset(i for i, token in core.get_added_tokens_decoder().items() if token.special)
        self.eos_id = self._named(config, "eos_token")
        self.bos_id = self._named(config, "bos_token")
        frame = core.encode("", add_special_tokens=True).ids  # what the post-processor puts around every text
        if self.bos_id is None and frame and frame[0] != self.eos_id:
            self.bos_id = frame[0]
        framed = bool(frame) and frame[0] == self.bos_id
        self.adds_bos = self.bos_id is not None and (framed or config.get("add_bos_token") is True)

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer | None:
        """The folder's tokenizer; None without a tokenizer.json. CheckpointError if a file is malformed."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"is no tokenizer: {one_line(error)}", where=str(path)) from None
        config_path = path.with_name("tokenizer_config.json")
        return cls(core, read_json(config_path), where=str(config_path))

    def _named(self, config: Mapping[str, Any], key: str) -> int | None:
        text = token_text(config, key, self._where)
        token = None if text is None else self._core.token_to_id(text)
        if text is not None and token is None:
            raise CheckpointError(f"{key} {text!r} is not in the vocabulary of tokenizer.json", where=self._where)
        return token

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included; a model may have more rows than that."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @property
    def decoder(self) -> dict[str, Any] | None:
        """The decoder's own description; None where tokens are only joined by spaces."""
        decoder = self._core.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of ``text``. ``special`` adds what the tokenizer puts around a prompt, BOS exactly once; without it
        nothing is added (a chat template has written its own BOS). UsageError if the text is not valid Unicode."""
        try:
            ids = self._core.encode(text, add_special_tokens=special).ids
        except TypeError:  # lone surrogates, as a terminal hands over bytes that are not UTF-8
            raise UsageError("is not valid Unicode text", where="prompt", do="give it as UTF-8") from None
        if not special or not self.adds_bos or self.bos_id is None:
            return ids
        start = 0
        while ids[start : start + 1] == [self.bos_id]:  # the text may begin with BOS itself
            start += 1
        return [self.bos_id, *ids[start:]]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt without chat template. An empty one is BOS alone; UsageError where the model adds no BOS."""
        ids = self.encode(text, special=True) if text or self.adds_bos else []
        if not ids:
            raise UsageError("is empty, and this model adds no BOS to start from", where="prompt", do="give some text")
        return [ids[0]] if not text else ids  # of the frame around an empty text, only BOS

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ``ids``; ids that the vocabulary lacks give none."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special)

    def difference(self, other: Tokenizer) -> str | None:
        """In what two tokenizers differ that both know; None: the same text has the same ids. An id that only one of
        them names, as a special token of its own, is no difference."""
        own, others = (each._core.get_vocab(with_added_tokens=True) for each in (self, other))
        if own != others:
            names = {token_id: token for token, token_id in others.items()}
            for token, token_id in sorted(own.items(), key=lambda item: item[1]):
                if names.get(token_id, token) != token:
                    return f"id {token_id} is {token!r} of one and {names[token_id]!r} of the other"
                if others.get(token, token_id) != token_id:
                    return f"{token!r} is id {token_id} of one and {others[token]} of the other"
        if self.encode(PROBE, special=False) != other.encode(PROBE, special=False):
            return "their tokenizers cut a text in different ways"
        return None

    def token(self, token_id: int) -> str | None:
        """The raw vocabulary entry of an id, or None."""
        return self._core.id_to_token(token_id)

    def visible(self, ids: Iterable[int]) -> list[int]:
        """The ids that :meth:`decode` gives to the decoder: known and not special."""
        return [i for i in ids if i not in self._special and self._core.id_to_token(i) is not None]


def mask_id(folder: Path | str) -> int | None:
    """The id of tokenizer_config.json's ``mask_token``, by its own table of added tokens, by added_tokens.json or by
    tokenizer.json; None where there is none of that. CheckpointError if a file is malformed."""
    path = Path(folder) / "tokenizer_config.json"
    config, added = read_json(path), read_json(path.with_name("added_tokens.json"))
    text = token_text(config, "mask_token", str(path))
    listed = config.get("added_tokens_decoder")
    for name, entry in listed.items() if isinstance(listed, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("content") == text and name.isdecimal():
            return int(name)
    if text is None:
        return None
    if isinstance(added.get(text), int):
        return int(added[text])
    tokenizer = Tokenizer.load(folder)
    return None if tokenizer is None else tokenizer._core.token_to_id(text)


def stop_ids(folder: Path | str, config: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """All the EOS ids that a checkpoint declares, ascending.

    The union of ``eos_token_id`` in generation_config.json and in ``config`` (config.json; its ``text_config`` too)
    and of ``eos_token`` in tokenizer_config.json (through ``tokenizer``, else the folder's own).
    CheckpointError for an id that is no id of the model's vocabulary.
    """
    folder = Path(folder)
    text_config = config.get("text_config")
    text_config = text_config if isinstance(text_config, Mapping) else {}
    declared = [
        ("generation_config.json", read_json(folder / "generation_config.json").get("eos_token_id")),
        ("config.json", config.get("eos_token_id")),
        ("config.json", text_config.get("eos_token_id")),
    ]
    tokenizer = tokenizer or Tokenizer.load(folder)
    if tokenizer is not None:
        declared.append(("tokenizer_config.json", tokenizer.eos_id))
    vocabulary = config.get("vocab_size", text_config.get("vocab_size"))
    found: set[int] = set()
    for name, value in declared:
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            where = str(folder / name)
            if isinstance(token, bool) or not isinstance(token, int):
                raise CheckpointError(f"eos_token_id must be an id or a list of ids, not {token!r}", where=where)
            if token < 0 or (vocabulary is not None and token >= vocabulary):
                size = "" if vocabulary is None else f" of {vocabulary} ids"
                raise CheckpointError(f"EOS id {token} is outside the vocabulary{size}", where=where)
            found.add(token)
    return tuple(sorted(found))
