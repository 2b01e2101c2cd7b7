"""What a task is: prompts of a wanted length, and how they are cut to it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from foldspec.errors import UsageError

__all__ = ["Encode", "Item", "Score", "Task", "Text", "chat", "ending", "shuffled"]

Text: TypeAlias = str | Sequence[Mapping[str, str]]  # raw text, or chat messages
Encode: TypeAlias = Callable[[Text], tuple[int, ...]]  # Engine.encode, or what does the same
T = TypeVar("T")

SURPLUS = 16  # tokens beyond those kept: what lies at the start of a cut text may be encoded differently


@dataclass(frozen=True)
class Item:
    """One request. ``id`` is the same at every length, ``answer`` what :meth:`Task.score` judges by (None: nothing
    known)."""

    id: str
    prompt: tuple[int, ...]
    answer: Any = None


@dataclass(frozen=True)
class Score:
    """How right an output is: ``value`` from 0 to 1; ``answered``: whether there was anything to judge (if not, the
    value is 0); ``second``: what another judge says of the same output."""

    value: float
    answered: bool = True
    second: float | None = None


class Task(ABC):
    """``max_new``: tokens to generate, unless told otherwise. ``scoring``: the rule of :meth:`score`, in words.
    ``chance``: the score that guessing gets.
    ``library``: the module without which :meth:`by_library` cannot judge. ``executes``: judging runs what a model
    wrote. ``whole``: prompts are as long as they are, and a length only bounds them. ``sized``: a length is the data's
    own name of a size."""

    name: ClassVar[str]
    max_new: ClassVar[int]
    scoring: ClassVar[str] = ""
    chance: ClassVar[float] = 0.0
    library: ClassVar[str] = ""
    executes: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    sized: ClassVar[bool] = False

    @property
    @abstractmethod
    def dataset(self) -> str:
        """What it is made from, with version."""

    @abstractmethod
    def items(self, encode: Encode, length: int, limit: int, seed: int) -> Iterable[Item]:
        """At most ``limit`` items (fewer if the task has no more), with prompts of ``length`` tokens.

        ``seed`` fixes which items and in which order; a smaller ``limit`` gives the first of them. An item of the same
        id and seed at another length asks the same: results are paired. Raises :class:`UsageError` for a length that
        cannot be had.
        """

    def facts(self) -> dict[str, str | None]:
        """What a result must say of its data: also the commit (None: there is none, or it is not known), and whether
        the prompt's wording is ``official``, our ``own`` or that of the ``data``, with its sha256."""
        return {"dataset": self.dataset, "revision": None, "prompt": "own", "prompt_sha256": None}

    def score(self, answer: Any, text: str) -> Score | None:
        """By a rule that is all here. None: there is none, or no ``answer`` to judge by."""
        return None

    def by_library(self, answer: Any, text: str) -> float:
        """What :attr:`library` says of it, from 0 to 1."""
        raise NotImplementedError(self.library)


def shuffled(candidates: Iterable[T], seed: int) -> list[T]:
    """The order in which items are taken."""
    order = list(candidates)
    random.Random(seed).shuffle(order)
    return order


def chat(text: str) -> list[dict[str, str]]:
    """``text`` as the one turn of a user."""
    return [{"role": "user", "content": text}]


def ending(
    encode: Encode, length: int, pieces: Iterable[str], frame: Callable[[str], Text], where: str
) -> tuple[int, ...]:
    """Exactly ``length`` ids of a text: what ``frame`` puts before it (BOS, the head of a chat), then its last ids.

    ``pieces`` make the text, the last piece first; only as many as are needed are read. ``frame`` makes the prompt
    of a text, and may add to its end. Ids are cut, not text: the length is exact with any tokenizer, and decoding and
    encoding again may give others at the cut. Raises :class:`UsageError` if all the text is too short.
    """
    first = encode(frame("a"))
    head = _common(first, encode(frame("Zero")))
    if length <= head:
        raise UsageError(f"{length} tokens are too few: {head} go before the text", where=where)
    left = iter(pieces)
    text, whole, budget = "", False, 4 * length
    while True:
        while len(text) < budget and not whole:
            piece = next(left, None)
            text, whole = (text, True) if piece is None else (piece + text, whole)
        cut = text if len(text) <= 2 * budget else text[text.find("\n", len(text) - 2 * budget) + 1 :]
        ids = encode(frame(cut))
        if len(ids) >= length + SURPLUS or (whole and cut is text):
            break
        budget *= 2
    if len(ids) < length:
        raise UsageError(f"{length} tokens are too many: all its text gives {len(ids)}", where=where)
    return (*first[:head], *ids[len(ids) - (length - head) :])


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
