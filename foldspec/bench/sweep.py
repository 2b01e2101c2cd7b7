"""The part ``pareto`` of a sweep's result: each point's quality and both its speeds, over plain lines.

    latency      prompt to last token: time to the first token, which has the prefill in it, and decoding
    throughput   tokens of output over that time, of all requests together

One prefill serves all methods, the drafter's part included; plain decoding has no use for that part, so it is taken off
its time. The drafter alone never ran: its runs verified nothing, but the target's pass was made all the same. Its time
is that to the first token and, for each of its rounds, what drafting takes (the median of its calibrating runs).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from foldspec.bench import metrics
from foldspec.bench import throughput as model
from foldspec.bench.axes import Axes, Point
from foldspec.bench.bootstrap import interval, ratio_interval
from foldspec.bench.frontier import exclusions, frontiers
from foldspec.bench.summary import Group, Line

__all__ = ["pareto", "points"]

Cells = Mapping[tuple[str, int], Sequence[Group]]


def pareto(
    axes: Axes,
    cells: Cells,
    modelled: Sequence[Mapping[str, Any]],
    lossless: Mapping[str, bool],
    chances: Mapping[str, float | None],
    red: Collection[str] = (),
    *,
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """``modelled``: the rows ``methods`` of ``modelled.calibration``; ``lossless`` by method; ``chances``: the score of
    guessing, by task; ``red``: methods whose parity is (``parity.py``), which are on no frontier."""
    found = points(axes, cells, modelled, lossless, resamples=resamples, seed=seed)
    for point in found:
        point["parity_red"] = point["method"] in red
    right = [point for point in found if not point["parity_red"]]
    return {
        "axes": axes.as_dict(),
        "points": found,
        "frontiers": frontiers(cells, right, resamples=resamples, seed=seed),
        "exclusions": exclusions(cells, found, chances, resamples=resamples, seed=seed),
    }


def points(
    axes: Axes,
    cells: Cells,
    modelled: Sequence[Mapping[str, Any]],
    lossless: Mapping[str, bool],
    *,
    resamples: int,
    seed: int,
) -> list[dict[str, Any]]:
    """One a task, length and method, in the order of the plan; without the drafter alone where its time is not known,
    since no calibrating run had room."""
    how = {"resamples": resamples, "seed": seed}
    rows = {(row["task"], row["length"], row["method"]): row for row in modelled}
    table = []
    for (task, length), groups in cells.items():
        for point in axes.points if groups else ():
            row = rows.get((task, length, point.label))
            if point.kind == "drafter" and row is None:
                continue
            lines = [group[point.label] for group in groups]
            seconds = [_seconds(point, group, row) for group in groups]
            table.append(
                {
                    "task": task,
                    "length": length,
                    "method": point.label,
                    "kind": point.kind,
                    "draft_tokens": point.draft_tokens,
                    "effort": point.effort,
                    "leniency": point.leniency,
                    "lossless": lossless[point.label],
                    "n": len(groups),
                    "score": _mean([line["score"] for line in lines], how),
                    "logprob": _mean([line.get("logprob") for line in lines], how),
                    "agreement": _mean([_less(line.get("spent")) for line in lines], how),
                    "latency_s": _mean(seconds, how),
                    "tokens_s": _pooled([line["n_out"] for line in lines], seconds, how),
                    "agreement_modelled": _agreement(point, row),
                    "tokens_s_modelled": _throughput(point, groups, row),
                }
            )
    return table


def _seconds(point: Point, group: Group, row: Mapping[str, Any] | None) -> float:
    """From the prompt to the last token of one request."""
    line = group[point.label]
    return (_first_ms(point, group) + _rest_ms(point, line, row)) / 1e3


def _first_ms(point: Point, group: Group) -> float:
    unused = max(line["draft_prefill_ms"] for line in group.values()) if point.kind == "verifier" else 0.0
    return float(group[point.label]["ttft_ms"]) - unused


def _rest_ms(point: Point, line: Line, row: Mapping[str, Any] | None) -> float:
    if point.kind == "drafter" and row is not None:
        return float(line["rounds"] * row["draft_ms_measured"])
    return float(line["decode_ms"])


def _agreement(point: Point, row: Mapping[str, Any] | None) -> float | None:
    """Eq. 6; the drafter alone is its lambda 1. None for a rule that it does not describe."""
    if row is None or row["d"] is None:
        return None
    shares = [1.0] if point.kind == "drafter" else row["leniency"]
    return None if shares is None else metrics.mean([model.agreement(row["d"], share) for share in shares])


def _throughput(point: Point, groups: Sequence[Group], row: Mapping[str, Any] | None) -> float | None:
    """Eq. 7 for the tokens after the first, behind the time to the first as it was measured; the drafter alone has no
    c_v. Tokens a second, as those that are measured."""
    if row is None or row["tokens_a_round_modelled"] is None:
        return None
    rest = 0.0 if point.kind == "drafter" else row["verify_ms"]
    rate = model.throughput(row["tokens_a_round_modelled"], row["draft_ms"], rest)
    tokens = [group[point.label]["n_out"] for group in groups]
    first = sum(_first_ms(point, group) for group in groups)
    return 1e3 * sum(tokens) / (first + sum(count - 1 for count in tokens) / rate)


def _less(spent: float | None) -> float | None:
    return None if spent is None else 1.0 - spent


def _mean(values: Sequence[float | None], how: Mapping[str, int]) -> dict[str, Any] | None:
    """Over the requests that have one; None where none has."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return {"mean": metrics.mean(there), "ci": [float(end) for end in interval(there, **how)]}


def _pooled(tokens: Sequence[int], seconds: Sequence[float], how: Mapping[str, int]) -> dict[str, Any]:
    return {"mean": sum(tokens) / sum(seconds), "ci": ratio_interval(tokens, seconds, None, **how)}
