"""The concentration factor: ratios of tau between alphas, request by request, over those longer than the window."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foldspec.bench.bootstrap import ratio_interval
from foldspec.errors import UsageError
from reproduce import figure, report
from reproduce.requests import Request, pooled_tau, shown, summed_up, tau_of
from reproduce.take import take

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHAS = {"alpha 2 vs 1": ("fold", "fold:alpha=1"), "alpha 4 vs 2": ("fold:alpha=4", "fold")}
DAGGER = "† the difference of the overall tau, of all rounds at once, leads to another conclusion than the mean ratio."


def run(chosen: argparse.Namespace, groups: Mapping[str, Sequence[str]]) -> report.Report:
    """``groups``: name -> tasks. Means are over all requests of a group, of all lengths."""
    (taken,) = take(chosen)
    taken.cells(["fold:alpha=1", "fold", "fold:alpha=4"])
    window = taken.plan["methods"]["fold"]["window"]
    longer = [each for each in taken.requests if each.n_in > window]
    if not longer:
        raise UsageError(f"no request is longer than the window of {window}", do="name longer --lengths")
    rows = []
    for group, tasks in groups.items():
        requests = [each for each in longer if each.task in tasks]
        if requests:
            ratios = {name: compared(requests, a, b) for name, (a, b) in ALPHAS.items()}
            rows.append({"group": group, "tasks": list(tasks), "n": len(requests)})
            rows[-1] |= {"tau alpha 2": summed_up(requests, tau_of("fold")), "ratios": ratios}
    notes = [DAGGER, f"Requests longer than the window of {window} alone.", report.sample(taken)]
    results = {"way": taken.way, "window": window, "groups": rows}
    return report.Report(results, table(rows), draw(rows), taken.origins, notes)


def compared(requests: Sequence[Request], a: str, b: str) -> dict[str, Any]:
    """The mean of the requests' ratios of tau, a over b, and what the overall tau says."""
    ratio = summed_up(requests, lambda each: each.tau[a] / each.tau[b])
    first, second = (
        ([each.tau[m] * each.rounds[m] for each in requests], [each.rounds[m] for each in requests]) for m in (a, b)
    )
    overall = pooled_tau(requests, a) / pooled_tau(requests, b)
    low, high = ratio_interval(*first, less=second)
    other = conclusion(ratio["low"], ratio["high"], 1) != conclusion(low, high, 0)
    return ratio | {"overall": overall, "other_conclusion": other}


def conclusion(low: float, high: float, even: float) -> int:
    return 1 if low > even else -1 if high < even else 0


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        ratios = [shown(one, digits=3) + (" †" if one["other_conclusion"] else "") for one in row["ratios"].values()]
        tau = f"{row['tau alpha 2']['mean']:.2f}"
        lines.append([row["group"], ", ".join(row["tasks"]), str(row["n"]), tau, *ratios])
    return report.markdown(["group", "tasks", "n", "tau alpha 2", *ALPHAS], lines)


def draw(rows: list[dict[str, Any]]) -> Figure:
    drawn, (panel,) = figure.panels(1, 1, width=5.2, height=1.4 + 0.45 * len(rows))
    panel.axvline(1, color="#777777", linewidth=0.8)
    cells = [{"label": name, "methods": {row["group"]: row["ratios"][name] for row in rows}} for name in ALPHAS]
    figure.by_method(panel, cells, [row["group"] for row in rows], "ratio of tau, mean over requests")
    figure.one_legend(drawn, [panel])
    return drawn
