"""The second paper's pairs by themselves: what drafter and verifier score alone, and which tasks are left out for it.

python scripts/reproduce diffusion_table1 --pair smollm2-135m-masked --tasks mcq_synthetic --out DIR
"""

from __future__ import annotations

import argparse
from typing import Any

from foldspec.bench.axes import Axes
from foldspec.loading import FoundPair
from reproduce import diffusion, paper, report
from reproduce.diffusion import DREAM, GEMMA, TASKS

MIRRORS = "Table 1 of the paper on speculative diffusion: accuracies of drafter and verifier alone"
DIFFERS = diffusion.DIFFERS
LEGEND = (
    "Scores, verifier and drafter alone; best drafter: the best of its efforts; difference: verifier less drafter, "
    "paired, with its 95% interval; chance: the score of guessing.",
    "Left out by the paper's two criteria: no benefit, where that interval does not lie above 0; below chance, where "
    "the drafter scores less than guessing. Fewer than 5 requests leave out nothing.",
)


def axes(pair: str, found: FoundPair, chosen: argparse.Namespace) -> Axes:
    """The drafter alone, of one step and of one a token; the lossless point is what the sweep needs beside."""
    block = found.entry.block if found.entry is not None and found.entry.block else 4
    return diffusion.axes(found, chosen, leniency="0", steps=",".join(map(str, sorted({1, block}))))


STUDY = diffusion.study(
    facts="diffusion_table1",
    pairs=(DREAM, "qwen3-8b-sdar-1.7b", "qwen3-8b-sdar-8b", GEMMA),
    columns=diffusion.columns_of(*TASKS),
    axes=axes,
)


def run(chosen: argparse.Namespace) -> report.Report:
    found = list(diffusion.measured(STUDY, chosen))
    rows = [_row(name, each) for name, result in found for each in result["pareto"]["exclusions"]]
    known = paper.facts(STUDY.facts)
    head = ["pair", "task", "verifier", "best drafter", "difference", "chance", "here", "paper"]
    lines = [[str(cell) for cell in row.values()] for row in rows]
    table = report.aligned(head, lines)
    return report.Report(
        {"rows": rows}, table, None, diffusion.origins(found), [*LEGEND, *known["missing"], *STUDY.notes]
    )


def _row(pair: str, each: dict[str, Any]) -> dict[str, Any]:
    low, high = each["difference"]["ci"]
    here = [name.replace("_", " ") for name in ("no_benefit", "below_chance") if each[name]]
    taken = paper.facts(STUDY.facts)["evaluated"].get(pair)
    return {
        "pair": pair,
        "task": each["task"],
        "verifier": f"{each['verifier_score']:.3f}",
        "drafter": f"{each['drafter_score']:.3f}",
        "difference": f"{each['difference']['mean']:+.3f} [{low:+.3f}, {high:+.3f}]",
        "chance": "" if each["chance"] is None else f"{each['chance']:g}",
        "here": f"left out: {' and '.join(here)}" if here else "taken",
        "paper": "" if taken is None else "taken" if each["task"] in taken else "left out",
    }
