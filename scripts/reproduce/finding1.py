"""Finding 1, the control of distance: the draft block alone is moved away from everything before it, and how much of
what it drafts is still right. Content and all distances within the block stay as they are.

Drafts are judged at every position of the target's own greedy text, from one target pass a request (as tau_fs is):
``a = min(L, K) / K``, L leading right drafts of K.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from foldspec.bench.offline import leading_drafts
from foldspec.context import METHODS
from foldspec.context.base import Read
from foldspec.context.full import Full
from foldspec.errors import UsageError
from foldspec.options import SamplingParams
from reproduce import figure, report
from reproduce.options import cells, load
from reproduce.requests import Figure, Request, Taken, short, shown, summed_up, tau_of

if TYPE_CHECKING:
    import torch

MIRRORS = "Finding 1 of the FOLD paper, section 3.2 and appendix A: shifts of 8K, 32K and 128K on SPEED-Bench 2K"
DIFFERS = "this checkout's own tasks; every position of a text, not two; shorter shifts too"
NAMES = {by: f"+{short(by) if by else 0}" for by in (0, 512, 2048, 8192, 32768, 131072)}  # shifts
MOVED = list(NAMES)[1:]


class Shifted(Full):
    """The original drafter with its block ``by`` positions further on."""

    by: ClassVar[int] = 0

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        return [replace(r, query_at=tuple(p + self.by for p in r.query_at)) for r in super().reads(layer, state, n, q)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(lengths="2k", limit=4, tasks=["docs", "code"])


def run(chosen: argparse.Namespace) -> report.Report:
    for by in NAMES:
        globals()[f"Shifted{by}"] = type(f"Shifted{by}", (Shifted,), {"by": by})
        METHODS[f"shifted{by}"] = f"{__name__}:Shifted{by}"
    engine = load(chosen)
    methods = [engine.using(context=f"shifted{by}") for by in NAMES]
    plan = {"methods": {NAMES[by]: one.settings() for by, one in zip(NAMES, methods, strict=True)}}
    plan |= {"seed": chosen.seed, "max_new": chosen.max_new}
    taken = Taken("offline", origins=[report.origin(engine, plan)])
    for one in (
        one for task in chosen.tasks for cell in cells(engine, chosen, task, chosen.lengths)[0] for one in cell.inputs
    ):
        with engine.prefill(one.ids) as prefix:
            text = engine.using(draft_tokens=0).generate(prefix, SamplingParams(max_tokens=chosen.max_new)).token_ids
            leading = leading_drafts(engine, prefix, text, [method.method for method in methods])
        if leading[0]:
            shares = [sum(found) / len(found) / engine.drafts for found in leading]
            of, places = dict(zip(NAMES.values(), shares, strict=True)), dict.fromkeys(NAMES.values(), len(leading[0]))
            taken.requests.append(Request(*one.key, len(one.ids), of, places))
        else:
            taken.left_out[one.task, one.length, "short_output"] += 1
        print("finding1", *one.key, file=sys.stderr, flush=True)
    if not taken.requests:
        raise UsageError("no request has a whole block", do="name other --tasks, or a larger --max-new")
    return made(taken)


def made(taken: Taken) -> report.Report:
    """``tau`` of a request is its a."""
    groups = {f"{task} {short(length)}": requests for (task, length), requests in taken.cells().items()}
    cells: dict[str, Any] = {}
    for group, requests in (groups | {"all": taken.requests}).items():
        found = {NAMES[by]: summed_up(requests, tau_of(NAMES[by])) for by in NAMES}
        change = {NAMES[by]: summed_up(requests, changed(by)) for by in MOVED}
        cells[group] = {"n": len(requests), "a": found, "change": change}
    rows = [
        [group, str(cell["n"]), *(shown(one, digits=3) for one in cell["a"].values())] for group, cell in cells.items()
    ]
    below = [name for name, one in cells["all"]["change"].items() if one["high"] < 0]
    drawn, (panel,) = figure.panels(1, 1, width=4.8, height=3.0)
    for group, cell in cells.items():
        points = [(max(by, 256), cell["a"][NAMES[by]]) for by in NAMES]
        figure.by_length(panel, points, group.split()[0], intervals=group == "all")
    panel.set_xscale("log", base=2)
    panel.set_xticks([256, *MOVED], [NAMES[by] for by in NAMES])
    panel.minorticks_off()
    panel.set_xlabel("positions that the draft block is moved by")
    panel.set_ylabel("accepted share")
    panel.set_ylim(bottom=0)
    figure.one_legend(drawn, [panel])
    notes = [
        f"The 95% interval of the change of a lies below zero, all requests together, at: {', '.join(below) or 'none'}."
    ]
    notes.append(report.sample(taken))
    results = {"cells": cells, "requests": [vars(each) for each in taken.requests]}
    return report.Report(
        results, report.markdown(["requests", "n", *NAMES.values()], rows), drawn, taken.origins, notes
    )


def changed(by: int) -> Figure:
    return lambda each: each.tau[NAMES[by]] - each.tau[NAMES[0]]
