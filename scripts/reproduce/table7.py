"""How many requests of each benchmark fit a target, and of which lengths by its tokenizer: ours beside the paper's.

    python scripts/reproduce table7 --pair qwen3-8b-dflash --data govreport=gov_report_e.jsonl --offline

Counted is what --data names or the hub's cache has; nothing is fetched but a target's tokenizer (not with --offline).
No model runs, and without --out nothing is written.
"""

from __future__ import annotations

import argparse
from typing import Any

from foldspec.bench.inputs import Cell
from foldspec.bench.sources import About
from foldspec.errors import FoldspecError
from foldspec.tasks import make_task
from foldspec.tasks.data import Access
from reproduce import counts, paper, report, tables
from reproduce.study import CODE, GENERAL, K, Part, Study, one
from reproduce.table2 import DEVELOPED

MIRRORS = "Table 7 of the FOLD paper: requests, input lengths and limits of output"
DIFFERS = "samples of ours, since the paper's orders are not published"
WRITES = False  # without --out it prints, and that is all
TIERS = {1: 256, 2: 256, 8: 256, 16: 768, 32: 768}  # of SPEED-Bench: 1,024 tokens, requests
PARTS = [part for column in GENERAL + CODE for part in column.parts]
PARTS += [Part("lca", (length * K,)) for length in (180, 240)]
PARTS += [Part("speedbench", (length * K,), most) for length, most in TIERS.items()]
STUDY = Study(
    facts="fold_table7",
    pairs=("llama-3.1-8b-dflash", "qwen3.5-9b-dflash", "gemma-4-12b-dflash"),
    columns=lambda pair: [one(part.label, part) for part in PARTS],
    notes=(
        DEVELOPED,
        "Tokens in units of 1,024; † is the range of the length bins that hold the requests.",
        "SPEED-Bench's data is made by NVIDIA's own command, prepare_data.py of its Model-Optimizer "
        "(examples/specdec_bench): --data speedbench=FOLDER.",
    ),
    bench=False,
)


def run(chosen: argparse.Namespace) -> report.Report:
    rows, notes = list[dict[str, Any]](), list[str]()
    for pair in tables.pairs_of(STUDY, chosen):
        try:
            about = counts.about(chosen, pair, chosen.max_context or STUDY.context_of(pair))
        except FoldspecError as error:
            about = None
            notes.append(f"{pair}: its requests are not counted, for want of its tokenizer: {error}")
        for column in STUDY.chosen(pair or "", chosen.tasks, chosen.lengths):
            rows += [_row(pair or "the target", part, about, chosen, notes) for part in column.parts]
    known = [*dict.fromkeys(notes), *STUDY.notes]
    return report.Report({"rows": rows}, table(rows), None, [], known)


def _row(pair: str, part: Part, about: About | None, chosen: argparse.Namespace, notes: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"pair": pair, "task": part.label, "ours": None}
    row["paper"] = {"n": paper.requests(STUDY.facts, pair, part.label), "tokens": paper.inputs(pair, part.label)}
    given = part.task in counts.data_of(chosen).paths
    if about is None:
        if why := _missing(part, chosen):
            notes.append(why)
        return row
    try:
        cells = counts.cells_of(about, [part], chosen, offline=chosen.offline or not given)
    except FoldspecError as error:
        if given:
            raise
        notes.append(_not_there(part, error))
        return row
    row["ours"] = _ours(cells)
    return row


def _missing(part: Part, chosen: argparse.Namespace) -> str:
    """What is said of data that is not there, where there is no tokenizer to count it with."""
    task = make_task(part.task, Access(counts.data_of(chosen).paths.get(part.task), offline=True))
    try:
        next(iter(task.items(lambda text: (0,), (part.lengths or (1,))[0], 1, 0)), None)
    except FoldspecError as error:
        return _not_there(part, error)
    return ""


def _not_there(part: Part, error: FoldspecError) -> str:
    return f"{part.task}: data not at hand: {error.do or error}"


def _ours(cells: list[Cell]) -> dict[str, Any]:
    sizes = [len(item.ids) for cell in cells for item in cell.inputs]
    return {
        "n": len(sizes),
        "tokens": counts.span(sizes),
        "least": min(sizes),
        "most": max(sizes),
        "too long": sum(cell.too_long for cell in cells),
        "repeated": sum(cell.repeated for cell in cells),
        "wording": cells[0].facts.get("prompt"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines, before = list[list[str]](), ""
    for row in rows:
        known, ours = row["paper"], row["ours"]
        line = ["" if row["pair"] == before else row["pair"], row["task"], _text(known["n"]), known["tokens"] or ""]
        if ours is None:
            line += ["", "", "", "", ""]
        else:
            less = "" if known["n"] is None else f"{ours['n'] - known['n']:+d}"
            line += [str(ours["n"]), less, ours["tokens"], str(ours["too long"]), ours["wording"] or ""]
        lines.append(line)
        before = row["pair"]
    head = ["pair", "task", "paper's n", "tokens", "our n", "less it", "tokens", "too long", "wording"]
    return report.aligned(head, lines)


def _text(count: int | None) -> str:
    return "" if count is None else str(count)
