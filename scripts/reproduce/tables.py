"""What the tables of FOLD's published benchmarks share: their options, and the run from a study to the report."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _options import whole

from foldspec.bench.settings import BenchSettings
from foldspec.bench.sources import About
from foldspec.cli_shared import add_engine, engine_options
from foldspec.engine import Engine
from foldspec.errors import UsageError
from foldspec.tasks import TASKS
from foldspec.values import token_count
from reproduce import beside, counts, live, options, report
from reproduce.requests import Request, Taken
from reproduce.study import Column, Part, Study

__all__ = ["add", "by_task", "loaded", "measured", "pairs_of", "run"]

Keep = Callable[[Request], bool]


def add(parser: argparse.ArgumentParser, study: Study) -> None:
    """Pairs, requests and engine: by default all that the paper has."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results and every request are kept")
    options.add_dry_run(parser, study.gpu)
    parser.add_argument("--pair", type=names, metavar="LIST", help=f"default: {','.join(study.pairs)}")
    parser.add_argument("--target", metavar="T", help="in place of the pair's: a folder or a hub id")
    parser.add_argument("--drafter", metavar="D", help="the same")
    what = parser.add_argument_group("requests (default: the paper's)")
    what.add_argument("--tasks", type=tasks, default=[], metavar="LIST", help=f"of {', '.join(TASKS)}")
    what.add_argument("--lengths", type=lengths, default=[], metavar="LIST", help="as 512,2k: of tasks that have them")
    what.add_argument("--limit", type=whole(1, 10_000), metavar="N", help="requests a task and length at most")
    what.add_argument("--max-new", type=whole(2), metavar="N", help="tokens of output; default: each task's own")
    what.add_argument("--data", action="append", metavar="TASK=PATH", help="a task's file or folder; repeatable")
    what.add_argument("--window", type=whole(1), metavar="N", help="W of all methods; default: the pair's")
    what.add_argument("--seed", type=whole(0, 1 << 62), default=0, metavar="N", help="of made tasks; default: 0")
    add_engine(parser)


def run(study: Study, chosen: argparse.Namespace) -> report.Report:
    """Measure every pair, and lay it beside the paper's figures."""
    rows, notes, origins = list[dict[str, Any]](), list[str](), list[Any]()
    for pair, columns, taken in measured(study, chosen):
        rows += beside.rows_of(study, pair, columns, taken)
        notes += told(study, pair, taken, rows)
        origins += taken.origins
    return report.Report({"rows": rows}, beside.table(rows), None, origins, [*said(rows), *notes, *study.notes])


def said(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [beside.SAID, *([beside.OUTSIDE] if any(row["paper"] for row in rows) else [])]


def told(study: Study, pair: str, taken: Taken, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of one pair: its requests, the noise, and that the paper has nothing of it, if so."""
    unknown = not any(row["paper"] for row in rows if row["pair"] == pair)
    nothing = [f"The paper has no figures of {pair} on these tasks."] if unknown else []
    return [report.sample(taken), report.noise(taken), *nothing]


def measured(study: Study, chosen: argparse.Namespace) -> Iterator[tuple[str, list[Column], Taken]]:
    """Pair by pair: what OUT/work lacks is measured, by the bench's own code; then all is read. Data that is missing is
    said before anything of a pair is measured."""
    for pair in pairs_of(study, chosen):
        name, columns = pair or "the target", study.chosen(pair or "", chosen.tasks, chosen.lengths)
        work = chosen.out / "work" / name.replace("/", "_")
        engine = loaded(study, chosen, pair)
        network = engine.resources.found.network
        if network is None or not network.reads_context:
            raise UsageError("has no drafter that reads a context", where=f"--pair {pair}" if pair else "--drafter")
        about = About(engine.vocabulary, engine.max_context, engine.tokenizer, engine.template)
        sets = by_task(columns)
        for task, parts in sets.items():
            _first(about, task, parts[0], chosen)
        for task, parts in sets.items():
            _bench(engine, about, study.arms, parts, chosen, work / f"live-{task}")
        del engine
        gc.collect()  # its memory is the next pair's
        yield name, columns, live.read([work / f"live-{task}" for task in sets], sets)


def pairs_of(study: Study, chosen: argparse.Namespace) -> list[str | None]:
    """Pairs by name; None for a target and drafter that are given by themselves."""
    if chosen.target is None and chosen.drafter is None:
        return list(chosen.pair or study.pairs)
    if chosen.pair and len(chosen.pair) > 1:
        raise UsageError("is for one pair", where="--target and --drafter", do="name it with --pair, or none")
    return [chosen.pair[0] if chosen.pair else None]


def by_task(columns: Sequence[Column]) -> dict[str, list[Part]]:
    """The parts of each task, each once."""
    found: dict[str, list[Part]] = {}
    for part in (part for column in columns for part in column.parts):
        if part not in found.setdefault(part.task, []):
            found[part.task].append(part)
    return found


def loaded(study: Study, chosen: argparse.Namespace, pair: str | None) -> Engine:
    """The engine of a pair, in the paper's context."""
    known = engine_options(chosen)
    known["max_context"] = chosen.max_context or study.context_of(pair)
    return Engine.load(pair, target=chosen.target, drafter=chosen.drafter, window=chosen.window, **known)


def _first(about: About, task: str, part: Part, chosen: argparse.Namespace) -> None:
    """Ask a task for its first item, which tells whether its data is there."""
    source = counts.source_of(about, task, chosen)
    next(iter(source.items(min(part.lengths or (about.max_context,)), 1)), None)


def _bench(
    engine: Engine, about: About, arms: Sequence[str], parts: Sequence[Part], chosen: argparse.Namespace, folder: Path
) -> None:
    cells = counts.cells_of(about, parts, chosen)
    settings = BenchSettings(
        methods=",".join(arms),
        tasks=parts[0].task,
        lengths=",".join(str(cell.length) for cell in cells),
        limit=max(len(cell.inputs) for cell in cells),
        max_new=chosen.max_new,
        seed=chosen.seed,
        data=[each for each in chosen.data or () if each.startswith(f"{parts[0].task}=")],
    )
    live.keep(engine, settings, cells, folder)


def names(text: str) -> list[str]:
    return list(dict.fromkeys(filter(None, text.split(","))))


def tasks(text: str) -> list[str]:
    """Comma-separated tasks, each taken once."""
    found = names(text)
    if not found or not set(found) <= set(TASKS):
        raise argparse.ArgumentTypeError(f"{text!r:.60} names others than {', '.join(TASKS)}")
    return found


def lengths(text: str) -> list[int]:
    """Comma-separated counts of tokens, in rising order."""
    try:
        found = sorted({token_count(word.lower()) for word in names(text)})
    except ValueError:
        found = []
    if not found or not 1 <= found[0] <= found[-1] <= 1 << 30:
        raise argparse.ArgumentTypeError(f"{text!r:.60} names no lengths, as 512,2k")
    return found
