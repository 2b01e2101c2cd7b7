"""The figure of ``all_methods``: a row a measure, a column a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foldspec.bench.methods import AR
from reproduce import figure, offline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {"tau_fs": "tau_fs, tokens a position", "tau": "tau, tokens a round", "speedup": "speedup over AR, times"}


def names_of(cells: list[dict[str, Any]]) -> list[str]:
    """All methods of the cells, plain decoding first."""
    there = dict.fromkeys(name for cell in cells for name in cell["methods"])
    known = [AR, *offline.METHODS.split(",")]
    return sorted(there, key=lambda name: known.index(name) if name in known else len(known))


def draw(cells: list[dict[str, Any]]) -> Figure:
    """tau_fs over lengths, and live figures method by method."""
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    rows = [measure for measure in LABELS if any(cell["measure"] == measure for cell in cells)]
    drawn, axes = figure.panels(len(rows), len(tasks), width=3.4, height=3.2)
    panels = iter(axes)
    for measure in rows:
        for task in tasks:
            panel = next(panels)
            here = [cell for cell in cells if (cell["task"], cell["measure"]) == (task, measure)]
            names = [name for name in names_of(here) if name != AR]
            panel.set_title(task)
            if measure == "tau_fs":
                for name in names:
                    points = [(cell["length"], cell["methods"][name]) for cell in here]
                    figure.by_length(panel, points, name, intervals=False)
                figure.length_axis(panel, [cell["length"] for cell in here])
                panel.set_ylabel(LABELS[measure])
            else:
                panel.axvline(1, color="#777777", linewidth=0.8)  # what plain decoding has of either
                figure.by_method(panel, here, names, LABELS[measure])
    figure.one_legend(drawn, axes)
    return drawn
