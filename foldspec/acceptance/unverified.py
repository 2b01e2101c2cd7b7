"""``unverified``: whatever is drafted stands, as if there were no target: the drafter alone, a block a round.

The baseline of the second paper's Figure 2b and Table 1. ``linear`` with lambda 1 lets every draft stand too, and
follows each block with a token of the target's own; here nothing follows it. The target's pass is run all the same, so
that measurements mean what they always do: what the drafter alone takes is the rounds' part ``draft``.
"""

from __future__ import annotations

from foldspec.acceptance.base import AcceptanceRule, Draft
from foldspec.kernels.verify import Case
from foldspec.noise import Noise, Purpose
from foldspec.records import Proposal, Verdict
from foldspec.sampling import TargetLaws

__all__ = ["Unverified"]


class Unverified(AcceptanceRule):
    lossless = False
    uses_q = False

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        tokens = proposal.tokens
        if not tokens:
            return Verdict(0, noise.draw(target.law(0), Purpose.TARGET, target.position))
        outside = tuple(i for i, token in enumerate(tokens) if target.law(i).prob(token) == 0)
        return Verdict(len(tokens), tokens[-1], outside, followed=False)

    def case(self) -> Case:
        return Case("unverified")

    def chance(self, draft: Draft) -> float:
        return 1.0

    def spent(self, draft: Draft) -> float:
        return draft.p.tv(draft.q)

    def law(self) -> str:
        return (
            "not the target's but the drafter's: every draft stands; the target's own are a text's first token and what"
            " comes where nothing is drafted, as at the limit of the output"
        )
