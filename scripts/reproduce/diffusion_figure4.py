"""Speed and accuracy under modified Cactus, of a masked and of a uniform diffusion drafter: quality against latency and
against throughput, and which points lie on the frontiers."""

from __future__ import annotations

import argparse

from foldspec.bench.axes import Axes
from foldspec.loading import FoundPair
from reproduce import diffusion, report
from reproduce.diffusion import DREAM, GEMMA
from reproduce.study import Column

MIRRORS = "Figure 4 of the paper on speculative diffusion: Pareto frontiers under modified Cactus"
DIFFERS = diffusion.DIFFERS


def axes(pair: str, found: FoundPair, chosen: argparse.Namespace) -> Axes:
    return diffusion.axes(found, chosen, accept="cactus", leniency="0,0.1,0.3,1,3", steps="1,2,4,8")


def columns(pair: str) -> list[Column]:
    """The tasks that the paper's two criteria leave of each pair."""
    tasks = ("gpqa_diamond",) if pair == GEMMA else ("gsm8k", "humaneval")
    return list(diffusion.columns_of(*tasks)(pair))


STUDY = diffusion.study(
    facts="diffusion_figure4",
    pairs=(DREAM, GEMMA),
    columns=columns,
    axes=axes,
    notes=("By default pairs, rule and tasks are the paper's; steps and leniencies are ours.",),
)


def run(chosen: argparse.Namespace) -> report.Report:
    return diffusion.run(STUDY, chosen)
