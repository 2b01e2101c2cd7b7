"""The throughput model beside what is measured: acceptance against agreement, and throughput, by step count and
leniency. The columns `model` have Eq. 6 and Eq. 7."""

from __future__ import annotations

import argparse

from foldspec.bench.axes import Axes
from foldspec.loading import FoundPair
from reproduce import diffusion, report
from reproduce.diffusion import DREAM

MIRRORS = "Figure 3 of the paper on speculative diffusion: theoretical and measured tradeoffs"
DIFFERS = diffusion.DIFFERS


def axes(pair: str, found: FoundPair, chosen: argparse.Namespace) -> Axes:
    return diffusion.axes(found, chosen, leniency="0,0.2,0.4,0.6,0.8,1", steps="1,2,4,8")


STUDY = diffusion.study(
    facts="diffusion_figure3",
    pairs=(DREAM,),
    columns=diffusion.columns_of("gsm8k"),
    axes=axes,
    notes=("By default pair, task and rule are the paper's; steps and leniencies are ours.",),
)


def run(chosen: argparse.Namespace) -> report.Report:
    return diffusion.run(STUDY, chosen)
