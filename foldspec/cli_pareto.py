"""``foldspec pareto``: a bench whose methods are made from axes, and what each of them costs in quality."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from foldspec.cli_bench import add_inputs, add_output, add_runs, measure, read_settings
from foldspec.cli_shared import add_engine, add_pair, ctrl_c_waits
from foldspec.errors import UsageError

if TYPE_CHECKING:
    from foldspec.bench.axes import Asked
    from foldspec.bench.settings import BenchSettings
    from foldspec.loading import FoundPair

__all__ = ["add"]

ABOUT = """\
Every number of drafts, every effort and every leniency together is a point, measured as bench measures a method; plain
decoding (the verifier alone) and, of each number of drafts and effort, the drafter alone come along. Of each: speed
(latency and throughput, prefill included) and quality (the task's score; mean log-probability a token under the target;
agreement, 1 minus the total variation spent a judged draft), and the throughput model's prediction.

Draft with a temperature (--temperature 1) to sweep laws, as the second paper does. At temperature 0, the default, the
target's laws are point masses and drafts are argmaxes: with linear a draft that misses stands with probability lambda,
with lenience if it is likely enough, and cactus is the rule exact whatever its leniency."""
EFFORT = "each value of --steps, --confidence and --entropy-bound is one; a drafter of one step takes none of them"
INPUTS: Final[dict[str, Any]] = {"tasks": "kv", "lengths": "512", "limit": 5}  # a sweep has many methods
WARMUP: Final = 2


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_pareto, load_format="auto", dummy_layers=None)
    parser.set_defaults(window=None, alpha=None, draft_tokens=None, force_accept=None)  # bench's: points name their own
    parser.description = ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_pair(parser)
    axes = parser.add_argument_group(f"axes (lists, as 1,2,4; efforts: {EFFORT})")
    axes.add_argument(
        "--draft-tokens", dest="axis_draft_tokens", metavar="LIST", help="drafts a round; default: what the pair drafts"
    )
    axes.add_argument(
        "--steps", metavar="LIST", help="denoising steps a draft; default, where no effort is given: 1,2,4"
    )
    axes.add_argument("--confidence", metavar="LIST", help="reveal all places that are surer, as .5,.9")
    axes.add_argument("--entropy-bound", metavar="LIST", help="reveal places within so many nats, as .1,.5")
    axes.add_argument(
        "--leniency",
        metavar="LIST",
        help="lambda of linear (default: 0,0.4,1; 0 is lossless), l of lenience (1,0.5,0.2; 1 is), delta of cactus "
        "(0,0.1,1; 0 is)",
    )
    point = parser.add_argument_group("every point")
    point.add_argument(
        "--accept",
        default="linear",
        metavar="RULE",
        help="linear (default), lenience, cactus, exact, match or typical; its options behind colons, as "
        "cactus:divergence=exact_kl",
    )
    point.add_argument("--context", default="full", metavar="NAME", help="as a method of bench: full, fold:alpha=4")
    point.add_argument("--draft-temperature", type=float, metavar="X", help="default: --temperature's; 0: argmax")
    add_inputs(parser.add_argument_group("what is measured"), **INPUTS)
    add_runs(parser.add_argument_group("how"), warmup=WARMUP)
    add_output(parser)
    add_engine(parser)


def _pareto(options: argparse.Namespace) -> int:
    from foldspec.bench.axes import Asked

    asked = Asked(
        options.axis_draft_tokens,
        options.steps,
        options.confidence,
        options.entropy_bound,
        options.accept,
        options.leniency,
        options.context,
        options.draft_temperature,
    )
    settings = read_settings(options, **INPUTS, warmup=WARMUP, calibrate=True)
    return measure(options, settings, partial(_settle, options.drafter, asked), early=True)


def _settle(drafter: str | None, asked: Asked, settings: BenchSettings, found: FoundPair) -> BenchSettings:
    """The settings with the sweep's methods. Raises :class:`UsageError` for a point that the pair cannot run."""
    with ctrl_c_waits():
        from foldspec.bench.session import check_options
        from foldspec.drafters import MODEL_FREE, make_model_free
        from foldspec.options import MethodOptions
        from foldspec.resources import DRAFTS, filled_in

    network, free = found.network, drafter if drafter in MODEL_FREE else None
    if network is None and free is None:
        do = "name a pair with one, or --drafter lookup"
        raise UsageError("there is no drafter, so there is nothing to sweep", where="pareto", do=do)
    most = make_model_free(free).max_drafts if free else network.most if network else None
    axes = asked.axes(
        drafter=free,
        takes_steps=network is not None and "steps" in network.efforts,
        drafts=most or filled_in(MethodOptions(), found).draft_tokens or DRAFTS,
        temperature=settings.temperature,
    )
    if most is not None and max(axes.draft_tokens) > most:
        raise UsageError(f"the drafter proposes {most} at most, not {max(axes.draft_tokens)}", where="--draft-tokens")
    needed = max(axes.draft_tokens) + 2
    if settings.max_new is not None and settings.max_new < needed:
        what = f"no round would draft all of its {needed - 2} tokens"
        raise UsageError(what, where=f"--max-new {settings.max_new}", do=f"{needed} or more")
    settings = dataclasses.replace(settings, methods=axes.methods, axes=axes)
    check_options(settings.parsed)
    for method in settings.parsed[1:]:
        try:
            filled_in(MethodOptions(**method.changes), found)
        except UsageError as error:
            where = f"--{error.where.replace('_', '-')}" if error.where else ""
            raise UsageError(error.what, where=where, do=error.do) from None
    return settings
