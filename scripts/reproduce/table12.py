"""The effect of FOLD's alpha on tau, task by task."""

from __future__ import annotations

import argparse

from reproduce import alphas, report
from reproduce.options import add_sources

MIRRORS = "Table 12 of the FOLD paper: the effect of alpha on the general tasks and SPEED-Bench, by group"
DIFFERS = "each of this checkout's own tasks is a group; by default offline (tau_fs)"


def options(parser: argparse.ArgumentParser) -> None:
    add_sources(parser, "offline")


def run(chosen: argparse.Namespace) -> report.Report:
    return alphas.run(chosen, {task: (task,) for task in chosen.tasks})
