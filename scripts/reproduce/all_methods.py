"""Every method by task and length: tau_fs offline at every position of one text, tau and speedup of live decoding.

Offline and live are of the same requests where they have a length in common. Tasks may be measured in processes of
their own (--tasks docs --way offline, ...) with the same --out; the command without them makes the table.
"""

from __future__ import annotations

import argparse
from typing import Any

from foldspec.bench.methods import AR_AGAIN
from foldspec.bench.summary import FEW
from reproduce import overview, report
from reproduce.options import WAYS, add_sources
from reproduce.requests import Summary, Taken, less, short, shown, speedup_of, summed_up, tau_of
from reproduce.take import take

MIRRORS = "Tables 2 and 8 of the FOLD paper: tau and speedup over AR of every method"
DIFFERS = "its pairs, benchmarks and lengths are others; offline tau_fs stands beside live tau"
NOTES = (
    "tau_fs: 1 + leading drafts that equal the target's greedy text, at every position of it; tau: committed tokens a "
    "round; speedup: mean of TPOT_AR / TPOT_method, paired by request; in brackets 95% bootstrap intervals over "
    "requests; 'less full' is paired by request, and * marks an interval without 0 of "
    f"{FEW} requests or more.",
    "Offline, cmr reads a selection made anew at that position, and infllm has mean representatives of its blocks; "
    "live, cmr keeps a selection for 8 rounds and infllm the entries that received most attention.",
)


def options(parser: argparse.ArgumentParser) -> None:
    add_sources(parser, "both", WAYS)
    parser.set_defaults(lengths="1k,2k,4k,8k", live_lengths="2k,8k", limit=20)  # some 100 minutes on a CPU


def run(chosen: argparse.Namespace) -> report.Report:
    taken = take(chosen)
    cells = [cell for each in taken for cell in cells_of(each)]
    cells.sort(key=lambda cell: (chosen.tasks.index(cell["task"]), cell["length"], cell["measure"] != "tau_fs"))
    notes = [*NOTES, *(note for each in taken for note in (report.sample(each), *remarks(each)))]
    notes = list(dict.fromkeys(notes))
    origins = [origin for each in taken for origin in each.origins]
    return report.Report({"cells": cells}, table(cells), overview.draw(cells), origins, notes)


MEASURES = {"offline": {"tau_fs": tau_of}, "live": {"tau": tau_of, "speedup": speedup_of}}


def remarks(taken: Taken) -> list[str]:
    """On a prompt that was cut to fit the context, and on the noise of a speedup."""
    longest = max(each.length for each in taken.requests)
    context = next(iter(taken.plan["methods"].values()))["max_context"]
    found = [f"{longest} is the longest prompt that leaves room for the output in a context of {context}."]
    if taken.way == "live":
        found.append(report.noise(taken))
    return found if longest % 1024 else found[1:]


def cells_of(taken: Taken) -> list[dict[str, Any]]:
    """A cell a task, length and measure: each method's mean, and its paired difference to ``full``."""
    found = []
    names = [name for name in taken.methods if name != AR_AGAIN]
    for (task, length), requests in taken.cells(["full"]).items():
        for measure, value in MEASURES[taken.way].items():
            cell: dict[str, Any] = {"task": task, "length": length, "measure": measure, "n": len(requests)}
            cell["left_out"] = taken.reasons(task, length)
            cell["methods"] = {name: summed_up(requests, value(name)) for name in names}
            differences = {name: less(value(name), value("full")) for name in names if name != "full"}
            cell["less full"] = {name: summed_up(requests, each) for name, each in differences.items()}
            found.append(cell)
    return found


def table(cells: list[dict[str, Any]]) -> str:
    names, rows = overview.names_of(cells), []
    for cell in cells:
        head = [cell["task"], short(cell["length"])]
        values = [shown(cell["methods"][name]) if name in cell["methods"] else "" for name in names]
        rows.append([*head, cell["measure"], str(cell["n"]), report.reasons(cell["left_out"]), *values])
        less = [difference(cell["less full"][name], cell["n"]) if name in cell["less full"] else "" for name in names]
        rows.append([*head, f"{cell['measure']} less full", str(cell["n"]), "", *less])
    return report.markdown(["task", "length", "", "n", "left out", *names], rows)


def difference(found: Summary, n: int) -> str:
    return shown(found, "+") + (" *" if n >= FEW and (found["low"] > 0 or found["high"] < 0) else "")
