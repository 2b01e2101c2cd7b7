"""Finding 1, the control of distance: the draft block alone is moved away from everything before it, and how much of
what it drafts is still right. Content and all distances within the block stay as they are.

Drafts are judged at every position of the target's own greedy text, from one target pass a request (as tau_fs is):
``a = min(L, K) / K``, L leading right drafts of K.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from foldspec.bench.inputs import parse_lengths
from foldspec.bench.machine import environment
from foldspec.bench.offline import leading_drafts
from foldspec.context import METHODS
from foldspec.context.base import Read
from foldspec.context.full import Full
from foldspec.errors import UsageError
from foldspec.options import SamplingParams
from foldspec.tasks import make_task
from reproduce import figure, report
from reproduce.options import load
from reproduce.requests import Figure, Request, Taken, short, shown, summed_up, tau_of

if TYPE_CHECKING:
    import torch

MIRRORS = "Finding 1 of the FOLD paper, section 3.2 and appendix A: shifts of 8K, 32K and 128K on SPEED-Bench 2K"
DIFFERS = "this checkout's own tasks; every position of a text, not two; shorter shifts too"
SHIFTS = (0, 512, 2048, 8192, 32768, 131072)


class Shifted(Full):
    """The original drafter with its block ``by`` positions further on."""

    by: ClassVar[int] = 0

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        return [replace(r, query_at=tuple(p + self.by for p in r.query_at)) for r in super().reads(layer, state, n, q)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(lengths="2k", limit=4, tasks=["docs", "code"])


def run(chosen: argparse.Namespace) -> report.Report:
    for by in SHIFTS:
        globals()[f"Shifted{by}"] = type(f"Shifted{by}", (Shifted,), {"by": by})
        METHODS[f"shifted{by}"] = f"{__name__}:Shifted{by}"
    engine = load(chosen)
    methods = [engine.using(context=f"shifted{by}") for by in SHIFTS]
    plan = {"methods": {name_of(by): one.settings() for by, one in zip(SHIFTS, methods, strict=True)}}
    plan |= {"seed": chosen.seed, "max_new": chosen.max_new}
    taken = Taken("offline", [], Counter(), [json.loads(json.dumps({"plan": plan, "env": environment(engine)}))])
    for length in parse_lengths(chosen.lengths, engine.max_context - chosen.max_new)[0]:
        for task in chosen.tasks:
            for item in make_task(task).items(engine.encode, length, chosen.limit, chosen.seed):
                with engine.prefill(item.prompt) as prefix:
                    params = SamplingParams(max_tokens=chosen.max_new)
                    text = engine.using(draft_tokens=0).generate(prefix, params).token_ids
                    leading = leading_drafts(engine, prefix, text, [one.method for one in methods])
                if not leading[0]:
                    taken.left_out[task, length, "short_output"] += 1
                    continue
                of = {
                    name_of(by): sum(found) / len(found) / engine.drafts
                    for by, found in zip(SHIFTS, leading, strict=True)
                }
                places = dict.fromkeys(of, len(leading[0]))
                taken.requests.append(Request(task, length, item.id, len(item.prompt), of, places))
                print(f"finding1 {task} {length} {item.id}", file=sys.stderr, flush=True)
    if not taken.requests:
        raise UsageError("no request has a whole block", do="name other --tasks, or a larger --max-new")
    return made(taken)


def name_of(by: int) -> str:
    return f"+{short(by)}"


def made(taken: Taken) -> report.Report:
    """``tau`` of a request is its a."""
    groups = {f"{task} {short(length)}": requests for (task, length), requests in taken.cells().items()}
    cells: dict[str, Any] = {}
    for group, requests in (groups | {"all": taken.requests}).items():
        found = {name_of(by): summed_up(requests, tau_of(name_of(by))) for by in SHIFTS}
        change = {name_of(by): summed_up(requests, changed(by)) for by in SHIFTS[1:]}
        cells[group] = {"n": len(requests), "a": found, "change": change}
    rows = [
        [group, str(cell["n"]), *(shown(one, digits=3) for one in cell["a"].values())] for group, cell in cells.items()
    ]
    below = [name for name, one in cells["all"]["change"].items() if one["high"] < 0]
    drawn, (panel,) = figure.panels(1, 1, width=4.4, height=3.0)
    for group, cell in cells.items():
        points = [(max(by, 256), cell["a"][name_of(by)]) for by in SHIFTS]
        figure.by_length(panel, points, group.split()[0], intervals=group == "all")
    panel.set_xscale("log", base=2)
    panel.set_xticks([256, *SHIFTS[1:]], [name_of(by) for by in SHIFTS])
    panel.minorticks_off()
    panel.set_xlabel("positions that the draft block is moved by")
    panel.set_ylabel("accepted share of the drafts")
    panel.set_ylim(bottom=0)
    figure.one_legend(drawn, [panel])
    notes = [
        f"The 95% interval of the change of a lies below zero, all requests together, at: {', '.join(below) or 'none'}."
    ]
    notes.append(report.sample(taken))
    results = {"cells": cells, "requests": [vars(each) for each in taken.requests]}
    return report.Report(
        results, report.markdown(["requests", "n", *map(name_of, SHIFTS)], rows), drawn, taken.origins, notes
    )


def changed(by: int) -> Figure:
    return lambda each: each.tau[name_of(by)] - each.tau[name_of(0)]
