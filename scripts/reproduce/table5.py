"""The effect of FOLD's alpha on tau, by group of tasks: general and code."""

from __future__ import annotations

import argparse

from reproduce import alphas, report
from reproduce.options import add_sources

MIRRORS = "Table 5 of the FOLD paper: tau at alpha 2 against 1 and at 4 against 2, requests longer than the window"
DIFFERS = "general is docs and kv, code is code, all this checkout's own tasks; by default offline (tau_fs)"


def options(parser: argparse.ArgumentParser) -> None:
    add_sources(parser, "offline")


def run(chosen: argparse.Namespace) -> report.Report:
    return alphas.run(chosen, {"General": ("docs", "kv"), "Code": ("code",)})
