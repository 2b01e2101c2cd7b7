"""Rules by themselves: packed logits and proposals go in, verdicts come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foldspec.acceptance import make_rule
from foldspec.noise import Noise
from foldspec.options import SamplingParams
from foldspec.records import Proposal, Verdict
from foldspec.sampling import TargetLaws, target_laws
from foldspec.schedule.request import Request


def targets(
    logits: torch.Tensor,
    proposals: Sequence[Proposal],
    *,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    **params: Any,
) -> list[TargetLaws]:
    """The laws of requests that have said the same so far."""
    requests = [
        Request(i, tuple(prompt), 1000, frozenset(stop_ids), params=SamplingParams(**params), output=list(output))
        for i in range(len(proposals))
    ]
    return target_laws(logits, requests, proposals)


def decide(
    rule: str, logits: torch.Tensor, proposals: Sequence[Proposal], noise: Noise | None = None, **about: Any
) -> list[Verdict]:
    """The verdicts of a rule on packed rows; ``about`` as in :func:`targets`."""
    return make_rule(rule).decide(
        targets(logits, proposals, **about), proposals, [noise or Noise(0) for _ in proposals]
    )
