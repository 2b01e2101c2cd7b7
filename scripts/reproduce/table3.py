"""Every method with DSpark drafters: the general tasks from 16K tokens on, and code."""

from __future__ import annotations

import argparse
from dataclasses import replace

from reproduce import report, tables
from reproduce.study import CODE, GENERAL, Column, Study, mean_of
from reproduce.table2 import DEVELOPED, DIFFERS

__all__ = ["DIFFERS", "MIRRORS", "STUDY", "run"]

MIRRORS = "Table 3 of the FOLD paper: tau and speedup with DSpark drafters"
LEAST = 16 * 1024  # tokens of a prompt of the general tasks


def _long(column: Column) -> Column:
    shares = tuple((weight, tuple(replace(p, least=LEAST) for p in parts)) for weight, parts in column.shares)
    return replace(column, shares=shares)


def columns(pair: str) -> list[Column]:
    """Of Qwen3-8B, whose context the code tasks exceed, Gov and LBv2 alone."""
    general = [_long(column) for column in GENERAL]
    if pair.startswith("qwen3-8b"):
        return [mean_of("General", general[:2])]
    return [mean_of("General", general), mean_of("Code", CODE)]


STUDY = Study(
    facts="fold_table3",
    pairs=("qwen3-8b-dspark", "gemma-4-12b-dspark"),
    columns=columns,
    max_context={"qwen3-8b-dspark": 32768},
    notes=(DEVELOPED, "General: Gov, LBv2, Retr.KV and En. with the same weight, as in the average of Table 2."),
)


def run(chosen: argparse.Namespace) -> report.Report:
    return tables.run(STUDY, chosen)
