"""What a bench runs on: for each task and length a cell of inputs, and one input more that only warms up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foldspec.bench.timing import sha256_of
from foldspec.errors import UsageError
from foldspec.values import token_count

__all__ = ["Cell", "Input", "Item", "Source", "make_cells", "parse_lengths", "random_source"]


class Item(Protocol):
    """One request of a task: its name inside the task, the prompt's token ids, and what a right output has in it."""

    @property
    def id(self) -> str: ...

    @property
    def prompt(self) -> tuple[int, ...]: ...

    @property
    def answer(self) -> str | None: ...


Source = Callable[[int, int], Sequence[Item]]  # (length, count) -> at most so many items of at most so many tokens


@dataclass(frozen=True)
class Input:
    task: str
    length: int
    id: str
    ids: tuple[int, ...] = field(repr=False)
    sha256: str
    answer: str | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.task, self.length, self.id


@dataclass(frozen=True)
class Cell:
    """``length`` is what was asked for and fits. ``spare`` is in no sample. ``made_up``: the task had no item left for
    it, so it is the first one turned around. ``too_long``: items that do not fit the context with the output."""

    task: str
    length: int
    inputs: tuple[Input, ...]
    spare: Input
    made_up: bool
    too_long: int


def parse_lengths(text: str, longest: int) -> tuple[list[int], list[str]]:
    """``512,2k,8k`` (k is 1,024) in ascending order, and a notice for each that is cut down to ``longest``, the longest
    prompt that fits the context with its output. Raises :class:`UsageError`."""
    lengths, notices = set(), []
    for word in filter(None, (part.strip().lower() for part in text.split(","))):
        try:
            length = token_count(word)
        except ValueError:
            length = 0
        if not 1 <= length <= 10**12:
            raise UsageError(f"{word[:20]!r} is no length", where="--lengths", do="for example 512,2k,8k")
        if length > longest:
            notices.append(f"length {word} is {longest} here: the longest prompt that leaves room for --max-new")
        lengths.add(min(length, longest))
    if not lengths or longest < 1:
        raise UsageError("there is no length that fits", where="--lengths", do="name one, or lower --max-new")
    return sorted(lengths), notices


def make_cells(tasks: dict[str, Source], lengths: Sequence[int], *, limit: int, longest: int) -> list[Cell]:
    """Raises :class:`UsageError` for a task that has nothing of some length."""
    cells = []
    for length in lengths:
        for name, source in tasks.items():
            items = source(length, limit + 1)
            inputs = [_input(name, length, item) for item in items]
            fitting = [each for each in inputs if len(each.ids) <= longest]
            if not fitting:
                raise UsageError(f"has no item of {length} tokens", where=f"--tasks {name}")
            if len({each.id for each in fitting}) < len(fitting):
                raise UsageError("gives two items the same id", where=f"--tasks {name}")
            sample, spare = fitting[:limit], fitting[-1]
            hashes = {each.sha256 for each in sample}
            if len(hashes) < len(sample) or not all(each.ids for each in sample):  # a template that drops the text?
                raise UsageError("gives two requests the same prompt, or an empty one", where=f"--tasks {name}")
            made_up = spare.sha256 in hashes
            if made_up:
                turned = sample[0].ids[::-1]
                spare = Input(name, length, "turned around", turned, sha256_of(turned))
            if spare.sha256 in hashes:
                raise UsageError(f"has no other prompt of {length} tokens to warm up on", where=f"--tasks {name}")
            cells.append(Cell(name, length, tuple(sample), spare, made_up, len(inputs) - len(fitting)))
    return cells


def _input(task: str, length: int, item: Item) -> Input:
    return Input(task, length, item.id, item.prompt, sha256_of(item.prompt), item.answer)


@dataclass(frozen=True)
class _Random:
    id: str
    prompt: tuple[int, ...]
    answer: str | None = None


def random_source(vocabulary: int, seed: int) -> Source:
    """Ids drawn evenly. For testing the bench: how many drafts are accepted on them means nothing."""

    def items(length: int, count: int) -> list[_Random]:
        draws = [(i, random.Random(f"{seed} {length} {i}")) for i in range(count)]
        return [_Random(str(i), tuple(draw.randrange(vocabulary) for _ in range(length))) for i, draw in draws]

    return items
