"""What the window brings over the original drafter, and what the far memory adds, by length, on documents."""

from __future__ import annotations

import argparse

from reproduce import decompose
from reproduce.options import add_sources

MIRRORS = "Table 11 of the FOLD paper: the difference in tau between FOLD and DFlash on LongBench v2, by length"
DIFFERS = "docs is this checkout's own task, of set lengths and not in buckets of lengths; by default offline"

run = decompose.run


def options(parser: argparse.ArgumentParser) -> None:
    add_sources(parser, "offline")
    parser.set_defaults(tasks=["docs"])
