"""``exact``: rejection sampling with the law that each draft was drawn from (Leviathan et al. 2023; methods 3.1).

A draft ``y`` stands with probability ``min(1, p(y) / q(y))``; the first that falls is replaced by a draw from the
residual ``Norm([p - q]+)``. The output's law is p whatever q is. At temperature 0 p is a point mass: a draft stands
while it is the target's argmax.
"""

from __future__ import annotations

from foldspec.acceptance.base import AcceptanceRule
from foldspec.kernels.verify import Case
from foldspec.laws import Law
from foldspec.noise import Noise, Purpose
from foldspec.records import PointMass, Proposal, Verdict
from foldspec.sampling import TargetLaws


class Exact(AcceptanceRule):
    lossless = True

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        tokens = proposal.tokens
        for i, token in enumerate(tokens):
            p, position = target.law(i), target.position + i
            if p.token is not None:  # a point mass leaves nothing to chance
                if token != p.token:
                    return Verdict(i, p.token)
                continue
            q = Law.point(token) if isinstance(proposal, PointMass) else proposal.law(i)
            # strictly less: a token that p rules out is refused by a number of 0 too
            if not noise.uniform(Purpose.ACCEPT, position) * q.prob(token) < p.prob(token):
                return Verdict(i, noise.draw(p.minus(q), Purpose.RESIDUAL, position))
        last = len(tokens)
        return Verdict(last, noise.draw(target.law(last), Purpose.TARGET, target.position + last))

    def case(self) -> Case:
        return Case("exact")

    def law(self) -> str:
        return "the target's own, by rejection sampling: at temperature 0 its argmax at every position"
