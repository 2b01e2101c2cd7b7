"""Options that all of them have, and the engine that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from _options import whole

from foldspec.cli_shared import add_engine, engine_options
from foldspec.errors import UsageError
from foldspec.tasks import MADE
from reproduce.roofline import GPUS

if TYPE_CHECKING:
    from foldspec.bench.inputs import Cell
    from foldspec.engine import Engine

WAYS = ("offline", "live", "both")


def add(parser: argparse.ArgumentParser) -> None:
    """Pair, engine and requests. One thread unless told otherwise: tasks may run in processes of their own."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results and every request are kept")
    add_dry_run(parser, "h100")
    parser.add_argument("--pair", metavar="PAIR", help="a name of `foldspec models`; default: smollm2-135m")
    parser.add_argument("--target", metavar="T", help="a folder, a hub id, or an embedded one's name")
    parser.add_argument("--drafter", metavar="D", help="the same")
    what = parser.add_argument_group("requests")
    what.add_argument("--tasks", type=tasks, default=list(MADE), metavar="LIST", help=f"of {', '.join(MADE)}")
    what.add_argument("--lengths", default="512,2k,4k", metavar="LIST", help="tokens of prompt; default: %(default)s")
    what.add_argument(
        "--limit", type=whole(1, 10_000), default=4, metavar="N", help="a task and length; default: %(default)s"
    )
    what.add_argument(
        "--max-new", type=whole(2), default=48, metavar="N", help="tokens of output; default: %(default)s"
    )
    what.add_argument("--window", type=whole(1), metavar="N", help="W of all methods; default: the pair's")
    what.add_argument(
        "--seed", type=whole(0, 1 << 62), default=0, metavar="N", help="of the sample; default: %(default)s"
    )
    add_engine(parser)
    parser.set_defaults(threads=1)


def add_dry_run(parser: argparse.ArgumentParser, gpu: str) -> None:
    """``gpu``: that of the paper."""
    dry = parser.add_argument_group("before it is measured")
    dry.add_argument("--dry-run", action="store_true", help="say what would be; needs no --out, weights or network")
    dry.add_argument(
        "--gpu", choices=sorted(GPUS), default=gpu, help="that time is estimated for; default: %(default)s"
    )


def add_sources(parser: argparse.ArgumentParser, way: str, ways: tuple[str, ...] = WAYS[:2]) -> None:
    """For what is made of tau and speedup: where they come from."""
    source = parser.add_argument_group("where figures come from (default: measured now, kept in OUT/work)")
    source.add_argument("--way", choices=ways, default=way, help=f"default: {way}")
    source.add_argument("--live-lengths", metavar="LIST", help="tokens of prompt; default: those of --lengths")
    kept = source.add_mutually_exclusive_group()
    kept.add_argument("--work", type=Path, metavar="DIR", help="a work folder: what lies there, nothing is measured")
    kept.add_argument("--bench", type=Path, nargs="+", metavar="DIR", help="folders of `foldspec bench --out`")


def cells(engine: Engine, chosen: argparse.Namespace, task: str, lengths: str) -> tuple[list[Cell], list[str]]:
    """The requests of a task, as ``foldspec bench`` takes them, and a notice for each length that was cut down."""
    from foldspec.bench.inputs import make_cells, parse_lengths
    from foldspec.bench.sources import About, make_sources

    longest = engine.max_context - chosen.max_new
    about = About(engine.vocabulary, engine.max_context, engine.tokenizer, engine.template)
    counts, cut = parse_lengths(lengths, longest)
    sources = make_sources([task], about, seed=chosen.seed, max_new=chosen.max_new)
    return make_cells(sources, counts, limit=chosen.limit), cut


def tasks(text: str) -> list[str]:
    """A reader of comma-separated tasks, each taken once."""
    names = list(dict.fromkeys(filter(None, text.split(","))))
    if not names or not set(names) <= set(MADE):
        raise argparse.ArgumentTypeError(f"{text!r:.60} names others than {', '.join(MADE)}")
    return names


def load(chosen: argparse.Namespace) -> Engine:
    """The engine over the pair. Raises :class:`UsageError` for one without a drafter that reads a context."""
    from foldspec.engine import Engine

    words = {"--drafter": chosen.drafter, "--target": chosen.target}
    named = next((f"{name} {word}" for name, word in words.items() if word is not None), None)
    pair = "smollm2-135m" if chosen.pair is None and named is None else chosen.pair
    engine = Engine.load(
        pair, target=chosen.target, drafter=chosen.drafter, window=chosen.window, **engine_options(chosen)
    )
    network = engine.resources.found.network
    if network is None or not network.reads_context:
        raise UsageError("has no drafter that reads a context", where=named or f"--pair {pair}")
    return engine
