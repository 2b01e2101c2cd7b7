"""Drafters compared under one verifier, Qwen3-8B: SDAR by confidence and leniency, and drafters of one step by leniency
alone."""

from __future__ import annotations

import argparse

from foldspec.bench.axes import Axes
from foldspec.loading import FoundPair
from reproduce import diffusion, report

MIRRORS = "Figure 5 of the paper on speculative diffusion: frontiers of drafters with a shared verifier"
DIFFERS = diffusion.DIFFERS
UNO = "qwen3-8b-uno"


def axes(pair: str, found: FoundPair, chosen: argparse.Namespace) -> Axes:
    """The paper's own values (section 4.3)."""
    levels = None if pair == UNO else "0.3,0.5,0.7,0.9"
    steps = "1,2,4" if pair == UNO else "1"
    return diffusion.axes(found, chosen, leniency="0,0.2,0.4,0.6,0.8,1", steps=steps, confidence=levels)


STUDY = diffusion.study(
    facts="diffusion_figure5",
    pairs=("qwen3-8b-sdar-1.7b", "qwen3-8b-sdar-8b", UNO, "qwen3-8b-dflash-b16", "qwen3-8b-dspark"),
    columns=diffusion.columns_of("gsm8k", "humaneval"),
    axes=axes,
    notes=(
        "By default verifier, drafters, tasks, leniencies, confidences and steps are the paper's; drafts a round are "
        "those of the checkpoints. Which checkpoint its DFlash is, it does not say: z-lab's is taken.",
    ),
)


def run(chosen: argparse.Namespace) -> report.Report:
    return diffusion.run(STUDY, chosen)
