"""``foldspec bench``: parse, measure, print. The table goes to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foldspec.cli_shared import (
    INTERRUPTED,
    add_dummy,
    add_engine,
    add_pair,
    ctrl_c_waits,
    engine_options,
    notices,
)
from foldspec.errors import UsageError

if TYPE_CHECKING:
    from foldspec.bench.settings import BenchSettings
    from foldspec.bench.sources import About
    from foldspec.engine import Engine
    from foldspec.loading import FoundPair

    Settle = Callable[[BenchSettings, FoundPair], BenchSettings]

__all__ = ["add", "add_inputs", "add_output", "add_runs", "measure", "read_settings"]

ABOUT = """\
Plain decoding (ar) is always run, twice on every request: the second run shows the noise. A method is the name of a
context method or of a drafter without weights (lookup, repeat, unigram), then options: fold:alpha=4:window=128. TPOT =
(time of last token - time of first) / (tokens - 1), prefill excluded; tau = committed tokens a round, the target's own
included."""


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command. A default is left to :class:`BenchSettings`."""
    parser.set_defaults(command=_bench)
    parser.description = ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_pair(parser)
    what = parser.add_argument_group("what is measured")
    what.add_argument("--methods", metavar="LIST", help="default: lookup,full,window,fold")
    add_inputs(what, tasks="docs,code,kv", lengths="512,2k,8k", limit=20)
    what.add_argument("--window", type=int, metavar="N", help="W of every method that names none")
    what.add_argument("--alpha", type=float, metavar="X", help="alpha of every method that names none")
    what.add_argument("--draft-tokens", type=int, metavar="N", help="drafts verified a round, where none are named")
    how = parser.add_argument_group("how")
    add_runs(how, warmup=4)
    how.add_argument("--order", metavar="rotate|fixed", help="of the methods on a request; default: rotate")
    how.add_argument("--trace", action="store_true", default=None, help="also time the parts of a round, in runs apart")
    how.add_argument(
        "--calibrate",
        action="store_true",
        default=None,
        help="also fit the throughput model to each method, in runs apart, and print it beside what was measured",
    )
    how.add_argument("--against", metavar="METHOD", help="also each method's speedup over this one")
    add_output(parser)
    add_engine(parser)
    add_dummy(parser)


def add_inputs(group: Any, *, tasks: str, lengths: str, limit: int) -> None:
    """What is measured on; the defaults in words."""
    group.add_argument("--tasks", metavar="LIST", help=f"default: {tasks}; random draws ids, to test the bench")
    group.add_argument(
        "--data",
        action="append",
        metavar="TASK=PATH",
        help="a published task's file or folder, in its official form: read before any hub is asked; repeatable",
    )
    group.add_argument(
        "--lengths",
        metavar="LIST",
        help=f"tokens of prompt; default: {lengths}; of published prompts, which are never cut, what they are below",
    )
    group.add_argument("--limit", type=int, metavar="N", help=f"requests a task and length; default: {limit}")
    group.add_argument("--max-new", type=int, metavar="N", help="tokens of output at most; default: each task's own")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the target's own stop ids")
    group.add_argument("--temperature", type=float, metavar="X", help="of all requests; default: 0, greedy")


