"""How the original drafter's speedup over plain decoding falls with the length of the prompt, by task."""

from __future__ import annotations

import argparse
from typing import Any

from reproduce import figure, report
from reproduce.options import add_sources
from reproduce.requests import short, shown, speedup_of, summed_up, tau_of
from reproduce.take import take

MIRRORS = "Figure 2 of the FOLD paper: long-context degradation of DFlash drafters (SPEED-Bench, LongBench v2, Retr.KV)"
DIFFERS = "its pairs, benchmarks and lengths are others, the machine too; tau stands beside the speedup"


def options(parser: argparse.ArgumentParser) -> None:
    add_sources(parser, "live", ("live",))


def run(chosen: argparse.Namespace) -> report.Report:
    (taken,) = take(chosen)
    cells: list[dict[str, Any]] = []
    for (task, length), requests in taken.cells(["full"]).items():
        means = {"speedup": summed_up(requests, speedup_of("full")), "tau": summed_up(requests, tau_of("full"))}
        left_out = taken.reasons(task, length)
        cells.append({"task": task, "length": length, "n": len(requests), "left_out": left_out, **means})
    rows = [
        [cell["task"], short(cell["length"]), str(cell["n"]), shown(cell["speedup"]), shown(cell["tau"])]
        for cell in cells
    ]
    drawn, (panel,) = figure.panels(1, 1, width=4.6, height=3.4)
    panel.axhline(1, color="#777777", linewidth=0.8)
    for task in dict.fromkeys(cell["task"] for cell in cells):
        figure.by_length(panel, [(cell["length"], cell["speedup"]) for cell in cells if cell["task"] == task], task)
    figure.length_axis(panel, sorted({cell["length"] for cell in cells}))
    panel.set_ylabel("speedup of full over AR, times")
    figure.one_legend(drawn, [panel])
    table = report.markdown(["task", "length", "n", "speedup of full", "tau of full"], rows)
    return report.Report({"cells": cells}, table, drawn, taken.origins, [report.sample(taken)])
