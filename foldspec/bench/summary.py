"""From the lines of all requests to the figures, per task and length and averaged over tasks. Plain data."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foldspec.bench import clocks, guards, metrics
from foldspec.bench.bootstrap import average_interval, interval
from foldspec.bench.methods import AR, AR_AGAIN

__all__ = [
    "COLUMNS",
    "FEW",
    "NOISY",
    "against",
    "averages",
    "noise",
    "pairs",
    "requests",
    "rows",
    "verdict",
    "with_draft_prefill",
]

FEW = 5  # requests below which an interval decides nothing
NOISY = 0.05  # spread of one run above which the interval of a mean of ratios is off (a test shows by how much)

# what bench.json keeps of each run
COLUMNS = (
    *("task", "length", "id", "method", "input_sha256", "n_in", "n_out", "rounds", "ttft_ms", "decode_ms"),
    *("draft_prefill_ms", "score", "output_ids_sha256"),
)

Line = Mapping[str, Any]
Group = dict[str, Line]  # method -> line, of one request


def pairs(lines: Sequence[Line], arms: Sequence[str]) -> tuple[dict[tuple[str, int], list[Group]], Counter[Any]]:
    """(task, length) -> the requests that every arm ran; and how many were left out, by (task, length, why)."""
    requests: dict[tuple[Any, ...], Group] = {}
    for line in lines:
        requests.setdefault((line["task"], line["length"], line["id"]), {})[line["method"]] = line
    cells: dict[tuple[str, int], list[Group]] = {}
    left_out: Counter[Any] = Counter()
    for (task, length, _), group in requests.items():
        cell = cells.setdefault((task, length), [])
        why = guards.why_void(group, arms)
        if why is None:
            cell.append(group)
        else:
            left_out[task, length, why] += 1
    return cells, left_out


def with_draft_prefill(lines: Sequence[Line]) -> list[Line]:
    """The lines with the drafter's part of prefill in their TPOT, and so in every speedup. Rounds stay as they were."""
    return [
        line
        if line.get("tpot_ms") is None or not line["draft_prefill_ms"]
        else {**line, "tpot_ms": metrics.tpot(-line["draft_prefill_ms"], line["decode_ms"], line["n_out"])}
        for line in lines
    ]


def speedups(groups: Sequence[Group], method: str, baseline: str = AR) -> list[float]:
    return metrics.ratios([g[baseline]["tpot_ms"] for g in groups], [g[method]["tpot_ms"] for g in groups])


def verdict(ends: Sequence[float], n: int) -> str:
    """``gain`` or ``loss`` only where the interval leaves 1 out; ``few``: too few requests to say."""
    if n < FEW:
        return "few"
    return "gain" if ends[0] > 1 else "loss" if ends[1] < 1 else "none"


def rows(
    cells: Mapping[tuple[str, int], Sequence[Group]],
    arms: Sequence[str],
    *,
    resamples: int,
    seed: int,
    bandwidth: float | None,
    drawn: bool = False,
) -> list[dict[str, Any]]:
    """One row a task, length and method. ``bandwidth`` in GB/s; ``drawn``: texts may differ from plain decoding's."""

    def mean_ci(values: Sequence[float]) -> list[float]:
        return [float(end) for end in interval(values, resamples=resamples, seed=seed)]

    table = []
    for (task, length), groups in cells.items():
        for method in arms if groups else ():
            mine = [g[method] for g in groups]
            taus = [metrics.tau(line["commits"]) or 0.0 for line in mine]
            gains = speedups(groups, method)
            ends = [1.0, 1.0] if method == AR else mean_ci(gains)
            rounds = [metrics.per_round(0, line["decode_ms"], line["rounds"]) or 0.0 for line in mine]
            costs = [metrics.round_cost(r, g[AR]["tpot_ms"]) for r, g in zip(rounds, groups, strict=True)]
            rates = [line["bytes_a_round"] / r / 1e6 for line, r in zip(mine, rounds, strict=True)]
            made_up = mine[0].get("made_up", "")
            real = not made_up and not groups[0][AR].get("made_up")
            same = [
                line["output_ids_sha256"] == g[AR]["output_ids_sha256"] for line, g in zip(mine, groups, strict=True)
            ]
            equal = [gain for gain, is_same in zip(gains, same, strict=True) if is_same]
            table.append(
                {
                    "task": task,
                    "length": length,
                    "method": method,
                    "made_up": made_up,
                    "n": len(groups),
                    "flagged": sum(clocks.flagged(list(g.values())) for g in groups),
                    "n_in": [min(line["n_in"] for line in mine), max(line["n_in"] for line in mine)],
                    "n_out_mean": metrics.mean([line["n_out"] for line in mine]),
                    "tau_mean": metrics.mean(taus),
                    "tau_ci": mean_ci(taus),
                    "tau_pooled": metrics.tau_pooled([line["commits"] for line in mine]),
                    "tpot_ms_median": statistics.median(line["tpot_ms"] for line in mine),
                    "tpot_incl_draft_prefill_ms_median": statistics.median(
                        metrics.tpot(-line["draft_prefill_ms"], line["decode_ms"], line["n_out"]) or 0.0
                        for line in mine
                    ),
                    "speedup_mean": metrics.mean(gains),
                    "speedup_ci": ends,
                    "verdict": "baseline" if method == AR else verdict(ends, len(groups)),
                    "speedup_ratio_of_means": metrics.ratio_of_means(
                        [g[AR]["tpot_ms"] for g in groups], [line["tpot_ms"] for line in mine]
                    ),
                    "speedup_mean_equal_output": metrics.mean(equal) if equal and real else None,
                    "round_ms_mean": metrics.mean(rounds),
                    "round_in_ar_steps": metrics.mean(costs),
                    "break_even_tau": metrics.mean(costs),
                    "ttft_ms_median": statistics.median(line["ttft_ms"] for line in mine),
                    "draft_prefill_ms_median": statistics.median(line["draft_prefill_ms"] for line in mine),
                    "diff_from_ar": sum(line["first_diff"] is not None for line in mine)
                    if real and not drawn
                    else None,
                    "gap_largest": max((line["gap"] for line in mine if line["gap"] is not None), default=None),
                    **_scores(mine, mean_ci),
                    "gb_s": metrics.mean(rates),
                    "bandwidth_share": metrics.mean(rates) / bandwidth if bandwidth else None,
                    "parts_ms": _parts([line["parts_ms"] for line in mine]),
                    "commit_counts": _commit_counts([line["commits"] for line in mine]),
                }
            )
    return table


