"""The second paper's throughput model (section 3.3 and appendix C), over plain numbers. Imports no torch.

    d      total variation of target and drafter at a drafted position; lambda is the leniency of ``linear``
    alpha  1 - (1 - lambda) d     the chance that a draft stands; the target's agreement is 1 - lambda d      (Eq. 6)
    E      sum of mu^j, j = 0 .. B     tokens a round, where each of B drafts stands with chance mu            (Prop. 1)
    T      E / (c_d(K) + c_v)          c_d(K) = a + b K, K the steps of a draft                                (Eq. 7)

B counts drafted tokens. The model takes drafts to stand independently of one another, and d to depend on K alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "DraftCost",
    "accept_rate",
    "agreement",
    "fit_draft_cost",
    "rate_from_counts",
    "throughput",
    "tokens_a_round",
    "tokens_by_position",
]


def accept_rate(d: float, leniency: float = 0.0) -> float:
    """Eq. 6, alpha."""
    return 1.0 - (1.0 - leniency) * d


def agreement(d: float, leniency: float = 0.0) -> float:
    """Eq. 6: 1 minus the total variation between the law that is judged by and the target's own."""
    return 1.0 - leniency * d


def tokens_a_round(mu: float, drafts: int) -> float:
    """Prop. 1, from 1 to ``drafts + 1``."""
    return tokens_by_position([mu] * drafts)


def tokens_by_position(rates: Sequence[float]) -> float:
    """Prop. 1 where draft ``i`` stands with chance ``rates[i]``: 1 + sum over n of the product of the first n, by
    Horner's rule: nothing is subtracted, so nothing cancels near a rate of 1, where the closed form would."""
    total = 1.0
    for rate in reversed(rates):
        total = 1.0 + rate * total
    return total


@dataclass(frozen=True)
class DraftCost:
    """c_d(K) = a + b K, in the unit of the times it was fitted to. ``fitted``: False where there was one K only, so
    that ``a`` is the whole of it and b = 0 was not measured."""

    a: float
    b: float
    fitted: bool

    def of(self, steps: float) -> float:
        return self.a + self.b * steps


def fit_draft_cost(steps: Sequence[float], times: Sequence[float]) -> DraftCost:
    """Ordinary least squares; with one K (or none that differs) the mean time, at b = 0."""
    mean_k, mean_t = math.fsum(steps) / len(steps), math.fsum(times) / len(times)
    spread = math.fsum((k - mean_k) ** 2 for k in steps)
    if spread == 0.0:
        return DraftCost(mean_t, 0.0, fitted=False)
    together = math.fsum((k - mean_k) * (t - mean_t) for k, t in zip(steps, times, strict=True))
    b = together / spread
    return DraftCost(mean_t - b * mean_k, b, fitted=True)


def throughput(tokens: float, draft: float, verify: float) -> float:
    """Eq. 7: tokens a unit of time, from tokens a round and what drafting and verifying take in one."""
    return tokens / (draft + verify)


def rate_from_counts(counts: Iterable[tuple[int, int]]) -> float | None:
    """The rate at which drafts stand, from (accepted, drafted) of each round: what makes these counts likeliest,
    accepted / (accepted + rejections). Drafts after the first that fell were never judged. None: nothing was judged."""
    accepted, fell = 0, 0
    for stood, drafted in counts:
        accepted += stood
        fell += stood < drafted
    judged = accepted + fell
    return accepted / judged if judged else None
