"""``exact``: a draft stands while it is the token that the target itself would emit. Greedy, so that is the argmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foldspec.acceptance.base import AcceptanceRule
from foldspec.errors import CheckpointError
from foldspec.records import Proposal, Verdict
from foldspec.sampling import greedy


class Exact(AcceptanceRule):
    lossless = True

    def decide(self, logits: torch.Tensor, proposals: Sequence[Proposal]) -> list[Verdict]:
        # NaN weights, or an overflow in float16, would else come out as an endless row of one token
        if not bool(logits.amax().isfinite()):
            raise CheckpointError("the target's logits are not finite", do="use --dtype float32, or check its weights")
        own = greedy(logits)
        verdicts, row = [], 0
        for proposal in proposals:
            accepted = 0
            while accepted < len(proposal.tokens) and proposal.tokens[accepted] == own[row + accepted]:
                accepted += 1
            verdicts.append(Verdict(accepted, own[row + accepted]))
            row += len(proposal.tokens) + 1
        return verdicts

    def law(self) -> str:
        return "the target's argmax at every position"
