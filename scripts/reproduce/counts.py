"""The requests of a part for one target: those that fit, made from the user's data or the hub's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from foldspec.bench.inputs import Cell, Input, Source, make_cells
from foldspec.bench.settings import BOUNDS, BenchSettings
from foldspec.bench.sources import About, make_sources
from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import find_pair
from foldspec.options import EngineOptions
from foldspec.tasks import MADE
from reproduce.study import Part

__all__ = ["about", "cells_of", "data_of", "source_of", "span"]


def about(chosen: argparse.Namespace, pair: str | None, max_context: int | None) -> About:
    """Tokenizer and template of a pair's target; no weights are fetched. Raises :class:`FoldspecError` where they are
    not to be had."""
    options = EngineOptions(offline=chosen.offline)
    found = find_pair(pair, chosen.target, "none", options=options, kernels=Kernels(), peeking=True)
    if found.tokenizer is None:
        raise UsageError("has no tokenizer.json", where=found.target.config.where)
    longest = max_context or found.model.max_positions
    return About(found.model.vocabulary, longest, found.tokenizer, found.template)


def data_of(chosen: argparse.Namespace) -> BenchSettings:
    """The user's own data by task, checked. The bench's settings know how."""
    return BenchSettings(data=chosen.data or ())


def source_of(about: About, task: str, chosen: argparse.Namespace, *, offline: bool | None = None) -> Source:
    """``offline`` None: as the options say. What it is asked for raises :class:`UsageError` and
    :class:`ResourceError` where data is not there."""
    offline, paths = chosen.offline if offline is None else offline, data_of(chosen).paths
    data = {task: paths[task]} if task in paths else {}
    return make_sources([task], about, seed=chosen.seed, max_new=chosen.max_new, data=data, offline=offline)[task]


def cells_of(
    about: About, parts: Sequence[Part], chosen: argparse.Namespace, *, offline: bool | None = None
) -> list[Cell]:
    """The cells of all ``parts`` of one task."""
    source = source_of(about, parts[0].task, chosen, offline=offline)
    return list(chain.from_iterable(_cells(about, source, part, chosen) for part in parts))


def _cells(about: About, source: Source, part: Part, chosen: argparse.Namespace) -> list[Cell]:
    lengths = part.lengths or (about.max_context,)
    if part.task in MADE:
        lengths = tuple(sorted({min(length, source.longest) for length in lengths}))
    most = BOUNDS["limit"][1] or 0
    wanted = chosen.limit or part.most or most
    found = make_cells({part.task: source}, lengths, limit=most if part.least else wanted)
    if not part.least:
        return found
    return [replace(cell, inputs=_longer(cell, part.least)[:wanted]) for cell in found if _longer(cell, part.least)]


def _longer(cell: Cell, least: int) -> tuple[Input, ...]:
    return tuple(item for item in cell.inputs if len(item.ids) >= least)


def span(sizes: Sequence[int]) -> str:
    """Lengths in tokens, as FOLD's Table 7 prints them: in units of 1,024, two digits below ten."""
    ends = [f"{n / 1024:.1f}" if n < 10 * 1024 else f"{n / 1024:.0f}" for n in (min(sizes), max(sizes))]
    return "-".join(f"{end}K" for end in ends)
