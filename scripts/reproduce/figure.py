"""How all figures look. matplotlib (extra ``bench``) is imported inside functions only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foldspec.bench.drawing import COLOURS, GREY, need_matplotlib, save
from reproduce.requests import Summary, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["by_length", "by_method", "length_axis", "need_matplotlib", "one_legend", "panels", "save", "style"]

BLUE, ORANGE, GREEN, RED, PINK, SKY, BLACK, _ = COLOURS  # markers and dashes tell those of one colour apart
STYLES: dict[str, tuple[str, str, str]] = {
    "full": (BLACK, "o", "-"),
    "window": (ORANGE, "s", "-"),
    "shared_window": (ORANGE, "D", ":"),
    "fold:alpha=1": (BLUE, "v", ":"),
    "fold": (BLUE, "^", "-"),
    "fold:alpha=4": (BLUE, "P", "--"),
    "streaming": (SKY, "X", "-"),
    "yarn": (PINK, "o", "--"),
    "rerope": (RED, "s", "--"),
    "infllm": (GREEN, "D", "-"),
    "cmr": (GREEN, "v", "--"),
    "ar": (GREY, "", ":"),
}
OTHERS = {"docs": (BLUE, "o", "-"), "code": (RED, "s", "-"), "kv": (GREEN, "^", "-")}  # tasks, steps
OTHERS |= {"full to window": (ORANGE, "s", "-"), "window to fold": (BLUE, "^", "-")}
MARKS = [(BLACK, "o"), ("#999999", "s"), (BLUE, "^"), (RED, "D")]  # of cells
PLAIN = (GREY, "*", "-")  # of a name that is in neither list
RULES: Any = {"axes.spines.top": False, "axes.spines.right": False}
PANEL = (3.1, 2.7)  # inches
ENTRY = 1.5  # inches of the widest name in a legend


def panels(rows: int, columns: int, *, width: float = PANEL[0], height: float = PANEL[1]) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, in reading order; inches a panel."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(RULES):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def style(name: str) -> dict[str, Any]:
    """Colour, marker and dashes of a name."""
    color, marker, line = STYLES.get(name) or OTHERS.get(name, PLAIN)
    return {"color": color, "marker": marker, "linestyle": line, "markersize": 5, "linewidth": 1.3}


def by_length(axes: Axes, points: Sequence[tuple[int, Summary]], name: str, *, intervals: bool = True) -> None:
    """A line over lengths in tokens, with its intervals."""
    lengths, means = [length for length, _ in points], [one["mean"] for _, one in points]
    axes.plot(lengths, means, label=name, **style(name))
    if intervals:
        low, high = ([one[end] for _, one in points] for end in ("low", "high"))
        axes.fill_between(lengths, low, high, color=style(name)["color"], alpha=0.13, linewidth=0)


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("tokens of prompt")


def by_method(axes: Axes, cells: Sequence[dict[str, Any]], names: Sequence[str], what: str) -> None:
    """Means with intervals, a place on the upright axis for each method and a marker for each cell."""
    for number, cell in enumerate(cells):
        found = [cell["methods"][name] for name in names]
        ends = [[one["mean"] - one["low"] for one in found], [one["high"] - one["mean"] for one in found]]
        color, marker = MARKS[number % len(MARKS)]
        places = [place + 0.25 * (number - (len(cells) - 1) / 2) for place in range(len(names))]
        axes.errorbar(
            [one["mean"] for one in found],
            places,
            xerr=ends,
            fmt=marker,
            color=color,
            capsize=2,
            markersize=4,
            elinewidth=1,
            label=cell.get("label") or f"{short(cell['length'])} tokens",
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(what)


def one_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Below the panels, each name once."""
    named: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    columns = max(1, min(len(named), int(figure.get_size_inches()[0] / ENTRY)))
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=columns, frameon=False)
