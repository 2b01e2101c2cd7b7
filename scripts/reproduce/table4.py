"""What the window brings over the original drafter, and what the far memory adds, by length, on code."""

from __future__ import annotations

import argparse

from reproduce import decompose
from reproduce.options import add_sources

MIRRORS = "Table 4 of the FOLD paper: the difference in tau between FOLD and DFlash on LCA, by length"
DIFFERS = "code is this checkout's own task and not LCA, at shorter lengths; intervals are given; by default offline"

run = decompose.run


def options(parser: argparse.ArgumentParser) -> None:
    add_sources(parser, "offline")
    parser.set_defaults(tasks=["code"])
