"""Where the time of a plain step and of a speculative round goes, by length: attention of the target and of the
drafter, all else of each, and what is neither.

Contexts and weights are made up (``--load-format dummy``, the default here), since times hang on neither, and no drafts
stand. On a CPU times are those of the process, so that what else runs there counts little; on a GPU every part waits
for the device, which adds its latency to each.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from foldspec.bench.inputs import parse_lengths
from foldspec.cli_shared import add_dummy
from foldspec.engine import Engine
from foldspec.errors import UsageError
from foldspec.options import SamplingParams
from reproduce import figure, report
from reproduce.clock import PARTS, Clock
from reproduce.options import load
from reproduce.requests import short

MIRRORS = "Figure 1 of the FOLD paper: latency breakdown of an AR step and of a DFlash SD round"
DIFFERS = "its pairs, machine and engine are others; attention is all of it, the block's own and its cache's together"
COLORS = dict(zip(PARTS, ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#999999"), strict=True))
WAYS: dict[str, dict[str, Any]] = {"AR": {"draft_tokens": 0}, "SD": {"context": "full"}}
SAID = (
    ("AR", "target attention", "Of a plain step target attention"),
    ("SD", "drafter attention", "Of a round drafter attention"),
)


def options(parser: argparse.ArgumentParser) -> None:
    add_dummy(parser)
    parser.set_defaults(lengths="512,1k,2k,4k,8k", max_new=12, load_format="dummy")


def run(chosen: argparse.Namespace) -> report.Report:
    engine = load(chosen).using(force_accept=chosen.force_accept)
    clock, cells = Clock(engine.resources.kernels, engine.resources.device), list[dict[str, Any]]()
    for length in parse_lengths(chosen.lengths, engine.max_context - chosen.max_new)[0]:
        for way, changes in WAYS.items():
            found = timed(engine.using(**changes), clock, length, chosen.max_new)
            total = sum(found.values())
            shares = {part: ms / total for part, ms in found.items()}
            cells.append({"way": way, "length": length, "ms": found, "total_ms": total, "share": shares})
            print(f"figure1 {way} {length}", file=sys.stderr, flush=True)
    rows = [
        [
            cell["way"],
            short(cell["length"]),
            f"{cell['total_ms']:.1f}",
            *(f"{cell['share'][part]:.1%}" for part in PARTS),
        ]
        for cell in cells
    ]
    notes = [
        f"{what} takes {_share(cells, way, part)} from the shortest to the longest context." for way, part, what in SAID
    ]
    plan = {"settings": engine.settings(), "max_new": chosen.max_new}
    table = report.markdown(["", "length", "ms", *PARTS], rows)
    return report.Report({"cells": cells}, table, draw(cells), [report.origin(engine, plan)], notes)


def _share(cells: list[dict[str, Any]], way: str, part: str) -> str:
    found = [cell["share"][part] for cell in cells if cell["way"] == way]
    return f"{found[0]:.1%} to {found[-1]:.1%}"


def timed(engine: Engine, clock: Clock, length: int, tokens: int) -> dict[str, float]:
    """Milliseconds a round by part. Two rounds go before, unmeasured. Raises :class:`UsageError` where none is left."""
    prompt = [i % engine.vocabulary for i in range(length)]
    engine.listen(clock)
    number = 0
    for number, _ in enumerate(engine.stream(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))):
        if number == 2:
            clock.start()
    if number < 2 or not clock.rounds:
        raise UsageError(f"{tokens} tokens end within the two rounds that are not measured", where="--max-new")
    return {part: 1000 * seconds / clock.rounds for part, seconds in clock.seconds.items()}


def draw(cells: list[dict[str, Any]]) -> Any:
    drawn, panels = figure.panels(1, 2, width=3.4, height=2.9)
    for panel, way, title in zip(panels, WAYS, ("a plain step", "a round"), strict=True):
        here = [cell for cell in cells if cell["way"] == way]
        below = [0.0] * len(here)
        for part, color in COLORS.items():
            heights = [cell["ms"][part] for cell in here]
            panel.bar(range(len(here)), heights, bottom=below, color=color, label=part)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        panel.set_ylim(0, 1.05 * max(cell["total_ms"] for cell in cells))
        panel.set_xticks(range(len(here)), [short(cell["length"]) for cell in here])
        panel.set_xlabel("tokens of context")
        panel.set_ylabel("ms")
        panel.set_title(title)
    figure.one_legend(drawn, panels)
    return drawn
