"""``typical``: a draft stands if it is likely enough, whatever it was drawn from (Medusa, Cai et al. 2024).

A draft stands if ``p(y) > min(epsilon, factor exp(-H(p)))``, H in nats; else the target's argmax takes its place. At
temperature 0 it is the rule ``exact``: there is no entropy, and one id alone is likely.
"""

from __future__ import annotations

import math

from foldspec.acceptance.relaxed import Draft, Relaxed
from foldspec.kernels.verify import Case
from foldspec.laws import Law

__all__ = ["Typical"]


class Typical(Relaxed):
    lossless = False
    uses_q = False

    def __init__(self, epsilon: float = 0.09, factor: float = 0.3) -> None:
        self._epsilon, self._factor = epsilon, factor

    def allowed(self, draft: Draft) -> float:
        return float(draft.p.prob(draft.token) > self._least(draft))

    def residual(self, draft: Draft) -> Law:
        return Law.point(draft.p.likeliest())

    def spent(self, draft: Draft) -> float:
        """Of the law that comes of drafts that are likely enough and the argmax for the others."""
        if draft.p.token is not None:
            return 0.0
        p, comes = draft.p.probs(), draft.p.aligned(draft.q)
        comes[p <= self._least(draft)] = 0.0
        comes += (1 - comes.sum()) * draft.p.aligned(self.residual(draft))
        return float((p - comes).clamp_(min=0.0).sum())

    def _least(self, draft: Draft) -> float:
        return min(self._epsilon, self._factor * math.exp(-draft.p.entropy()))

    def case(self) -> Case:
        return Case("typical", leniency=self._epsilon, factor=self._factor)

    def law(self) -> str:
        return (
            f"not the target's: a draft stands if p is above min({self._epsilon:g}, {self._factor:g} exp(-entropy)), "
            "else the target's argmax comes; the token after a round's drafts is the target's own"
        )
