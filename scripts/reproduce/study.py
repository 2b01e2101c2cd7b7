"""What a table of a paper is made of: pairs, methods, and tasks as its columns put them together."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foldspec.bench.axes import Axes
from foldspec.errors import UsageError
from foldspec.loading import FoundPair
from foldspec.tasks import MADE, make_task
from reproduce import paper
from reproduce.requests import short

__all__ = ["CODE", "GENERAL", "PAPERS", "Column", "Part", "Study", "mean_of", "one"]

K = 1024
FEW = 20  # requests a length of a task that has as many as are asked for
LEVELS = (32 * K, 64 * K, 128 * K)
# the paper's methods in its order: DFlash (or DSpark), StreamingLLM, YaRN, CMR, ReRoPE, InfLLM, FOLD
PAPERS = ("full", "streaming", "yarn", "cmr", "rerope", "infllm", "fold")


@dataclass(frozen=True)
class Part:
    """A task at ``lengths``, tokens of prompt (none: whatever fits the context), ``most`` requests of each (None: all
    that there are), none of a prompt shorter than ``least``."""

    task: str
    lengths: tuple[int, ...] = ()
    most: int | None = None
    least: int = 0

    @property
    def label(self) -> str:
        return f"{self.task} {short(self.lengths[0])}" if len(self.lengths) == 1 else self.task


@dataclass(frozen=True)
class Column:
    """A mean of means: each of ``shares`` has its weight in the column, and is the mean over all requests of its parts
    together. The paper's own figures say so of LCA: over its lengths, its gains of Table 4 come to those of Table 2
    only if requests count alike. ``known``: whether the paper has this column."""

    name: str
    shares: tuple[tuple[float, tuple[Part, ...]], ...]
    known: bool = True

    @property
    def parts(self) -> list[Part]:
        return [part for _, parts in self.shares for part in parts]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(part.task for part in self.parts))


def one(name: str, *parts: Part) -> Column:
    """The mean over all requests."""
    return Column(name, ((1.0, parts),))


def mean_of(name: str, columns: Sequence[Column], *, known: bool = True) -> Column:
    """Each column with the same weight."""
    shares = tuple((weight / len(columns), parts) for column in columns for weight, parts in column.shares)
    return Column(name, shares, known)


_EN = [one(task, Part(task)) for task in ("en_sum", "en_qa", "en_mc", "en_dia")]
GENERAL = [
    one("Gov", Part("govreport")),
    one("LBv2", Part("longbench_v2")),
    one("Retr.KV", Part("retr_kv")),
    mean_of("En.", _EN),
]
CODE = [
    one("LCA", *(Part("lca", (length * K,)) for length in (32, 64, 122))),
    one("RepoBench", Part("repobench", LEVELS), Part("repobench_java", LEVELS, 134)),
    one("SWE-bench", Part("swebench", most=288)),
]


@dataclass(frozen=True)
class Study:
    """One table or figure. ``facts``: the file of ``papers/`` with its numbers, if any. ``columns`` of a pair;
    ``average``: the name of the mean of them, where the paper has it; ``max_context`` where it is not the target's own;
    ``arms``: what runs beside plain decoding; ``axes`` of a sweep, which makes them; ``notes`` on what is ours;
    ``bench``: it is measured as a bench is, so that its time can be told."""

    facts: str
    pairs: tuple[str, ...]
    columns: Callable[[str], Sequence[Column]]
    average: str = ""
    arms: Sequence[str] = PAPERS
    axes: Callable[[str, FoundPair, argparse.Namespace], Axes] | None = None
    max_context: Mapping[str, int] = field(default_factory=dict)
    gpu: str = "h100"
    notes: tuple[str, ...] = ()
    bench: bool = True

    def context_of(self, pair: str | None) -> int | None:
        """Tokens that a request may hold; None: as many as the target does."""
        return self.max_context.get(pair or "") or self.max_context.get("all pairs")

    def arms_of(self, pair: str, found: FoundPair, chosen: argparse.Namespace) -> list[str]:
        """What runs beside plain decoding of one pair, as methods of a bench."""
        if self.axes is None:
            return list(self.arms)
        return [point.label for point in self.axes(pair, found, chosen).points[1:]]

    def figures(self, pair: str, column: Column) -> Mapping[str, Sequence[float | None]]:
        """The paper's, by method: in the order of its file's ``figures``. Empty where it has none."""
        return paper.cell(self.facts, pair, column.name) if column.known else {}

    def chosen(self, pair: str, tasks: Sequence[str] = (), lengths: Sequence[int] = ()) -> list[Column]:
        """The columns of a pair that are left of ``tasks`` at ``lengths`` (empty: all), and their average. One that
        loses a part is none of the paper's any more: what is left of it is a column for each task. A task of no column
        is one by itself; :class:`UsageError` where it needs a length."""
        own, kept = list(self.columns(pair)), list[Column]()
        for column in own:
            parts = [left for part in column.parts if (left := _left(part, tasks, lengths)) is not None]
            if parts == column.parts:
                kept.append(column)
                continue
            for task in dict.fromkeys(part.task for part in parts):
                kept.append(replace(one(task, *(part for part in parts if part.task == task)), known=False))
        known = {task for column in own for task in column.tasks}
        for task in tasks:
            if task not in known:
                kept.append(replace(one(task, _alone(task, tuple(lengths))), known=False))
        if own and not kept:
            raise UsageError("leave nothing of it", where="--tasks and --lengths", do="name others, or neither")
        if self.average and len(kept) > 1:
            kept.append(mean_of(self.average, kept, known=kept == own))
        return kept


def _left(part: Part, tasks: Sequence[str], lengths: Sequence[int]) -> Part | None:
    if tasks and part.task not in tasks:
        return None
    if not part.lengths or not lengths:
        return part
    both = tuple(length for length in part.lengths if length in lengths)
    return replace(part, lengths=both) if both else None


def _alone(task: str, lengths: tuple[int, ...]) -> Part:
    if make_task(task).whole:  # prompts are as long as they are: a length only bounds them
        return Part(task)
    if not lengths:
        raise UsageError("has prompts of the lengths that are asked for", where=f"--tasks {task}", do="give --lengths")
    return Part(task, lengths, FEW if task in MADE else None)
