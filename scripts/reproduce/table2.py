"""Every method with DFlash drafters on seven long-context benchmarks: tau and speedup over plain decoding.

    python scripts/reproduce table2 --dry-run
    python scripts/reproduce table2 --pair llama-3.1-8b-dflash --tasks govreport,lca --out DIR

Measured by the code of `foldspec bench`, request by request, kept in OUT/work, where the same command goes on. Tasks
that the paper does not have, and other pairs, make the same table without its figures.
"""

from __future__ import annotations

import argparse

from reproduce import report, tables
from reproduce.study import CODE, GENERAL, Study

MIRRORS = "Table 2 of the FOLD paper: tau and speedup with DFlash drafters"
DIFFERS = "foldspec's own engine in place of vLLM 0.28; samples of ours, since the paper's orders are not published"
DEVELOPED = "The paper leaves out requests that it developed on, which are not published: counts differ by a few."
STUDY = Study(
    facts="fold_table2",
    pairs=("llama-3.1-8b-dflash", "qwen3.5-9b-dflash", "gemma-4-12b-dflash"),
    columns=lambda pair: [*GENERAL, *CODE],
    average="Avg.",
    notes=(DEVELOPED,),
)


def run(chosen: argparse.Namespace) -> report.Report:
    return tables.run(STUDY, chosen)
