"""A linear probe of order: from the difference of two entries, which of them comes first."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

FOLDS, RATE = 5, 1e-3


class Entries(NamedTuple):
    """``states`` [n, width] of entries that stand at places ``at`` [n] of some order, each place once."""

    states: torch.Tensor
    at: torch.Tensor


class Pairs(NamedTuple):
    """``differences`` [n, width], and whether the first comes ``before`` [n] the second, as 0 and 1."""

    differences: torch.Tensor
    before: torch.Tensor


def sampled(entries: Entries, low: int, high: int, count: int, draw: torch.Generator) -> Pairs:
    """Pairs of entries from ``low`` to ``high - 1`` places apart, but for none beyond half of all; separations are
    uniform, and each order as likely."""
    n = len(entries.at)
    apart = torch.randint(low, min(high, n // 2), (count,), generator=draw)
    first = (torch.rand(count, generator=draw) * (n - apart)).long()
    second, before = first + apart, torch.randint(0, 2, (count,), generator=draw)
    of_place = entries.at.argsort()
    i, j = of_place[torch.where(before == 1, first, second)], of_place[torch.where(before == 1, second, first)]
    return Pairs(entries.states[i] - entries.states[j], before.float())


def judged(inputs: Sequence[Pairs], steps: int) -> dict[str, float]:
    """Accuracy on inputs that the probe has not seen: mean and standard deviation over folds of whole inputs."""
    found = []
    for fold in range(FOLDS):
        seen = _joined([one for number, one in enumerate(inputs) if number % FOLDS != fold])
        unseen = _joined(inputs[fold::FOLDS])
        mean, spread = seen.differences.mean(0), seen.differences.std(0).clamp_min(1e-6)
        weight, bias = _trained((seen.differences - mean) / spread, seen.before, steps)
        logits = (unseen.differences - mean) / spread @ weight + bias
        found.append(((logits > 0) == (unseen.before == 1)).float().mean().item())
    return {"mean": statistics.fmean(found), "std": statistics.pstdev(found)}


def _joined(pairs: Sequence[Pairs]) -> Pairs:
    return Pairs(*(torch.cat(parts) for parts in zip(*pairs, strict=True)))


def _trained(x: torch.Tensor, y: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [width] and bias of a logistic regression, by Adam on all pairs at once."""
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros((), requires_grad=True)
    adam = torch.optim.Adam([weight, bias], lr=RATE)
    for _ in range(steps):
        adam.zero_grad()
        binary_cross_entropy_with_logits(x @ weight + bias, y).backward()
        adam.step()
    return weight.detach(), bias.detach()
