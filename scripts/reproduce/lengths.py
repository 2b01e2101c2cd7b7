"""One figure of every method over lengths, a panel a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from foldspec.bench.methods import AR, AR_AGAIN
from reproduce import figure, report
from reproduce.requests import Figure as Value
from reproduce.requests import Taken, short, shown, summed_up

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def by_length(taken: Taken, value: Callable[[str], Value], what: str) -> report.Report:
    """``what`` names the upright axis, with its unit."""
    names = [name for name in taken.methods if name not in (AR, AR_AGAIN)]
    cells: list[dict[str, Any]] = []
    for (task, length), requests in taken.cells().items():
        means = {name: summed_up(requests, value(name)) for name in names}
        left_out = taken.reasons(task, length)
        cells.append({"task": task, "length": length, "n": len(requests), "left_out": left_out, "methods": means})
    rows = [
        [cell["task"], short(cell["length"]), str(cell["n"]), *map(shown, cell["methods"].values())] for cell in cells
    ]
    table = report.markdown(["task", "length", "n", *names], rows)
    results = {"way": taken.way, "measure": what, "cells": cells}
    return report.Report(results, table, draw(cells, names, what), taken.origins, [report.sample(taken)])


def draw(cells: list[dict[str, Any]], names: list[str], what: str) -> Figure:
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    drawn, panels = figure.panels(1, len(tasks), width=3.4, height=3.4)
    for panel, task in zip(panels, tasks, strict=True):
        here = [cell for cell in cells if cell["task"] == task]
        for name in names:
            points = [(cell["length"], cell["methods"][name]) for cell in here]
            figure.by_length(panel, points, name, intervals=False)
        figure.length_axis(panel, [cell["length"] for cell in here])
        panel.set_title(task)
        panel.set_ylabel(what)
    figure.one_legend(drawn, panels)
    return drawn