def add_runs(group: Any, *, warmup: int) -> None:
    """How it is measured and judged."""
    group.add_argument(
        "--warmup", type=int, metavar="N", help=f"runs of a method and length at most; default: {warmup}"
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the sample and of the bootstrap; default: 0")
    group.add_argument("--bootstrap", type=int, metavar="N", help="resamples; default: 2000")
    group.add_argument("--score", action="store_true", default=None, help="also what libraries say of outputs ([eval])")
    group.add_argument(
        "--allow-code-execution",
        action="store_true",
        default=None,
        help="run what the model writes, as this user: humaneval is scored by it; no sandbox",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="DIR", help="keep every request as it is done, and bench.json")
    output.add_argument("--resume", action="store_true", help="go on with what --out has")
    output.add_argument("--dry-run", action="store_true", help="say what would be measured; reads no weights")
    output.add_argument("--format", default="table", choices=("table", "md", "csv", "json"))
    output.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def _bench(options: argparse.Namespace) -> int:
    settings = read_settings(options)
    if options.load_format == "dummy":
        _check_tasks(settings)
    return measure(options, settings, partial(_runnable, options))


def read_settings(options: argparse.Namespace, **defaults: Any) -> BenchSettings:
    """What the user gave, over the ``defaults`` of a command."""
    with ctrl_c_waits():
        from foldspec.bench.settings import BenchSettings
        from foldspec.bench.sources import RANDOM

    fields = (field.name for field in dataclasses.fields(BenchSettings))
    given = {name: getattr(options, name) for name in fields if getattr(options, name, None) is not None}
    if options.load_format == "dummy":  # no tokenizer, so no text of a task; and one request costs what another does
        defaults = {"tasks": RANDOM, "limit": 5, "max_new": 16} | defaults
    return BenchSettings(**defaults | given)


def measure(options: argparse.Namespace, settings: BenchSettings, settle: Settle, *, early: bool = False) -> int:
    """Load, measure, print; the exit code. ``settle`` changes the settings by the pair, once it is found: with
    ``early`` before its weights are read."""
    if options.resume and options.out is None:
        raise UsageError("needs --out", where="--resume")
    with ctrl_c_waits():
        from foldspec.bench.inputs import make_cells, parse_lengths
        from foldspec.bench.report import render
        from foldspec.bench.session import Session, dry_run, dry_run_lines
        from foldspec.bench.sources import OUTPUT, make_sources

    about, engine, settings, told = _load(options, settings, settle, early)
    longest = about.max_context - (settings.max_new or OUTPUT)
    lengths, cut = parse_lengths(settings.lengths, longest)
    say = _nothing if options.quiet else _told
    say([*told, *cut])
    sources = make_sources(
        settings.task_names,
        about,
        seed=settings.seed,
        max_new=settings.max_new,
        data=settings.paths,
        offline=options.offline,
        score=settings.score,
        execute=settings.allow_code_execution,
    )
    cells = make_cells(sources, lengths, limit=settings.limit)
    if engine is None:
        plan = dry_run(cells, settings)
        print(json.dumps(plan) if options.format == "json" else "\n".join(dry_run_lines(plan)), flush=True)
        return 0
    made_up = f"{engine.made_up}, " if engine.made_up else ""
    out = None if options.out is None else Path(options.out)

    def progress(stage: str, done: int, total: int) -> None:
        say([f"{made_up}{stage}, {done} of {total}"])

    session = Session(
        engine,
        settings,
        cells,
        out=out,
        resume=options.resume,
        notices=cut,
        progress=progress,
        unbroken=ctrl_c_waits,
    )
    code = 0
    try:
        try:
            session.run()
        except KeyboardInterrupt:
            code = INTERRUPTED
        with ctrl_c_waits():  # from here on a first press costs nothing that was measured
            result = session.result(["foldspec", *sys.argv[1:]])
            if code:
                done = sum(cell["n"] + sum(cell["excluded"].values()) for cell in result["tasks"])
                say([f"interrupted; requests done: {done}{f', kept in {out}' if out else ''}"])
            print(json.dumps(result) if options.format == "json" else render(result, options.format), flush=True)
    finally:
        session.close()
    return code


def _check_tasks(settings: BenchSettings) -> None:
    """Those of a dummy, before minutes go into random numbers. Raises :class:`UsageError`."""
    from foldspec.bench.sources import RANDOM
    from foldspec.tasks import TASKS

    for name in settings.task_names:
        if name in TASKS:
            what = "dummy weights come without a tokenizer"
            raise UsageError(what, where=f"--tasks {name}", do=f"use --tasks {RANDOM}")


def _load(
    options: argparse.Namespace, settings: BenchSettings, settle: Settle, early: bool
) -> tuple[About, Engine | None, BenchSettings, Sequence[str]]:
    """What tasks need to know of the pair, the engine (none for a dry run), and what is to be told of it."""
    from foldspec.bench.inputs import parse_lengths
    from foldspec.bench.methods import check_drafts
    from foldspec.bench.session import check_options
    from foldspec.bench.sources import OUTPUT, About
    from foldspec.engine import Engine, forced, split_options
    from foldspec.kernels.dispatch import Kernels
    from foldspec.loading import find_pair
    from foldspec.options import MethodOptions
    from foldspec.resources import pick_context
    from foldspec.terminal import Terminal

    check_options(settings.parsed)  # a wrong name is said before the weights are read
    base = {name: getattr(options, name) for name in ("window", "alpha", "draft_tokens", "force_accept")}
    for method in settings.parsed:
        forced(MethodOptions(**{**base, **method.changes}), options.pair)
    with Terminal(quiet=options.quiet, text=False) as terminal:
        loading = True

        def progress(stage: str, done: int, total: int) -> None:
            if loading:  # a bar redraws itself, which is nothing to measure beside
                terminal.progress(stage, done, total)

        chosen, plain = split_options(engine_options(options) | base)
        found = None
        if early or options.dry_run or options.load_format == "dummy":
            found = find_pair(
                options.pair,
                options.target,
                options.drafter,
                options=chosen,
                kernels=Kernels(),
                progress=progress,
            )
            settings = settle(settings, found)
            if options.load_format == "dummy" and options.max_context is None:  # its longest would fill the memory
                lengths, _ = parse_lengths(settings.lengths, 1 << 40)
                options.max_context = min(found.model.max_positions, lengths[-1] + (settings.max_new or OUTPUT))
        if options.dry_run:
            assert found is not None
            for method in settings.parsed[1:]:
                draft_tokens = method.changes.get("draft_tokens", plain.draft_tokens)
                check_drafts(method.label, draft_tokens, method.changes["drafter"] or found.drafter)
            context = pick_context(options.max_context, found)
            about = About(found.model.vocabulary, context, found.tokenizer, found.template)
            return about, None, settings, found.notices
        if settings.axes is not None:  # the caches have room for the longest draft
            base["draft_tokens"] = max(settings.axes.draft_tokens)
        which = {"target": options.target, "drafter": options.drafter}
        engine = Engine.load(options.pair, progress=progress, **which, **base, **engine_options(options))
        loading = False
    settings = settings if found is not None else settle(settings, engine.resources.found)
    about = About(engine.vocabulary, engine.max_context, engine.tokenizer, engine.template)
    return about, engine, settings, engine.notices


def _runnable(options: argparse.Namespace, settings: BenchSettings, found: FoundPair) -> BenchSettings:
    """The settings; where no methods are named, without those that the drafter has no use for: of a dummy without one,
    all context methods."""
    methods, network = settings.methods, found.network
    if options.methods is None and network is None and options.load_format == "dummy":
        methods = "lookup"
    elif options.methods is None and network is not None and not network.reads_context:
        methods = "lookup,full"
    return dataclasses.replace(settings, methods=methods)


def _told(lines: Sequence[str]) -> None:
    """What happens, on stderr. That nobody reads it, or that its disk is full, ends no measurement."""
    with contextlib.suppress(OSError):
        notices(lines)


def _nothing(lines: Sequence[str]) -> None:
    """What ``--quiet`` says."""
