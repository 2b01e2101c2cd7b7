"""Qwen3-8B with its DFlash drafter on Gov and LBv2, in a context of 32K tokens."""

from __future__ import annotations

import argparse

from reproduce import report, tables
from reproduce.study import GENERAL, Study
from reproduce.table2 import DEVELOPED, DIFFERS

__all__ = ["DIFFERS", "MIRRORS", "STUDY", "run"]

MIRRORS = "Table 9 of the FOLD paper: tau and speedup of Qwen3-8B with DFlash"
STUDY = Study(
    facts="fold_table9",
    pairs=("qwen3-8b-dflash",),
    columns=lambda pair: GENERAL[:2],
    max_context={"qwen3-8b-dflash": 32768},
    notes=(DEVELOPED,),
)


def run(chosen: argparse.Namespace) -> report.Report:
    return tables.run(STUDY, chosen)
