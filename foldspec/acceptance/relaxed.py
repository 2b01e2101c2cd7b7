"""What the lossy rules share: rejection sampling against another mass than the target's own (methods 3.1 to 3.3).

A draft ``y`` that was drawn from q stands if ``u q(y)`` is below the mass that the rule allows it; else a token of the
rule's residual law takes its place, and the drafts after it fall. The token after the last draft is always drawn from
the target's own law: only drafted positions are relaxed.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

from foldspec.acceptance.base import AcceptanceRule, Draft
from foldspec.laws import Law
from foldspec.noise import Noise, Purpose
from foldspec.records import PointMass, Proposal, Verdict
from foldspec.sampling import TargetLaws

__all__ = ["Draft", "Relaxed"]


class Relaxed(AcceptanceRule):
    """A rule says which mass it allows a draft, and which law replaces one that falls."""

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        tokens = proposal.tokens
        outside: list[int] = []
        for i, token in enumerate(tokens):
            p, position = target.law(i), target.position + i
            q = Law.point(token) if isinstance(proposal, PointMass) else proposal.law(i)
            draft = Draft(i, token, p, q, partial(target.raw, i))
            # strictly less, as in the lossless rule, so that a mass of 0 is refused by a number of 0 too
            if not noise.uniform(Purpose.ACCEPT, position) * q.prob(token) < self.allowed(draft):
                next_token = noise.draw(self.residual(draft), Purpose.RESIDUAL, position)
                return Verdict(i, next_token, tuple(outside))
            if p.prob(token) == 0:
                outside.append(i)
        last = len(tokens)
        next_token = noise.draw(target.law(last), Purpose.TARGET, target.position + last)
        return Verdict(last, next_token, tuple(outside))

    def chance(self, draft: Draft) -> float:
        allowed, drawn = self.allowed(draft), draft.q.prob(draft.token)
        return allowed / drawn if allowed < drawn else float(drawn <= allowed)  # 0 for NaN

    @abstractmethod
    def allowed(self, draft: Draft) -> float:
        """The draft stands with probability ``min(1, allowed / q(y))``."""

    @abstractmethod
    def residual(self, draft: Draft) -> Law:
        """What is drawn in place of a draft that does not stand."""
