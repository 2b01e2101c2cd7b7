"""Every method on the throughput tiers of SPEED-Bench: 8K, 16K and 32K tokens."""

from __future__ import annotations

import argparse

from reproduce import report, tables
from reproduce.study import Part, Study, one
from reproduce.table2 import DIFFERS

__all__ = ["DIFFERS", "MIRRORS", "STUDY", "run"]

MIRRORS = "Table 8 of the FOLD paper: tau and speedup on SPEED-Bench"
TIERS = {"8K": (8192, 256), "16K": (16384, 768), "32K": (32768, 768)}  # tokens, requests
STUDY = Study(
    facts="fold_table8",
    pairs=("llama-3.1-8b-dflash", "qwen3.5-9b-dflash", "gemma-4-12b-dflash"),
    columns=lambda pair: [one(name, Part("speedbench", (length,), most)) for name, (length, most) in TIERS.items()],
    notes=(
        "The data is made by NVIDIA's own command (prepare_data.py of its Model-Optimizer, examples/specdec_bench): "
        "--data speedbench=FOLDER.",
        "Which 256 or 768 requests of a tier the paper takes is not published: here the first by hash.",
    ),
)


def run(chosen: argparse.Namespace) -> report.Report:
    return tables.run(STUDY, chosen)
