"""Figures of ours beside a paper's: a row a pair, column and method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from foldspec.bench.bootstrap import average_interval
from foldspec.bench.methods import AR, AR_AGAIN
from foldspec.bench.summary import FEW
from foldspec.tasks import MADE
from reproduce import report
from reproduce.requests import Request, Taken, shown, speedup_of, tau_of
from reproduce.study import Column, Part, Study

__all__ = ["rows_of", "table"]

FIGURES = {"tau": tau_of, "speedup": speedup_of}
SAID = (
    "tau: committed tokens a round, the target's own included, mean over requests; speedup: mean of TPOT_AR / "
    "TPOT_method, paired by request; in brackets 95% bootstrap intervals over requests, resampled within each task."
)
OUTSIDE = f"*: the paper's figure lies outside our interval, of {FEW} requests or more in each task."


def rows_of(
    study: Study,
    pair: str,
    columns: Iterable[Column],
    taken: Taken,
    keep: Callable[[Request], bool] = lambda each: True,
) -> list[dict[str, Any]]:
    """Of each column and method our mean and interval, n, and the paper's figures; a column without a request in one of
    its shares is left out."""
    rows = []
    for column in columns:
        shares = [(weight, [r for r in taken.requests if keep(r) and _of(r, parts)]) for weight, parts in column.shares]
        if not all(requests for _, requests in shares):
            continue
        known = study.figures(pair, column)
        for method in (name for name in taken.methods if name not in (AR, AR_AGAIN)):
            theirs = zip(FIGURES, known.get(method, ()), strict=False)  # a file may have more figures
            paper = {name: value for name, value in theirs if value is not None}
            ours = {name: mean(shares, of(method)) for name, of in FIGURES.items()}
            rows.append(
                {
                    "pair": pair,
                    "column": column.name,
                    "method": method,
                    "n": sum(len(requests) for _, requests in shares),
                    "fewest": min(len(requests) for _, requests in shares),
                    "ours": ours,
                    "paper": paper,
                    "difference": {name: ours[name]["mean"] - value for name, value in paper.items()},
                }
            )
    return rows


def mean(shares: Sequence[tuple[float, Sequence[Request]]], value: Callable[[Request], float]) -> dict[str, float]:
    """The weighted mean of the shares' means, and its interval."""
    values = [[value(each) for each in requests] for _, requests in shares]
    weights = [weight for weight, _ in shares]
    total = sum(weight * sum(each) / len(each) for weight, each in zip(weights, values, strict=True)) / sum(weights)
    low, high = average_interval(values, weights=weights)
    return {"mean": total, "low": float(low), "high": float(high)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Without the paper's columns where it has nothing of any of them."""
    known = any(row["paper"] for row in rows)
    head = ["pair", "column", "n", "method"]
    for name in FIGURES:
        head += [name, "paper", "less it"] if known else [name]
    lines, before = list[list[str]](), ""
    for row in rows:
        same = f"{row['pair']} {row['column']}"
        line = ["", "", ""] if same == before else [row["pair"], row["column"], str(row["n"])]
        line.append(row["method"])
        for name in FIGURES:
            line.append(shown(row["ours"][name]))
            line += _paper(row, name) if known else []
        lines.append(line)
        before = same
    return report.aligned(head, lines)


def _paper(row: dict[str, Any], name: str) -> list[str]:
    if name not in row["paper"]:
        return ["", ""]
    value, ours = row["paper"][name], row["ours"][name]
    outside = row["fewest"] >= FEW and not ours["low"] <= value <= ours["high"]
    return [f"{value:.2f}", f"{row['difference'][name]:+.2f}" + (" *" if outside else "")]


def _of(request: Request, parts: Sequence[Part]) -> bool:
    """Of a task that is made here, lengths may have been cut to the context."""
    return any(
        request.task == part.task and (not part.lengths or request.length in part.lengths or part.task in MADE)
        for part in parts
    )
