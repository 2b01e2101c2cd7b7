"""Figures of a result, each from ``bench.json`` alone, as PNG and SVG: speedup and tau by length, acceptance by
position in the block, commits of a round, and each method's paired difference to plain decoding (or to ``--against``);
of a sweep, those of ``pareto_plot.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foldspec.bench import drawing, pareto_plot
from foldspec.bench.drawing import COLOURS, MARKS, need_matplotlib
from foldspec.bench.methods import AR, AR_AGAIN
from foldspec.errors import ResourceError, UsageError

__all__ = ["FIGURES", "draw", "save"]

MANY = len(COLOURS)  # methods that colours alone tell apart
SHORT = 30  # letters of a name beside a panel
LETTER, LINE = 0.055, 0.19  # inches, in a legend
Result = Mapping[str, Any]


def draw(result: Result, wanted: Sequence[str] | None = None) -> dict[str, Any]:
    """Name -> matplotlib's Figure, of each (or of those ``wanted``) that the result has numbers for. Raises
    :class:`UsageError` where matplotlib is missing, for one wanted without numbers, and where there is nothing to draw.
    """
    need_matplotlib()
    from matplotlib.figure import Figure  # draws on no screen and keeps no state

    figures = {}
    for name, make in FIGURES.items():
        if wanted is not None and name not in wanted:
            continue
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        if make(figure, result):
            figures[name] = figure
    missing = [name for name in wanted or () if name not in figures]
    if missing:
        raise UsageError(f"the result has no numbers for {', '.join(missing)}", where="--figures")
    if not figures:
        raise UsageError("the result has no request that counts: there is nothing to draw")
    return figures


def save(figures: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Write each as PNG and SVG, whole or not at all; the files. Raises :class:`ResourceError`."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            written += drawing.save(figure, folder, f"{stem}-{name}")
    except OSError as error:
        raise ResourceError(f"cannot be written ({error.strerror})", where=str(folder)) from None
    return written


def _methods(result: Result) -> dict[str, dict[str, str]]:
    """Colour and mark of every method but plain decoding: the same in all figures."""
    labels = [label for label in result["methods"] if label != AR]
    return {
        label: {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[(i + i // len(COLOURS)) % len(MARKS)]}
        for i, label in enumerate(labels)
    }


def _by_length(figure: Any, result: Result, value: str, title: str, line: float) -> bool:
    """A panel a task, a line a method with its band. Nothing where all is of one length."""
    rows = result["summary"]
    if len({row["length"] for row in rows}) < 2:
        return False
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    faint = min(0.12, 0.5 / max(1, len(_methods(result))))  # bands lie on one another
    for panel, task in zip(panels, tasks, strict=True):
        for label, style in _methods(result).items():
            mine = sorted((r for r in rows if (r["task"], r["method"]) == (task, label)), key=lambda r: r["length"])
            at = [row["length"] for row in mine]
            panel.plot(at, [row[f"{value}_mean"] for row in mine], label=label, markersize=4, **style)
            low, high = zip(*(row[f"{value}_ci"] for row in mine), strict=True) if mine else ((), ())
            panel.fill_between(at, low, high, color=style["color"], alpha=faint, linewidth=0)
        panel.axhline(line, color="#888888", linewidth=0.8, linestyle="--")
        panel.set_xscale("log", base=2)
        lengths = sorted({row["length"] for row in rows if row["task"] == task})
        panel.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
        panel.minorticks_off()
        panel.set_title(task)
        panel.set_xlabel("tokens of prompt")
    panels[0].set_ylabel(title)
    _legend(figure, panels[0])
    return True


def speedup(figure: Any, result: Result) -> bool:
    return _by_length(figure, result, "speedup", "speedup over plain decoding [95%]", 1.0)


def tau(figure: Any, result: Result) -> bool:
    return _by_length(figure, result, "tau", "tau: tokens a round [95%]", 1.0)


def _counts(result: Result) -> dict[str, list[int]]:
    """Method -> rounds that committed 1, 2, ... tokens, over all tasks and lengths."""
    found: dict[str, list[int]] = {}
    for row in result["summary"]:
        counts = row.get("commit_counts", [])
        if row["method"] in (AR, AR_AGAIN) or not counts:
            continue
        known = found.setdefault(row["method"], [])
        known += [0] * (len(counts) - len(known))
        for i, count in enumerate(counts):
            known[i] += count
    return found


def acceptance(figure: Any, result: Result) -> bool:
    """Share of rounds in which the draft at a position stood, with all before it."""
    counts, styles = _counts(result), _methods(result)
    panel = figure.subplots()
    for label, own in counts.items():
        shares = [sum(own[j:]) / sum(own) for j in range(1, len(own))]
        panel.plot(range(1, len(own)), shares, label=label, markersize=4, **styles[label])
    panel.set_xlabel("position in the block")
    panel.set_ylabel("share of rounds in which it stood")
    panel.set_ylim(0, 1)
    panel.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, panel)
    return any(len(own) > 1 for own in counts.values())


def commits(figure: Any, result: Result) -> bool:
    counts, styles = _counts(result), _methods(result)
    panel = figure.subplots()
    width = 0.8 / max(1, len(counts))
    for i, (label, own) in enumerate(counts.items()):
        shares = [count / sum(own) for count in own]
        if len(counts) > MANY:  # bars would be hairs
            panel.plot(range(1, len(own) + 1), shares, label=label, markersize=4, **styles[label])
            continue
        at = [k + 1 + (i - (len(counts) - 1) / 2) * width for k in range(len(own))]
        panel.bar(at, shares, width, label=label, color=styles[label]["color"])
    panel.set_xlabel("tokens that a round committed")
    panel.set_ylabel("share of rounds")
    panel.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, panel)
    return bool(counts)


def forest(figure: Any, result: Result) -> bool:
    """Each method's paired speedup with its interval, a row for every task and length; of many methods, each row has
    its name."""
    rows = result["against"] or [r for r in result["summary"] if r["method"] not in (AR, AR_AGAIN)]
    if not rows:
        return False
    styles = _methods(result)
    cells = sorted({(row["task"], row["length"]) for row in rows})
    labels = [label for label in styles if any(row["method"] == label for row in rows)]
    height = 0.22 * len(cells) * (len(labels) + 1)
    figure.set_figheight(1.2 + height)
    panel = figure.subplots()
    places: dict[float, str] = {}
    for i, cell in enumerate(cells):
        top = i * (len(labels) + 1)
        name = f"{cell[0]} {cell[1]:,}"
        if len(labels) > MANY:
            places |= {top - 1: f"{name}:", **{top + j: label for j, label in enumerate(labels)}}
        else:
            places[top + (len(labels) - 1) / 2] = name
        for j, label in enumerate(labels):
            for row in rows:
                if (row["task"], row["length"], row["method"]) == (*cell, label):
                    y = top + j
                    low, high = row["speedup_ci"]
                    panel.plot([low, high], [y, y], color=styles[label]["color"], linewidth=1.5)
                    panel.plot(
                        [row["speedup_mean"]], [y], markersize=5, label=label if i == 0 else None, **styles[label]
                    )
    panel.set_yticks(list(places), list(places.values()), fontsize="small")
    for tick in panel.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text().endswith(":") else "normal")
    panel.set_ylim(len(cells) * (len(labels) + 1) - 1, -1.5)
    panel.axvline(1, color="#888888", linewidth=0.8, linestyle="--")
    over = result["against"][0]["against"] if result["against"] else "plain decoding"
    panel.set_xlabel(f"speedup over {over}, paired by request [95%]")
    if len(labels) <= MANY:
        _legend(figure, panel)
    return True


def _legend(figure: Any, panel: Any) -> None:
    """At the right; below, and the figure higher, where it would take the panels' room."""
    handles, labels = panel.get_legend_handles_labels()
    look = {"frameon": False, "fontsize": "small"}
    widest = max(map(len, labels), default=0)
    if len(labels) <= 2 * MANY and widest <= SHORT:
        figure.legend(handles, labels, loc="outside right upper", **look)
        return
    columns = max(1, int(figure.get_figwidth() / (0.5 + LETTER * widest)))
    figure.set_figheight(figure.get_figheight() + LINE * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, **look)


FIGURES: dict[str, Callable[[Any, Result], bool]] = {
    **pareto_plot.FIGURES,
    "speedup": speedup,
    "tau": tau,
    "acceptance": acceptance,
    "commits": commits,
    "forest": forest,
}


def names(chosen: Sequence[str]) -> list[str]:
    """Raises :class:`UsageError` for a figure that there is not."""
    for name in chosen:
        if name not in FIGURES:
            raise UsageError(f"unknown figure {name!r:.40}", where="--figures", do=f"known: {', '.join(FIGURES)}")
    return list(chosen)
