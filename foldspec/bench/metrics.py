"""What every number of the bench means: one definition each, over plain numbers. Imports no torch.

Of one request: ``n_out`` committed tokens, the first (from prefill) and the stop token included; ``commits``, the
tokens that each target pass after prefill committed. The first token belongs to no round, so

    sum(commits) = n_out - 1        R = len(commits)        for plain decoding R = n_out - 1
    tau    = (n_out - 1) / R                                the target's own token included
    TPOT   = (t_last - t_first) / (n_out - 1)               prefill excluded; undefined below two tokens
    round  = (t_last - t_first) / R

Over requests: tau is the mean of the requests' (the pooled value stands beside it); the speedup is the mean of
TPOT_AR / TPOT_method, paired by request: a mean of ratios, not a ratio of means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foldspec.errors import MeasurementError

__all__ = [
    "check_commits",
    "mean",
    "per_round",
    "ratio_of_means",
    "ratios",
    "round_cost",
    "tau",
    "tau_pooled",
    "tpot",
]


def check_commits(n_out: int, commits: Sequence[int], where: str = "") -> None:
    """Raises :class:`MeasurementError` unless every round committed something and all of them ``n_out - 1`` tokens."""
    if sum(commits) != max(0, n_out - 1) or any(count < 1 for count in commits):
        counted = f"{sum(commits)} tokens in {len(commits)} rounds"
        raise MeasurementError(f"{n_out} tokens came out, but the commits say {counted} after the first", where=where)


def tau(commits: Sequence[int]) -> float | None:
    """Committed tokens a round; None without a round."""
    return sum(commits) / len(commits) if commits else None


def tau_pooled(commits: Iterable[Sequence[int]]) -> float | None:
    """All requests as one: tokens after the first, over rounds."""
    pairs = [(sum(each), len(each)) for each in commits]
    rounds = sum(count for _, count in pairs)
    return sum(tokens for tokens, _ in pairs) / rounds if rounds else None


def tpot(first: float, last: float, n_out: int) -> float | None:
    """Time a token after the first, in the unit of the two times; None below two tokens."""
    return (last - first) / (n_out - 1) if n_out >= 2 else None


def per_round(first: float, last: float, rounds: int) -> float | None:
    """Time a round, in the unit of the two times; None without a round."""
    return (last - first) / rounds if rounds else None


def round_cost(round_time: float, ar_step: float) -> float:
    """What a round costs in steps of plain decoding. It is also the tau at which the method breaks even with it, since
    speedup = tau / cost."""
    return round_time / ar_step


def ratios(baseline: Sequence[float], method: Sequence[float]) -> list[float]:
    """The speedup of each request: TPOT of the baseline over that of the method, in the same order."""
    return [b / m for b, m in zip(baseline, method, strict=True)]


def ratio_of_means(baseline: Sequence[float], method: Sequence[float]) -> float:
    """Printed nowhere as the speedup; long requests weigh more in it."""
    return mean(baseline) / mean(method)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
