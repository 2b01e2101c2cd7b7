"""Finding 2, whether context features say where they stand: a linear probe tells from the difference of two entries
which comes first, by how far apart they are; and which order it tells where the target read them shuffled.

    features      the context features c = norm(fc [tapped states]) of the text as it is
    embeddings    the same entries' token embeddings, which know no order
    shuffled      features where older text is read in another order of 64-token chunks: the order that it was read in,
                  and that of the text

Entries within the pair's window are left out, and the first 64, which all inputs share much of; and no separation is
beyond half of the rest, which would leave but its two ends to pair. One probe for each separation and fold: logistic
regression, Adam, on differences that are standardized by those of training; folds are of whole inputs.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from typing import Any

import torch
from _options import whole

from foldspec.errors import UsageError
from reproduce import figure, report
from reproduce.features import KINDS, entries
from reproduce.options import cells, load
from reproduce.probe import FOLDS, judged, sampled
from reproduce.requests import short

MIRRORS = "Figure 3 and Finding 2 of the FOLD paper, section 3.2 and appendix A, the shuffled control included"
DIFFERS = "this checkout's own tasks and shorter contexts; fewer inputs and pairs; a probe for each separation"
EDGES = (64, 256, 1024, 4096, 16384, 65536)  # of separations
COLORS = dict(zip(KINDS, ("#0072B2", "#777777", "#009E73", "#D55E00"), strict=True))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pairs", type=whole(10), default=500, metavar="N", help="an input and separation; default: 500"
    )
    parser.add_argument("--steps", type=whole(1), default=600, metavar="N", help="of the probe; default: 600")
    parser.set_defaults(lengths="4k", limit=10, tasks=["docs"])


def run(chosen: argparse.Namespace) -> report.Report:
    engine, found = load(chosen), list[dict[str, Any]]()
    for asked in (cell for task in chosen.tasks for cell in cells(engine, chosen, task, chosen.lengths)[0]):
        if len(asked.inputs) < FOLDS:
            what = f"{asked.task} gives {len(asked.inputs)} inputs, the probe is judged by {FOLDS} folds of them"
            raise UsageError(what, where="--limit", do=f"give {FOLDS} or more")
        inputs = []
        for number, one in enumerate(asked.inputs):
            inputs.append(entries(engine, one.ids, chosen.seed + number))
            print("figure3", *one.key, file=sys.stderr, flush=True)
        half = min(len(one[KINDS[0]].at) for one in inputs) // 2
        for low, high in (edges for edges in pairwise(EDGES) if edges[0] < 0.9 * half):
            cell: dict[str, Any] = {"task": asked.task, "length": asked.length, "n": len(inputs)}
            cell |= {"from": low, "to": min(high, half)}
            for kind in KINDS:
                draw = torch.Generator().manual_seed(chosen.seed)
                pairs = [sampled(one[kind], low, high, chosen.pairs, draw) for one in inputs]
                cell[kind] = judged(pairs, chosen.steps)
            found.append(cell)
    if not found:
        raise UsageError(f"beyond the window, no entries are {EDGES[0]} apart", do="name longer --lengths")
    plan = {"settings": engine.settings(), "seed": chosen.seed, "pairs": chosen.pairs, "steps": chosen.steps}
    return made(found, [report.origin(engine, plan)])


def made(cells: list[dict[str, Any]], origins: list[dict[str, Any]]) -> report.Report:
    rows = [
        [cell["task"], short(cell["length"]), f"{short(cell['from'])} to {short(cell['to'])}", str(cell["n"])]
        + [f"{cell[kind]['mean']:.3f} ± {cell[kind]['std']:.3f}" for kind in KINDS]
        for cell in cells
    ]
    table = report.markdown(["task", "length", "separation", "inputs", *KINDS], rows)
    notes = [
        "Accuracy of the probe on inputs that it has not seen, mean and standard deviation over folds; chance is 0.5."
    ]
    return report.Report({"cells": cells}, table, drawn(cells), origins, notes)


def drawn(cells: list[dict[str, Any]]) -> Any:
    """A panel for each task and length; separations at the middle of their logarithms; bands: standard deviation."""
    groups = list(dict.fromkeys((cell["task"], cell["length"]) for cell in cells))
    whole_figure, panels = figure.panels(1, len(groups), width=5.0, height=3.2)
    for panel, group in zip(panels, groups, strict=True):
        here = [cell for cell in cells if (cell["task"], cell["length"]) == group]
        places = [(cell["from"] * cell["to"]) ** 0.5 for cell in here]
        panel.axhline(0.5, color="#777777", linewidth=0.8)
        for kind in KINDS:
            mean, std = ([cell[kind][key] for cell in here] for key in ("mean", "std"))
            low, high = ([a + sign * b for a, b in zip(mean, std, strict=True)] for sign in (-1, 1))
            panel.plot(places, mean, color=COLORS[kind], marker="o", markersize=4, label=kind)
            panel.fill_between(places, low, high, color=COLORS[kind], alpha=0.13, linewidth=0)
        panel.set_xscale("log", base=2)
        edges = sorted({cell[key] for cell in here for key in ("from", "to")})
        panel.set_xticks(edges, [short(edge) for edge in edges])
        panel.minorticks_off()
        panel.set_xlabel("entries apart")
        panel.set_ylabel("accuracy of the probe")
        panel.set_title(f"{group[0]}, {short(group[1])} tokens")
    figure.one_legend(whole_figure, panels)
    return whole_figure
