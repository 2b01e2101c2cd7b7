"""Two frontiers apart: a diffusion model alone by its steps, and speculative decoding with a small autoregressive
drafter by its leniency. The rows `drafter alone` of the one and the points of the other are the figure's."""

from __future__ import annotations

import argparse

from foldspec.bench.axes import Axes
from foldspec.loading import FoundPair
from reproduce import diffusion, report
from reproduce.diffusion import DREAM

MIRRORS = "Figure 2(b) of the paper on speculative diffusion: diffusion alone beside lenient speculative decoding"
DIFFERS = diffusion.DIFFERS


def axes(pair: str, found: FoundPair, chosen: argparse.Namespace) -> Axes:
    """Of the diffusion model, steps; its lossless points come along."""
    if found.network is not None and "steps" not in found.network.efforts:
        return diffusion.axes(found, chosen, leniency="0,0.2,0.4,0.6,0.8,1")
    return diffusion.axes(found, chosen, leniency="0", steps="1,2,4,8")


STUDY = diffusion.study(
    facts="diffusion_figure2b",
    pairs=(DREAM, "qwen2.5-32b-qwen2.5-1.5b"),
    columns=diffusion.columns_of("gsm8k"),
    axes=axes,
    notes=("Task, verifier, steps and leniencies are ours: the stored text names only the drafters.",),
)


def run(chosen: argparse.Namespace) -> report.Report:
    return diffusion.run(STUDY, chosen)
