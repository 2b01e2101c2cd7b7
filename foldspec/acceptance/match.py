"""``match``: the token that plain decoding with this seed would draw; a draft stands where it is that token.

Every committed token is drawn from the target's law with the noise of its position, drafts or none, so the output is
that of seeded plain decoding, id for id, and any drafter is lossless (methods 3.1). A draft stands with probability
``sum p q``, less than with ``exact``; drafts drawn with the same noise (``--draft-noise shared``) lift it.
"""

from __future__ import annotations

from foldspec.acceptance.base import AcceptanceRule
from foldspec.kernels.verify import Case
from foldspec.noise import Noise, Purpose
from foldspec.records import Proposal, Verdict
from foldspec.sampling import TargetLaws


class Match(AcceptanceRule):
    lossless = True
    uses_q = False

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        tokens = proposal.tokens
        for i, token in enumerate(tokens):
            own = noise.draw(target.law(i), Purpose.TARGET, target.position + i)
            if own != token:
                return Verdict(i, own)
        last = len(tokens)
        return Verdict(last, noise.draw(target.law(last), Purpose.TARGET, target.position + last))

    def case(self) -> Case:
        return Case("match")

    def law(self) -> str:
        return "the target's own, token for token as plain decoding with the same seed"
