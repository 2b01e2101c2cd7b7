"""Figures of a sweep, from ``bench.json`` alone: quality against latency and against throughput as in Figure 4 of the
second paper, and the throughput model beside what was measured as in its Figure 3.

A frontier that can be claimed is a thick line whose colour is the effort, with white marks at its members; all other
points are hollow. What was derived (a drafter alone) or excluded is said where it stands.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from foldspec.bench.drawing import COLOURS, GREY, MARKS
from foldspec.bench.frontier import QUALITIES

__all__ = ["AXES", "FIGURES", "excluded"]

AXES = {
    "score": "score",
    "logprob": "log-probability, nats a token",
    "agreement": "agreement with the verifier",
    "latency_s": "latency: s to the end of the output",
    "tokens_s": "throughput: tokens a second",
}
PANEL = (4.6, 3.4)  # inches
WIDEST = 62  # characters of a line above a panel
STEPS = 24  # of a line that goes from one colour to another
VERIFIER = {"color": "#000000", "marker": "*", "markersize": 11, "label": "verifier alone"}
DRAFTER = {"color": GREY, "marker": "X", "markersize": 7, "label": "drafter alone (time derived)"}

Result = Mapping[str, Any]
Point = Mapping[str, Any]
Style = Mapping[str, Any]


def excluded(row: Mapping[str, Any]) -> list[str]:
    """Which of the second paper's two criteria exclude this task and length, in words."""
    low, high = row["difference"]["ci"]
    words = []
    if row["no_benefit"]:
        better = "better" if high < 0 else "about as good"
        words.append(f"the drafter alone is {better} (verifier less drafter [{low:.3f}, {high:.3f}])")
    if row["below_chance"]:
        words.append(f"the drafter alone is worse than guessing ({row['drafter_score']:.3f} < {row['chance']:.3f})")
    return words


def _cells(points: Sequence[Point]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((point["task"], point["length"]) for point in points))


def _styles(points: Sequence[Point]) -> tuple[dict[str, str], dict[int, str]]:
    """The colour of every effort and the mark of every draft length."""
    efforts = dict.fromkeys(p["effort"] for p in points if p["effort"] is not None)
    lengths = sorted({p["draft_tokens"] for p in points if p["draft_tokens"] is not None})
    return (
        {effort: COLOURS[i % len(COLOURS)] for i, effort in enumerate(efforts)},
        {length: MARKS[i % len(MARKS)] for i, length in enumerate(lengths)},
    )


def frontier(figure: Any, result: Result, quality: str) -> bool:
    """A row a task and length, a panel for each of the two speeds."""
    sweep = result.get("pareto")
    rows = [row for row in sweep["frontiers"] if row["quality"] == quality] if sweep else []
    if not rows:
        return False
    points = [p for p in sweep["points"] if p[quality] is not None]
    cells = [cell for cell in _cells(points) if any((r["task"], r["length"]) == cell for r in rows)]
    styles = _styles(sweep["points"])
    figure.set_size_inches(2 * PANEL[0], PANEL[1] * len(cells) + 0.8)
    panels = figure.subplots(len(cells), 2, sharey="row", squeeze=False)
    for line, cell in zip(panels, cells, strict=True):
        here = [p for p in points if (p["task"], p["length"]) == cell]
        out = [w for e in sweep["exclusions"] if (e["task"], e["length"]) == cell for w in excluded(e)]
        for panel, speed in zip(line, ("latency_s", "tokens_s"), strict=True):
            (row,) = (r for r in rows if (r["task"], r["length"], r["speed"]) == (*cell, speed))
            _panel(panel, here, row, styles)
            said = [f"no frontier: {row['why_not']}"] if row["why_not"] else []
            if panel is line[0]:
                said += [f"EXCLUDED: {words}" for words in out]
            head = f"{cell[0]} {cell[1]:,}, {here[0]['n']} requests"
            lines = [piece for each in said for piece in textwrap.wrap(each, WIDEST)]
            panel.set_title("\n".join([head, *lines]), loc="left", fontsize="small")
        line[0].set_ylabel(AXES[quality])
    _legend(figure, styles, any(p["kind"] == "drafter" for p in points))
    return True


def _panel(panel: Any, points: Sequence[Point], row: Mapping[str, Any], styles: Any) -> None:
    colours, marks = styles
    speed, quality = row["speed"], row["quality"]
    places = {}
    for point in points:
        if point[speed] is None:  # a drafter alone without a calibrating run
            continue
        label, at = point["method"], (point[speed]["mean"], point[quality]["mean"])
        places[label] = at
        member = label in row["frontier"]
        style = {"color": colours.get(point["effort"], VERIFIER["color"])}
        if point["kind"] == "point":
            fill = style["color"] if member else "white"
            style |= {"marker": marks[point["draft_tokens"]], "markersize": 5, "markerfacecolor": fill}
        else:
            style |= {**(VERIFIER if point["kind"] == "verifier" else DRAFTER), "label": "_"}
        bars = [[[mean - point[name]["ci"][0]], [point[name]["ci"][1] - mean]] for name, mean in zip((speed, quality), at, strict=True)]
        panel.errorbar(*at, xerr=_upward(bars[0]), yerr=_upward(bars[1]), fmt="none", ecolor=style["color"], elinewidth=0.7, alpha=0.7 if member else 0.3)
        panel.plot(*at, linestyle="none", zorder=4 if member else 3, **style)
        if member and point["leniency"] is not None:
            panel.annotate(f"{point['leniency']:g}", at, (5, -9), textcoords="offset points", fontsize=6.5, zorder=6)
    effort = {p["method"]: colours.get(p["effort"], VERIFIER["color"]) for p in points}
    for one, other in pairwise(row["frontier"]):
        _stretch(panel, [(places[label], effort[label]) for label in (one, other)])
    inner = [places[label] for label in row["frontier"]]
    if inner:
        panel.plot(*zip(*inner, strict=True), linestyle="none", marker=".", markersize=4, color="white", zorder=5)
    panel.set_xlabel(AXES[speed])
    panel.margins(0.08)


