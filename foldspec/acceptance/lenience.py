"""``lenience``: drafts are judged as if q were smaller (Leviathan et al. 2023, appendix A.5; methods 3.2).

A draft stands with probability ``min(1, p(y) / (l q(y)))`` for l in (0, 1], so no token comes with more than
``p(y) / l``; l = 1 is the rule ``exact``. The law of what comes is ``min(p / l, q)`` and, where a draft falls, the
residual ``Norm([p - q]+)``, which the original leaves as it is (``residual=verifier``), or ``Norm([p / l - q]+)``, that
of the comparison (``relaxed``).

At temperature 0 a draft stands if ``p(y) >= l max p``, with p at temperature 1; else the argmax takes its place.
"""

from __future__ import annotations

import torch

from foldspec.acceptance.relaxed import Draft, Relaxed
from foldspec.kernels.verify import Case
from foldspec.laws import Law

__all__ = ["Lenience"]


class Lenience(Relaxed):
    """``leniency`` is l."""

    def __init__(self, leniency: float, residual: str = "verifier") -> None:
        self._lenience, self._times = leniency, leniency if residual == "relaxed" else 1.0
        self.lossless = leniency == 1

    def allowed(self, draft: Draft) -> float:
        best = draft.p.token
        if best is None:
            return draft.p.prob(draft.token) / self._lenience
        if draft.token == best or self.lossless:  # of two that tie at the top, plain decoding takes the lower id
            return float(draft.token == best)
        raw = draft.raw()
        return float(raw.prob(draft.token) >= self._lenience * raw.prob(best))

    def residual(self, draft: Draft) -> Law:
        return draft.p.minus(draft.q, self._times)

    def spent(self, draft: Draft) -> float:
        """Of the law that comes of the comparison and the residual, whatever the draft is."""
        if self.lossless:
            return 0.0
        best = draft.p.token
        if best is not None:  # of what is drafted beside the argmax, all that is likely enough
            raw = draft.raw()
            least = self._lenience * raw.prob(best)
            likely = raw.probs() >= least
            likely[best] = False
            return float(raw.aligned(draft.q)[likely].sum())
        p, stays = draft.p.probs(), draft.p.aligned(draft.q)
        torch.minimum(stays, p / self._lenience, out=stays)
        left = self.residual(draft)
        comes = stays + (1 - stays.sum()) * draft.p.aligned(left)
        return float((p - comes).clamp_(min=0.0).sum())

    def case(self) -> Case:
        return Case("lenience", leniency=self._lenience, relaxed=self._times != 1)

    def law(self) -> str:
        if self.lossless:
            return "the target's own, by rejection sampling (lenience 1)"
        return (
            f"not the target's: at drafted positions no token comes with more than p / {self._lenience:g}, at "
            f"temperature 0 none with p below {self._lenience:g} max p; the token after a round's drafts is its own"
        )
