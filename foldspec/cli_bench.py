"""``foldspec bench``: parse, measure, print. The table goes to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
from foldspec.errors import MeasurementError, ResourceError, UsageError
from foldspec.values import whole

if TYPE_CHECKING:
    from foldspec.bench.cluster import Cluster
    from foldspec.bench.inputs import Cell
    from foldspec.bench.session import Session
    from foldspec.bench.settings import BenchSettings
    from foldspec.bench.sources import About
    from foldspec.engine import Engine
    from foldspec.loading import FoundPair

    Settle = Callable[[BenchSettings, FoundPair], BenchSettings]

__all__ = ["add", "add_inputs", "add_output", "add_runs", "measure", "member", "read_settings"]

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
    how.add_argument(
        "--include-draft-prefill",
        action="store_true",
        default=None,
        help="count the drafter's part of prefill in TPOT and speedup, which then say so",
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
    spread = parser.add_argument_group("several devices, through Ray ([ray]); one request is measured on one of them")
    spread.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="local (this machine; also without a word, after PAIR), auto (the cluster that runs here), or HOST:PORT",
    )
    spread.add_argument(
        "--ray-actors",
        type=int,
        metavar="N",
        help="default: one a GPU or, on a CPU, one a machine, which share its cores",
    )


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
    whole("--ray-actors", options.ray_actors, 1, optional=True)
    if options.ray_actors is not None and options.ray is None:
        raise UsageError("needs --ray", where="--ray-actors")
    with ctrl_c_waits():
        from foldspec.bench import crew
        from foldspec.bench.parity import red
        from foldspec.bench.report import render
        from foldspec.bench.session import Session, dry_run, dry_run_lines

    say = _nothing if options.quiet else _told
    with contextlib.ExitStack() as held:
        cluster = None if options.ray is None or options.dry_run else held.enter_context(_join(options))
        about, engine, settings, told = _load(options, settings, settle, early)
        cells, cut = _cells(options, settings, about)
        say([*told, *cut])
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
        held.callback(session.close)
        code = 0
        try:
            if cluster is None:
                session.run()
            else:
                session.let_go()
                cluster.begin(member, _words(options, settings), session.plan, partial(progress, "actors are ready"))
                crew.run(session, cluster, lambda line: say([line]))
        except KeyboardInterrupt:
            code = INTERRUPTED
        with ctrl_c_waits():  # from here on a first press costs nothing that was measured
            result = session.result(["foldspec", *sys.argv[1:]])
            if code:
                done = sum(cell["n"] + sum(cell["excluded"].values()) for cell in result["tasks"])
                say([f"interrupted; requests done: {done}{f', kept in {out}' if out else ''}"])
            elif not result["complete"]:
                code = ResourceError.exit_code
            print(json.dumps(result) if options.format == "json" else render(result, options.format), flush=True)
            if red(result):
                say([f"no speedup is shown of {', '.join(red(result))}: outputs are not plain decoding's"])
                code = code or MeasurementError.exit_code
    return code


def member(options: Mapping[str, Any], settings: BenchSettings, folder: str) -> Session:
    """What an actor of Ray measures with: the session of the process that started it, made again of the same words.
    ``folder``: where relative paths begin."""
    from foldspec.bench.session import Session

    with contextlib.suppress(OSError):  # on another machine it may not be there, and need not, if no path needs it
        os.chdir(folder)
    own = argparse.Namespace(**options)
    about, engine, settings, _ = _load(own, settings, lambda settled, found: settled, early=False)
    cells, _ = _cells(own, settings, about)
    assert engine is not None
    return Session(engine, settings, cells)


def _words(options: argparse.Namespace, settings: BenchSettings) -> dict[str, Any]:
    """What :func:`member` is told: plain data."""
    told = {name: value for name, value in vars(options).items() if name != "command"}
    return {"options": told | {"quiet": True}, "settings": settings, "folder": os.getcwd()}


def _join(options: argparse.Namespace) -> Cluster:
    """The cluster that ``--ray`` names. Threads are from here on those of an actor, in this process too."""
    with ctrl_c_waits():
        from foldspec.bench.cluster import Cluster
        from foldspec.resources import pick_device

    if ":" in options.device:
        what = "is one device: with --ray every actor has its own"
        raise UsageError(what, where=f"--device {options.device}", do="use auto, cpu or cuda")
    cluster = Cluster(options.ray, options.ray_actors, cuda=pick_device(options.device).type == "cuda")
    options.threads = options.threads or cluster.threads
    return cluster


def _cells(options: argparse.Namespace, settings: BenchSettings, about: About) -> tuple[Sequence[Cell], Sequence[str]]:
    """What is measured on, and a notice for each length that was cut."""
    from foldspec.bench.inputs import make_cells, parse_lengths
    from foldspec.bench.sources import OUTPUT, make_sources

    longest = about.max_context - (settings.max_new or OUTPUT)
    lengths, cut = parse_lengths(settings.lengths, longest)
    named, _ = parse_lengths(settings.lengths, 1 << 40)
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
    return make_cells(sources, lengths, limit=settings.limit, named=named), cut


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