def _upward(bar: list[list[float]]) -> list[list[float]]:
    """A mean of ratios may lie outside an interval of pooled ones by a rounding: no bar is negative."""
    return [[max(0.0, end) for end in side] for side in bar]


def _stretch(panel: Any, ends: Sequence[tuple[tuple[float, float], str]]) -> None:
    """A thick line between two members, from the one's colour to the other's."""
    from matplotlib.colors import to_rgb

    (start, first), (stop, last) = ends
    colours = [to_rgb(first), to_rgb(last)]
    steps = STEPS if first != last else 1
    for i in range(steps):
        places = [[a + (b - a) * j / steps for a, b in zip(start, stop, strict=True)] for j in (i, i + 1)]
        share = (i + 0.5) / steps
        colour = [a + (b - a) * share for a, b in zip(*colours, strict=True)]
        panel.plot(*zip(*places, strict=True), color=colour, linewidth=4, solid_capstyle="round", zorder=2)


def _legend(figure: Any, styles: tuple[dict[str, str], dict[int, str]], drafter: bool) -> None:
    from matplotlib.lines import Line2D

    colours, marks = styles
    hollow: Style = {"markerfacecolor": "white", "color": GREY, "linestyle": "none"}
    entries = [Line2D([], [], color=colour, linewidth=4, label=effort) for effort, colour in colours.items()]
    entries += [Line2D([], [], marker=mark, label=f"{n} drafts", **hollow) for n, mark in marks.items()]
    alone = [VERIFIER, DRAFTER] if drafter else [VERIFIER]
    entries += [Line2D([], [], linestyle="none", **style) for style in alone]
    title = "thick: frontier, numbers are its leniency; hollow: not on it; bars: 95%"
    figure.legend(handles=entries, title=title, title_fontsize="small", fontsize="small", **BELOW)


BELOW: Style = {"loc": "outside lower center", "ncols": 5, "frameon": False}


def modelled(figure: Any, result: Result) -> bool:
    """A row a task and length: throughput and agreement by Eq. 6 and 7 beside those that were measured; a line an
    effort and draft length, along its leniency."""
    sweep = result.get("pareto")
    points = [p for p in sweep["points"] if p["kind"] == "point"] if sweep else []
    points = [p for p in points if None not in (p["tokens_s_modelled"], p["agreement_modelled"], p["agreement"])]
    if not points:
        return False
    colours, marks = styles = _styles(sweep["points"])
    cells = _cells(points)
    figure.set_size_inches(2 * PANEL[0], PANEL[1] * len(cells) + 0.6)
    panels = figure.subplots(len(cells), 2, sharex="row", sharey="row", squeeze=False)
    for line, cell in zip(panels, cells, strict=True):
        here = [p for p in points if (p["task"], p["length"]) == cell]
        for effort, length in dict.fromkeys((p["effort"], p["draft_tokens"]) for p in here):
            own = [p for p in here if (p["effort"], p["draft_tokens"]) == (effort, length)]
            style = {"color": colours[effort], "marker": marks[length], "markersize": 4, "linewidth": 1.2}
            means = [(p["tokens_s"]["mean"], p["agreement"]["mean"]) for p in own]
            line[0].plot([p["tokens_s_modelled"] for p in own], [p["agreement_modelled"] for p in own], **style)
            line[1].plot(*zip(*means, strict=True), **style)
        for panel, what in zip(line, ("modelled", "measured"), strict=True):
            panel.set_title(f"{cell[0]} {cell[1]:,}: {what}", loc="left", fontsize="small")
            panel.set_xlabel(AXES["tokens_s"])
        line[0].set_ylabel(AXES["agreement"])
    _lines_legend(figure, styles)
    return True


def _lines_legend(figure: Any, styles: tuple[dict[str, str], dict[int, str]]) -> None:
    from matplotlib.lines import Line2D

    colours, marks = styles
    entries = [Line2D([], [], color=colour, label=effort) for effort, colour in colours.items()]
    entries += [Line2D([], [], marker=m, color=GREY, linestyle="none", label=f"{n} drafts") for n, m in marks.items()]
    figure.legend(handles=entries, fontsize="small", title="along a line: leniency", title_fontsize="small", **BELOW)


FIGURES: dict[str, Callable[[Any, Result], bool]] = {
    **{f"pareto-{quality}": partial(frontier, quality=quality) for quality in QUALITIES},
    "pareto-model": modelled,
}
