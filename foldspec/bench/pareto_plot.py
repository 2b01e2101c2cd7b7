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
BLACK = "#000000"

EMPTY: dict[str, Any] = {"points": [], "frontiers": [], "exclusions": []}  # of a plain bench

Result = Mapping[str, Any]
Point = Mapping[str, Any]
Style = dict[str, Any]
Styles = tuple[dict[str, str], dict[int, str]]  # the colour of every effort, the mark of every draft length

ALONE: dict[str, Style] = {
    "verifier": {"color": BLACK, "marker": "*", "markersize": 11},
    "drafter": {"marker": "X", "markersize": 7},
}
BELOW: Style = {"loc": "outside lower center", "ncols": 5, "frameon": False, "fontsize": "small"}
BELOW["title_fontsize"] = "small"


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


def _styles(points: Sequence[Point]) -> Styles:
    efforts = dict.fromkeys(p["effort"] for p in points if p["effort"] is not None)
    lengths = sorted({p["draft_tokens"] for p in points if p["draft_tokens"] is not None})
    return (
        {effort: COLOURS[i % len(COLOURS)] for i, effort in enumerate(efforts)},
        {length: MARKS[i % len(MARKS)] for i, length in enumerate(lengths)},
    )


def frontier(figure: Any, result: Result, quality: str) -> bool:
    """A row a task and length, a panel for each of the two speeds."""
    sweep = result.get("pareto") or EMPTY
    rows = [row for row in sweep["frontiers"] if row["quality"] == quality]
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
    kinds = [kind for kind in ALONE if any(p["kind"] == kind for p in points)]
    title = "thick: the frontier, with its leniencies; hollow: not on it; bars: 95%; drafter alone: its time is derived"
    _legend(figure, styles, title, kinds)
    return True


def _panel(panel: Any, points: Sequence[Point], row: Mapping[str, Any], styles: Styles) -> None:
    from matplotlib.patheffects import withStroke

    colours, marks = styles
    speed, quality = row["speed"], row["quality"]
    places, effort = {}, {}
    for point in points:
        label, member = point["method"], point["method"] in row["frontier"]
        places[label] = at = point[speed]["mean"], point[quality]["mean"]
        effort[label] = colour = colours.get(point["effort"], BLACK)
        style: Style = {"color": colour, "marker": marks.get(point["draft_tokens"], "o"), "markersize": 5}
        if point["kind"] != "point":
            style |= ALONE[point["kind"]]
        if not member:
            style["markerfacecolor"] = "white"
        (left, right), (low, high) = point[speed]["ci"], point[quality]["ci"]
        faint = {"color": style["color"], "linewidth": 0.7, "alpha": 0.8 if member else 0.25, "zorder": 1}
        panel.plot([left, right], [at[1]] * 2, **faint)
        panel.plot([at[0]] * 2, [low, high], **faint)
        panel.plot(*at, linestyle="none", zorder=4 if member else 3, **style)
        if member and point["leniency"] is not None:
            aside, x = ("right", -5) if speed == "latency_s" else ("left", 5)  # where a point would dominate this one
            share, halo = f"{point['leniency']:g}", [withStroke(linewidth=2, foreground="white")]
            text = {"textcoords": "offset points", "fontsize": 7, "ha": aside, "zorder": 6, "path_effects": halo}
            panel.annotate(share, at, (x, 4), **text)
    if row["frontier"]:
        _join(panel, [(places[label], effort[label]) for label in row["frontier"]])
        inner = zip(*(places[label] for label in row["frontier"]), strict=True)
        panel.plot(*inner, linestyle="none", marker=".", markersize=3, color="white", zorder=5)
    panel.set_xlabel(AXES[speed])


def _join(panel: Any, members: Sequence[tuple[tuple[float, float], str]]) -> None:
    """A thick line through places, from each one's colour to the next one's."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    pieces, colours = [], []
    for (start, first), (stop, last) in pairwise(members):
        steps = STEPS if first != last else 1
        stops = [[a + (b - a) * j / steps for a, b in zip(start, stop, strict=True)] for j in range(steps + 1)]
        pieces += list(pairwise(stops))
        for j in range(steps):
            share = (j + 0.5) / steps
            colours.append([a + (b - a) * share for a, b in zip(to_rgb(first), to_rgb(last), strict=True)])
    panel.add_collection(LineCollection(pieces, colors=colours, linewidths=4, capstyle="round", zorder=2))


def _legend(figure: Any, styles: Styles, title: str, kinds: Sequence[str] = ()) -> None:
    from matplotlib.lines import Line2D

    def entry(label: str, **style: Any) -> Line2D:
        return Line2D([], [], label=label, **style)

    colours, marks = styles
    hollow: Style = {"markerfacecolor": "white", "color": GREY, "linestyle": "none"}
    entries = [entry(effort, color=colour, linewidth=3) for effort, colour in colours.items()]
    entries += [entry(f"{n} drafts", marker=mark, **hollow) for n, mark in marks.items()]
    entries += [entry(f"{kind} alone", **{**hollow, **ALONE[kind]}) for kind in kinds]
    figure.legend(handles=entries, title=title, **BELOW)


def modelled(figure: Any, result: Result) -> bool:
    """A row a task and length: throughput and agreement by Eq. 6 and 7 beside those that were measured; a line an
    effort and draft length, along its leniency."""
    sweep = result.get("pareto") or EMPTY
    points = [p for p in sweep["points"] if p["kind"] == "point"]
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
    _legend(figure, styles, "along a line: leniency")
    return True


FIGURES: dict[str, Callable[[Any, Result], bool]] = {
    **{f"pareto-{quality}": partial(frontier, quality=quality) for quality in QUALITIES},
    "pareto-model": modelled,
}
