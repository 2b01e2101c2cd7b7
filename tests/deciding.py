"""Rules by themselves: packed logits and proposals go in, verdicts come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foldspec.acceptance import RULES, make_rule
from foldspec.acceptance.base import AcceptanceRule
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


# of a rule that takes a leniency: the one at which it lets nothing pass
STRICT: dict[str, dict[str, Any]] = {"linear": {"leniency": 0.0}, "lenience": {"leniency": 1.0}}
STRICT["cactus"] = {"leniency": 0.0}
VERIFYING = [rule for rule in RULES if rule != "unverified"]


def strict(rule: str) -> AcceptanceRule:
    """A rule that is at temperature 0 as strict as ``exact``."""
    return make_rule(rule, **STRICT.get(rule, {}))


def decide(
    rule: str | AcceptanceRule,
    logits: torch.Tensor,
    proposals: Sequence[Proposal],
    noise: Noise | None = None,
    **about: Any,
) -> list[Verdict]:
    """The verdicts of a rule on packed rows; ``about`` as in :func:`targets`."""
    made = strict(rule) if isinstance(rule, str) else rule
    return made.decide(targets(logits, proposals, **about), proposals, [noise or Noise(0) for _ in proposals])
