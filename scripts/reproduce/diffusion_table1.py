"""The second paper's pairs by themselves: what drafter and verifier score alone, and which tasks are left out for it.

python scripts/reproduce diffusion_table1 --pair smollm2-135m-masked --tasks mcq_synthetic --out DIR
"""

from __future__ import annotations

import argparse
from typing import Any

from foldspec.bench.axes import Axes
from foldspec.loading import FoundPair
from reproduce import diffusion, paper, report
from reproduce.diffusion import DREAM, GEMMA, OURS, TASKS
from reproduce.study import Study

MIRRORS = "Table 1 of the paper on speculative diffusion: accuracies of drafter and verifier alone"
DIFFERS = diffusion.DIFFERS


def axes(pair: str, found: FoundPair, chosen: argparse.Namespace) -> Axes:
    """The drafter alone, of one step and of one a token; the lossless point is what the sweep needs beside."""
    block = found.entry.block if found.entry is not None and found.entry.block else 4
    return diffusion.axes(found, chosen, leniency="0", steps=",".join(map(str, sorted({1, block}))))


STUDY = Study(
    facts="diffusion_table1",
    pairs=(DREAM, "qwen3-8b-sdar-1.7b", "qwen3-8b-sdar-8b", GEMMA),
    columns=diffusion.columns_of(*TASKS),
    axes=axes,
    max_context=diffusion.CONTEXT,
    gpu="h200",
    notes=OURS,
)


def run(chosen: argparse.Namespace) -> report.Report:
    found = list(diffusion.measured(STUDY, chosen))
    rows = [_row(name, each) for name, result in found for each in result["pareto"]["exclusions"]]
    head = ["pair", "task", "verifier", "best drafter", "difference", "chance", "here", "paper"]
    lines = [[str(cell) for cell in row.values()] for row in rows]
    notes = ["best drafter: the best of its efforts. Left out here: no benefit, if 0 lies in the interval of the "
             "difference; below chance, if the drafter scores no more than guessing does."]  # fmt: skip
    table = report.aligned(head, lines)
    return report.Report({"rows": rows}, table, None, diffusion.origins(found), [*notes, *STUDY.notes])


def _row(pair: str, each: dict[str, Any]) -> dict[str, Any]:
    low, high = each["difference"]["ci"]
    here = [
        word for word, is_so in (("no benefit", each["no_benefit"]), ("below chance", each["below_chance"])) if is_so
    ]
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
