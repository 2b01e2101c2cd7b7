"""Llama-3.1-8B on the seven general tasks in a second engine, which here is foldspec's own: shared_window stands for
SGLang's draft window. With the outputs that differ from plain decoding's, and without them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from reproduce import beside, paper, report, tables
from reproduce.requests import Taken
from reproduce.study import Column, Part, Study, mean_of, one
from reproduce.table2 import DEVELOPED

MIRRORS = "Table 10 of the FOLD paper: Llama-3.1-8B in SGLang, averages over the general tasks"
DIFFERS = "foldspec's engine in place of SGLang 0.5.18, and shared_window of SGLang's built-in draft window"
ALL, COMMON = "All requests", "Common set"
TASKS = ("govreport", "longbench_v2", "retr_kv", "en_sum", "en_qa", "en_mc", "en_dia")
STUDY = Study(
    facts="fold_table10",
    pairs=("llama-3.1-8b-dflash",),
    columns=lambda pair: [mean_of(ALL, [one(task, Part(task)) for task in TASKS])],
    average=ALL,  # of what is left of it too
    arms=("full", "shared_window", "streaming", "cmr", "rerope", "infllm", "window", "fold"),
    notes=(DEVELOPED, f"{COMMON}: without the requests of which any method's output differs from plain decoding's."),
)


def run(chosen: argparse.Namespace) -> report.Report:
    rows, notes, origins = list[dict[str, Any]](), list[str](), list[Any]()
    for pair, columns, taken in tables.measured(STUDY, chosen):
        whole = replace(columns[-1], name=ALL)  # of one task there is no average, but its column
        rows += beside.rows_of(STUDY, pair, [whole], taken)
        common = replace(whole, name=COMMON)
        rows += beside.rows_of(STUDY, pair, [common], taken, keep=lambda each: not each.differs)
        notes += [_differing(pair, whole, taken), *tables.told(STUDY, pair, taken, rows)]
        origins += taken.origins
    return report.Report({"rows": rows}, beside.table(rows), None, origins, [*tables.said(rows), *notes, *STUDY.notes])


def _differing(pair: str, whole: Column, taken: Taken) -> str:
    known = STUDY.figures(pair, whole)
    place = paper.facts(STUDY.facts)["figures"].index("differ from AR")
    said = []
    for arm in STUDY.arms:
        count = sum(arm in each.differs for each in taken.requests)
        theirs = f" (paper {known[arm][place]})" if arm in known else ""
        said.append(f"{arm} {count}{theirs}")
    return f"Outputs that differ from plain decoding's, of {len(taken.requests)}: {', '.join(said)}."
