"""fold_auto against fixed alphas and the window alone, on held-out requests, request by request: live tau, and tokens
over the modelled cost of their rounds.

Every reading is ``fold_auto``'s own code; a fixed one has one sharpness to choose from, which is ``fold`` or ``window``
round by round. A round costs 1 without a far read, and with one as many bytes more as it reads, as a share of all
others: the cost that fold_auto goes by. Its constants were chosen on made-up streams, so that all requests are held
out; the sample is the first of each task by a seed that nothing else was measured by.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

from foldspec.errors import UsageError
from reproduce import figure, report, watched
from reproduce.options import load
from reproduce.requests import Figure, Request, Taken, less, short, shown, summed_up, tau_of
from reproduce.watched import AUTO, FIXED

MIRRORS = "no figure of the FOLD paper, whose Limitations leave W and alpha fixed during decoding"
DIFFERS = "fold_auto is this checkout's own; it chooses alpha, and a far read or none, while W stays fixed"
RATE = "tokens over cost"


def options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(lengths="2k", limit=14, max_new=64, seed=7)


def run(chosen: argparse.Namespace) -> report.Report:
    engine, work = load(chosen), chosen.out / "work"
    taken, arms = Taken("live"), Counter[str]()
    for task in chosen.tasks:
        watched.measure(engine, chosen, work, task)
        path = work / f"adaptive-{task}.jsonl"
        head, rows = watched.read(path)
        taken.add(path, **head)
        for row in rows:
            if row["methods"]:
                taken.requests.append(request(row))
                arms.update(row["arms"])
            else:
                taken.left_out[task, row["length"], "short_output"] += 1
    if not taken.requests:
        raise UsageError("no request has a round", do="name other --tasks, or a larger --max-new")
    cells = {f"{task} {short(length)}": summary(requests) for (task, length), requests in taken.cells().items()}
    cells["all"] = summary(taken.requests)
    used = ", ".join(f"{alpha} in {n / sum(arms.values()):.0%}" for alpha, n in arms.most_common())
    notes = [verdict(name, one) for name, one in cells["all"][RATE]["less"].items()]
    notes += [f"fold_auto's rounds by alpha (0: no far read): {used}.", report.sample(taken)]
    results = {"cells": cells, "arms": dict(arms), "requests": [vars(each) for each in taken.requests]}
    return report.Report(results, table(cells), draw(cells), taken.origins, notes)


def request(row: dict[str, Any]) -> Request:
    """With tau and rounds, and as ``tpot`` the cost of a token, in rounds without a far read."""
    found = row["methods"]
    tau = {name: one["tokens"] / one["rounds"] for name, one in found.items()}
    costs = {name: one["cost"] / one["tokens"] for name, one in found.items()}
    rounds = {name: one["rounds"] for name, one in found.items()}
    return Request(row["task"], row["length"], row["id"], row["n_in"], tau, rounds, costs)


def rate_of(method: str) -> Figure:
    return lambda each: 1 / each.tpot[method]


def summary(requests: Sequence[Request]) -> dict[str, Any]:
    """Means over requests, and fold_auto's paired differences."""
    cell: dict[str, Any] = {"n": len(requests)}
    for what, of in (("tau", tau_of), (RATE, rate_of)):
        means = {name: summed_up(requests, of(name)) for name in (*FIXED, AUTO)}
        cell[what] = {"means": means, "less": {name: summed_up(requests, less(of(AUTO), of(name))) for name in FIXED}}
    return cell


def verdict(name: str, found: dict[str, float]) -> str:
    word = "a gain" if found["low"] > 0 else "a loss" if found["high"] < 0 else "no difference shown"
    return f"{AUTO} against {name}, {RATE}, all requests: {word}, {shown(found, '+', 3)}."


def table(cells: dict[str, Any]) -> str:
    rows = []
    for name, cell in cells.items():
        for what in ("tau", RATE):
            means = [f"{one['mean']:.3f}" for one in cell[what]["means"].values()]
            rows.append([name, str(cell["n"]), what, *means])
            rows[-1] += [shown(one, "+", 3) for one in cell[what]["less"].values()]
    return report.markdown(["requests", "n", "", *FIXED, AUTO, *(f"{AUTO} - {name}" for name in FIXED)], rows)


def draw(cells: dict[str, Any]) -> Any:
    drawn, panels = figure.panels(1, 2, width=3.8, height=3.0)
    for panel, what in zip(panels, ("tau", RATE), strict=True):
        panel.axvline(0, color="#777777", linewidth=0.8)
        found = [{"label": name, "methods": cell[what]["less"]} for name, cell in cells.items()]
        figure.by_method(panel, found, list(FIXED), f"{AUTO} less the fixed one")
        panel.locator_params(axis="x", nbins=5)
        panel.set_title(what)
    figure.one_legend(drawn, panels)
    return drawn
