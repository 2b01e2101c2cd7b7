"""The block-size ablation: the sweep of Figure 4 for several numbers of drafts a round, and whether one effort holds
the whole frontier."""

from __future__ import annotations

import argparse

from foldspec.bench.axes import Axes
from foldspec.loading import FoundPair
from reproduce import diffusion, report
from reproduce.diffusion import DREAM

MIRRORS = "Section G.2 of the paper on speculative diffusion: block sizes"
DIFFERS = f"the section itself is not in the stored text; {diffusion.DIFFERS}"


def axes(pair: str, found: FoundPair, chosen: argparse.Namespace) -> Axes:
    return diffusion.axes(found, chosen, leniency="0,0.4,0.8,1", steps="1,2,4", drafts="4,8,16")


STUDY = diffusion.study(
    facts="diffusion_blocks",
    pairs=(DREAM,),
    columns=diffusion.columns_of("gsm8k"),
    axes=axes,
    notes=("By default pair, task, drafts a round, steps, leniencies and the linear rule are ours.",),
)


def run(chosen: argparse.Namespace) -> report.Report:
    return diffusion.run(STUDY, chosen)
