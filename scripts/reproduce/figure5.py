"""Speedup over plain decoding of every method, by length of the prompt."""

from __future__ import annotations

import argparse

from reproduce import lengths, report
from reproduce.options import add_sources
from reproduce.requests import speedup_of
from reproduce.take import take

MIRRORS = "Figure 5 of the FOLD paper: speedup over AR by input length"
DIFFERS = "its benchmarks (LCA, LongBench v2) and lengths are others, the machine too; intervals stand in the table"


def options(parser: argparse.ArgumentParser) -> None:
    add_sources(parser, "live", ("live",))


def run(chosen: argparse.Namespace) -> report.Report:
    (taken,) = take(chosen)
    return lengths.by_length(taken, speedup_of, "speedup over AR, times")
