"""What a bench runs on: for each task and length a cell of inputs, and one input more that only warms up."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from foldspec.bench.timing import sha256_of
from foldspec.errors import UsageError
from foldspec.tasks.base import Score
from foldspec.values import token_count

__all__ = ["Cell", "Input", "Item", "Source", "make_cells", "parse_lengths", "random_source"]


class Item(Protocol):
    """One request of a task: its name inside the task, the prompt's token ids, and what its output is judged by."""

    @property
    def id(self) -> str: ...

    @property
    def prompt(self) -> tuple[int, ...]: ...

    @property
    def answer(self) -> Any: ...


@dataclass(frozen=True)
class Source:
    """A task for one target. ``items`` (length, count) gives at most so many items that may be used at a length; where
    the items are ``published``, it may go on. ``longest``: the longest prompt after which ``max_new`` tokens fit.
    ``whole``: a length is what prompts are shorter than, and an item belongs to the first of all lengths that is
    longer. ``sized``: a length is the data's own name of a size, whatever fits. ``judge`` (answer, output); ``facts``:
    what is to be said of the data that was read."""

    items: Callable[[int, int], Iterable[Item]]
    longest: int
    max_new: int = 128
    whole: bool = False
    published: bool = False
    sized: bool = False
    judge: Callable[[Any, str], Score | None] | None = None
    facts: Callable[[], Mapping[str, str | None]] = dict


@dataclass(frozen=True)
class Input:
    """``max_new``: tokens of output at most (None: as the bench says); ``judge`` makes the score of an output, None of
    one that nothing is known of."""

    task: str
    length: int
    id: str
    ids: tuple[int, ...] = field(repr=False)
    sha256: str
    max_new: int | None = None
    judge: Callable[[str], Score | None] | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.task, self.length, self.id


@dataclass(frozen=True)
class Cell:
    """``length`` is what was asked for and fits. ``spare`` is in no sample. ``made_up``: the task had no item left for
    it, so it is the first one turned around. ``too_long``: items that do not fit the context with the output, or are
    longer than all lengths; ``repeated``: prompts of a published set that are there already."""

    task: str
    length: int
    inputs: tuple[Input, ...]
    spare: Input
    made_up: bool
    too_long: int
    repeated: int = 0
    facts: Mapping[str, str | None] = field(default_factory=dict)


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


def make_cells(
    tasks: Mapping[str, Source], lengths: Sequence[int], *, limit: int, named: Sequence[int] | None = None
) -> list[Cell]:
    """Cells in order of length. ``named``: the lengths before they were cut to what fits, for tasks that are sized
    (None: nothing was cut). Raises :class:`UsageError` for a task that has nothing of some length; one whose items
    are whole has no cell there, but must have one."""
    cells: list[Cell] = []
    for name, source in tasks.items():
        sizes = named if source.sized and named is not None else lengths
        sets = [list(sizes)] if source.whole else [[length] for length in sizes]
        for asked in sets:
            found = _gather(name, source, asked, limit)
            made = [_cell(name, source, length, found[length], limit) for length in asked if found[length].inputs]
            if not made:
                long = found[asked[-1]].too_long
                what = f"has no item of {asked[-1]} tokens" + (f"; {long} are too long" if long else "")
                fits = f"{source.longest} leave room for {source.max_new} of output" if long else ""
                raise UsageError(what, where=f"--tasks {name}", do=fits)
            cells += made
    return sorted(cells, key=lambda cell: cell.length)


@dataclass
class _Found:
    inputs: list[Input] = field(default_factory=list)
    too_long: int = 0
    repeated: int = 0


def _gather(name: str, source: Source, lengths: Sequence[int], limit: int) -> dict[int, _Found]:
    """By length, inputs that fit: one more than the limit, where there are as many."""
    found = {length: _Found() for length in lengths}
    hashes: set[str] = set()
    for item in source.items(lengths[-1], limit + 1):
        size = len(item.prompt)
        if size > source.longest or (source.whole and size > lengths[-1]):
            found[lengths[-1]].too_long += 1
            continue
        length = lengths[min(bisect_right(lengths, size), len(lengths) - 1)]
        mine, sha256 = found[length], sha256_of(item.prompt)
        if source.published and sha256 in hashes:
            mine.repeated += 1
        elif len(mine.inputs) <= limit:
            judge = partial(source.judge, item.answer) if source.judge else None
            mine.inputs.append(Input(name, length, item.id, item.prompt, sha256, source.max_new, judge))
            hashes.add(sha256)
        if all(len(each.inputs) > limit for each in found.values()):
            break
    return found


def _cell(name: str, source: Source, length: int, found: _Found, limit: int) -> Cell:
    fitting, where = found.inputs, f"--tasks {name}"
    if len({each.id for each in fitting}) < len(fitting):
        raise UsageError("gives two items the same id", where=where)
    sample, spare = fitting[:limit], fitting[-1]
    hashes = {each.sha256 for each in sample}
    if len(hashes) < len(sample) or not all(each.ids for each in sample):  # a template that drops the text?
        raise UsageError("gives two requests the same prompt, or an empty one", where=where)
    made_up = spare.sha256 in hashes
    if made_up:
        turned = sample[0].ids[::-1]
        spare = Input(name, length, "turned around", turned, sha256_of(turned), source.max_new)
    if spare.sha256 in hashes:
        raise UsageError(f"has no other prompt of {length} tokens to warm up on", where=where)
    return Cell(name, length, tuple(sample), spare, made_up, found.too_long, found.repeated, source.facts())


@dataclass(frozen=True)
class _Random:
    id: str
    prompt: tuple[int, ...]
    answer: Any = None


def random_source(vocabulary: int, seed: int) -> Callable[[int, int], Sequence[Item]]:
    """Ids drawn evenly. For testing the bench: how many drafts are accepted on them means nothing."""

    def items(length: int, count: int) -> list[_Random]:
        draws = [(i, random.Random(f"{seed} {length} {i}")) for i in range(count)]
        return [_Random(str(i), tuple(draw.randrange(vocabulary) for _ in range(length))) for i, draw in draws]

    return items
