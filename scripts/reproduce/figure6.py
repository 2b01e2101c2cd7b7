"""tau of every method, by length of the prompt."""

from __future__ import annotations

import argparse

from reproduce import lengths, report
from reproduce.options import add_sources
from reproduce.requests import tau_of
from reproduce.take import take

MIRRORS = "Figure 6 of the FOLD paper: acceptance length by input length"
DIFFERS = "its benchmarks (LCA, LongBench v2) and lengths are others; with --way offline it is tau_fs, with live tau"


def options(parser: argparse.ArgumentParser) -> None:
    add_sources(parser, "offline")


def run(chosen: argparse.Namespace) -> report.Report:
    (taken,) = take(chosen)
    what = "tau_fs, tokens a position" if taken.way == "offline" else "tau, tokens a round"
    return lengths.by_length(taken, tau_of, what)
