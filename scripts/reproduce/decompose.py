"""FOLD less the original drafter, in two steps: what the window brings, and what the far memory adds to it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from reproduce import figure, report
from reproduce.requests import less, short, shown, summed_up, tau_of
from reproduce.take import take

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = {"full to window": ("full", "window"), "window to fold": ("window", "fold")}


def run(chosen: argparse.Namespace) -> report.Report:
    (taken,) = take(chosen)
    cells = []
    for (task, length), requests in taken.cells(["full", "window", "fold"]).items():
        cell: dict[str, Any] = {"task": task, "length": length, "n": len(requests)}
        cell["left_out"] = taken.reasons(task, length)
        cell["tau"] = {name: summed_up(requests, tau_of(name)) for name in ("full", "fold")}
        cell["steps"] = {name: summed_up(requests, less(tau_of(b), tau_of(a))) for name, (a, b) in STEPS.items()}
        cells.append(cell)
    results = {"way": taken.way, "cells": cells}
    return report.Report(results, table(cells), draw(cells), taken.origins, [report.sample(taken)])


def table(cells: list[dict[str, Any]]) -> str:
    rows = [
        [cell["task"], short(cell["length"]), str(cell["n"])]
        + [f"{one['mean']:.2f}" for one in cell["tau"].values()]
        + [shown(one, "+") for one in cell["steps"].values()]
        for cell in cells
    ]
    return report.markdown(["task", "length", "n", "tau full", "tau fold", *STEPS], rows)


def draw(cells: list[dict[str, Any]]) -> Figure:
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    drawn, panels = figure.panels(1, len(tasks), width=3.8, height=3.3)
    for panel, task in zip(panels, tasks, strict=True):
        here = [cell for cell in cells if cell["task"] == task]
        panel.axhline(0, color="#777777", linewidth=0.8)
        for name in STEPS:
            figure.by_length(panel, [(cell["length"], cell["steps"][name]) for cell in here], name)
        figure.length_axis(panel, [cell["length"] for cell in here])
        panel.set_title(task)
        panel.set_ylabel("change of tau, tokens a round")
    figure.one_legend(drawn, panels)
    return drawn
