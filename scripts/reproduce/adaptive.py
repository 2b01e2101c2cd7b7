"""fold_auto against fixed alphas and the window alone, on requests that no choice was made by: live tau, and tokens over
the modelled cost of their rounds, request by request.

Every reading is ``fold_auto``'s own code, the fixed ones with one sharpness to choose from, which is ``fold`` and
``window`` round by round. A round costs 1 without a far read, and with one as many bytes more as it reads: the cost
that fold_auto goes by. Its constants were chosen on made-up streams, so that all requests are held out; the sample is
the first of each task by a seed that nothing else of this checkout's measurements uses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from foldspec.bench.bootstrap import interval
from foldspec.bench.inputs import parse_lengths
from foldspec.bench.machine import environment
from foldspec.context import METHODS
from foldspec.context.base import Read
from foldspec.context.fold_auto import FoldAuto
from foldspec.engine import Engine
from foldspec.errors import MeasurementError, UsageError
from foldspec.options import SamplingParams
from foldspec.tasks import make_task
from reproduce import figure, report
from reproduce.options import load
from reproduce.requests import short, shown

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

MIRRORS = "no figure of the FOLD paper, whose Limitations leave W and alpha fixed during decoding"
DIFFERS = "the method, fold_auto, is this checkout's own; W stays fixed"
AUTO, FIXED = "fold_auto", {"window": (0.0,), "fold:alpha=1": (1.0,), "fold": (2.0,), "fold:alpha=4": (4.0,)}
VALUES = {"tau": "tau, tokens a round", "gain": "tokens over the cost of their rounds"}


class Watched(FoldAuto):
    """Leaves the sharpness and the modelled cost of each round."""

    rounds: ClassVar[list[tuple[float, float]]] = []

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        if layer == 0 and q is not None:
            self.rounds.append((self.options.auto_alphas[state.arm], self.cost(state, n)))
        return super().reads(layer, state, n, q)


def options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(lengths="2k", limit=14, max_new=96, seed=7)


def run(chosen: argparse.Namespace) -> report.Report:
    METHODS["watched"] = f"{__name__}:Watched"
    engine = load(chosen)
    methods = {name: engine.using(context="watched", auto_alphas=arms) for name, arms in FIXED.items()}
    methods[AUTO] = engine.using(context="watched")
    settings = {"methods": {name: one.settings() for name, one in methods.items()}, "seed": chosen.seed}
    origin = json.loads(json.dumps({**settings, "max_new": chosen.max_new, "env": environment(engine)}))
    rows = []
    for length in parse_lengths(chosen.lengths, engine.max_context - chosen.max_new)[0]:
        for task in chosen.tasks:
            for item in make_task(task).items(engine.encode, length, chosen.limit, chosen.seed):
                found = measure(item.prompt, engine, methods, chosen.max_new)
                rows.append({"task": task, "length": length, "id": item.id, "n_in": len(item.prompt), **found})
                print(f"adaptive {task} {length} {item.id}", file=sys.stderr, flush=True)
    return made(rows, [origin])


def measure(prompt: Any, engine: Engine, methods: Mapping[str, Engine], tokens: int) -> dict[str, Any]:
    """Of each method tokens, rounds and cost; of fold_auto the rounds by sharpness too. Empty where the target says
    less than a round."""
    found: dict[str, Any] = {}
    with engine.prefill(prompt) as prefix:
        ids = None
        for name, method in methods.items():
            Watched.rounds.clear()
            done = method.generate(prefix, SamplingParams(max_tokens=tokens))
            ids = ids or done.token_ids
            if done.token_ids != ids:
                raise MeasurementError(f"{name} gives another output", where="adaptive")
            if not done.rounds:
                return {"methods": {}}
            # the last round may have had no place left for drafts, and then read nothing
            cost = sum(cost for _, cost in Watched.rounds) + len(done.rounds) - len(Watched.rounds)
            count = sum(len(one.committed) for one in done.rounds)
            found[name] = {"tokens": count, "rounds": len(done.rounds), "cost": cost}
    return {"methods": found, "arms": dict(Counter(f"{alpha:g}" for alpha, _ in Watched.rounds))}


def made(rows: list[dict[str, Any]], origins: list[dict[str, Any]]) -> report.Report:
    left_out = sum(not row["methods"] for row in rows)
    rows = [row for row in rows if row["methods"]]
    if not rows:
        raise UsageError("no request has a round", do="name other --tasks, or a larger --max-new")
    groups = {f"{row['task']} {short(row['length'])}": (row["task"], row["length"]) for row in rows}
    cells = {
        name: summed_up([row for row in rows if (row["task"], row["length"]) == key]) for name, key in groups.items()
    }
    cells["all"] = summed_up(rows)
    verdicts = [verdict(name, one) for name, one in cells["all"]["gain"]["less"].items()]
    arms: Counter[str] = Counter()
    for row in rows:
        arms.update(row["arms"])
    used = ", ".join(f"{name} in {n / sum(arms.values()):.0%}" for name, n in arms.most_common())
    notes = [*verdicts, f"fold_auto's rounds by alpha, 0 for no far read: {used}; requests without a round: {left_out}."]
    lines = []
    for name, cell in cells.items():
        for key, what in VALUES.items():
            means = [f"{cell[key]['means'][each]:.3f}" for each in (*FIXED, AUTO)]
            less = [shown(one, "+", 3) for one in cell[key]["less"].values()]
            lines.append([name, str(cell["n"]), what.split(",")[0], *means, *less])
    head = ["requests", "n", "", *FIXED, AUTO, *(f"{AUTO} - {name}" for name in FIXED)]
    return report.Report({"cells": cells, "requests": rows}, report.markdown(head, lines), draw(cells), origins, notes)


def summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over requests, and fold_auto's differences with 95% intervals of paired requests."""
    cell: dict[str, Any] = {"n": len(rows)}
    for key, under in (("tau", "rounds"), ("gain", "cost")):
        of = {name: [row["methods"][name]["tokens"] / row["methods"][name][under] for row in rows] for name in (*FIXED, AUTO)}
        less = {}
        for name in FIXED:
            each = [a - b for a, b in zip(of[AUTO], of[name], strict=True)]
            low, high = interval(each)
            less[name] = {"mean": sum(each) / len(each), "low": float(low), "high": float(high)}
        cell[key] = {"means": {name: sum(one) / len(one) for name, one in of.items()}, "less": less}
    return cell


def verdict(name: str, less: dict[str, float]) -> str:
    word = "a gain" if less["low"] > 0 else "a loss" if less["high"] < 0 else "no difference shown"
    return f"{AUTO} against {name}, tokens over cost, all requests: {word}, {shown(less, '+', 3)}."


def draw(cells: Mapping[str, dict[str, Any]]) -> Figure:
    drawn, panels = figure.panels(1, 2, width=3.8, height=2.6)
    for panel, (key, what) in zip(panels, VALUES.items(), strict=True):
        panel.axvline(0, color="#777777", linewidth=0.8)
        found = [{"label": name, "methods": cell[key]["less"]} for name, cell in cells.items()]
        figure.by_method(panel, found, f"{AUTO} less it: {what}")
    figure.one_legend(drawn, panels)
    return drawn