def _scores(mine: Sequence[Line], mean_ci: Callable[[Sequence[float]], list[float]]) -> dict[str, Any]:
    """The mean score with its interval, outputs without an answer (which count as wrong), outputs that were cut at the
    limit, and the second opinion; None where nothing was judged."""
    scores = [line["score"] for line in mine if line["score"] is not None]
    second = [line["second_opinion"] for line in mine if line["second_opinion"] is not None]
    return {
        "score_mean": metrics.mean(scores) if scores else None,
        "score_ci": mean_ci(scores) if scores else None,
        "no_answer": sum(line["answered"] is False for line in mine) if scores else None,
        "hit_limit": sum(line["finish"] == "length" for line in mine) if scores else None,
        "second_opinion_mean": metrics.mean(second) if second else None,
    }


def _commit_counts(commits: Sequence[Sequence[int]]) -> list[int]:
    """How many rounds committed 1, 2, ... tokens."""
    found = Counter(count for each in commits for count in each)
    return [found[count] for count in range(1, max(found, default=0) + 1)]


def _parts(traces: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    there = [trace for trace in traces if trace]
    return {part: metrics.mean([t[part] for t in there]) for part in there[0]} if there else None


def against(
    cells: Mapping[tuple[str, int], Sequence[Group]], arms: Sequence[str], other: str, *, resamples: int, seed: int
) -> list[dict[str, Any]]:
    """Each method's paired speedup over another method than plain decoding."""
    table = []
    for (task, length), groups in cells.items():
        for method in arms if groups else ():
            if method not in (other, AR, AR_AGAIN):
                gains = speedups(groups, method, other)
                ends = [float(end) for end in interval(gains, resamples=resamples, seed=seed)]
                table.append(
                    {
                        "task": task,
                        "length": length,
                        "method": method,
                        "made_up": groups[0][method].get("made_up", ""),
                        "against": other,
                        "n": len(groups),
                        "speedup_mean": metrics.mean(gains),
                        "speedup_ci": ends,
                        "verdict": verdict(ends, len(groups)),
                    }
                )
    return table


def averages(
    cells: Mapping[tuple[str, int], Sequence[Group]], arms: Sequence[str], *, resamples: int, seed: int
) -> list[dict[str, Any]]:
    """Over tasks of one length, each task the same weight; requests are resampled inside their task."""
    table = []
    for length in sorted({length for _, length in cells}):
        tasks = [groups for (_, other), groups in cells.items() if other == length and groups]
        for method in arms if len(tasks) > 1 else ():
            gains = [speedups(groups, method) for groups in tasks]
            taus = [[metrics.tau(g[method]["commits"]) or 0.0 for g in groups] for groups in tasks]
            gain_ends, tau_ends = (
                [float(end) for end in average_interval(each, resamples=resamples, seed=seed)] for each in (gains, taus)
            )
            fewest = min(len(groups) for groups in tasks)
            table.append(
                {
                    "length": length,
                    "method": method,
                    "made_up": tasks[0][0][method].get("made_up", ""),
                    "tasks": len(tasks),
                    "n": sum(len(groups) for groups in tasks),
                    "tau_mean": metrics.mean([metrics.mean(each) for each in taus]),
                    "tau_ci": tau_ends,
                    "speedup_mean": metrics.mean([metrics.mean(each) for each in gains]),
                    "speedup_ci": gain_ends,
                    "verdict": "baseline" if method == AR else verdict(gain_ends, fewest),
                }
            )
    return table


def requests(cells: Mapping[tuple[str, int], Sequence[Group]], arms: Sequence[str]) -> dict[str, Any]:
    """``columns``, and one of ``rows`` for every run that the figures are made of."""
    lines = [group[arm] for groups in cells.values() for group in groups for arm in arms]
    return {"columns": list(COLUMNS), "rows": [[line[name] for name in COLUMNS] for line in lines]}


def noise(cells: Mapping[tuple[str, int], Sequence[Group]], *, resamples: int, seed: int) -> dict[str, Any] | None:
    """Plain decoding against itself, over all requests. ``spread`` is the standard deviation of the log of one run's
    TPOT around its request's own; a mean of ratios of two such runs comes out above 1 by about ``spread ** 2``."""
    gains = [gain for groups in cells.values() for gain in speedups(groups, AR_AGAIN)]
    if not gains:
        return None
    ends = [float(end) for end in interval(gains, resamples=resamples, seed=seed)]
    logs = [math.log(gain) for gain in gains]
    spread = statistics.stdev(logs) / math.sqrt(2) if len(logs) > 1 else None
    return {
        "n": len(gains),
        "ar_vs_ar_mean": metrics.mean(gains),
        "ar_vs_ar_ci": ends,
        "width": ends[1] - ends[0],
        "contains_1": ends[0] <= 1 <= ends[1],
        "spread": spread,
    }
