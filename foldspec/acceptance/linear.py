"""``linear``: the target's law and the drafter's, mixed (the second paper's Theorem 1; methods 3.2).

The law at a drafted position is exactly ``(1 - lambda) p + lambda q``: of all laws at that total variation from p,
none lets more drafts stand. A draft stands with probability ``min(1, (1 - lambda) p(y) / q(y) + lambda)``; the residual
is ``Norm([p - q]+)``, whatever lambda is. At lambda 0 it is the rule ``exact``, number for number; at 1 every draft
stands.

At temperature 0 ``onehot`` is the same with p as a point mass: a draft that is not the target's argmax stands with
probability lambda. ``mixture_argmax`` tosses no coin: at a drafted position comes the argmax of ``(1 - lambda) p +
lambda q``, p taken at temperature 1 and q as it was drafted from, a point mass where drafts are an argmax.
"""

from __future__ import annotations

from foldspec.acceptance.relaxed import Draft, Relaxed
from foldspec.kernels.verify import Case
from foldspec.laws import Law

__all__ = ["Linear"]


class Linear(Relaxed):
    """``leniency`` is lambda in [0, 1], or one a draft of the block, the last of them for all that follow."""

    def __init__(self, leniency: float | tuple[float, ...], at_zero: str = "onehot") -> None:
        self._shares = leniency if isinstance(leniency, tuple) else (leniency,)
        self._at_zero = at_zero
        self.lossless = not any(self._shares)

    def allowed(self, draft: Draft) -> float:
        if self._without_coin(draft):
            return float(draft.token == self._best(draft))
        share = self._share(draft)
        return (1 - share) * draft.p.prob(draft.token) + share * draft.q.prob(draft.token)

    def residual(self, draft: Draft) -> Law:
        return Law.point(self._best(draft)) if self._without_coin(draft) else draft.p.minus(draft.q)

    def spent(self, draft: Draft) -> float:
        if self._without_coin(draft):
            return float(self._best(draft) != draft.p.token)
        share = self._share(draft)
        return share * draft.p.tv(draft.q) if share else 0.0

    def case(self) -> Case:
        return Case("linear", self._shares, mixture=self._at_zero == "mixture_argmax")

    def law(self) -> str:
        shares = "/".join(f"{share:g}" for share in self._shares)
        if self.lossless:
            return f"the target's own, by rejection sampling (linear with lambda {shares})"
        zero = "its argmax" if self._at_zero == "mixture_argmax" else "drawn from it"
        return (
            f"not the target's: at drafted positions (1 - lambda) p + lambda q, lambda {shares}, given what is before "
            f"(at temperature 0 {zero}); the token after a round's drafts is the target's own"
        )

    def _share(self, draft: Draft) -> float:
        return self._shares[min(draft.row, len(self._shares) - 1)]

    def _without_coin(self, draft: Draft) -> bool:
        return self._at_zero == "mixture_argmax" and draft.p.token is not None

    def _best(self, draft: Draft) -> int:
        share, q = self._share(draft), draft.q
        if not share and draft.p.token is not None:
            return draft.p.token
        mass = draft.raw().probs().mul_(1 - share)
        if q.token is not None:
            mass[q.token] += share
        elif q.ids is None:
            mass += share * q.probs()
        else:
            mass[q.ids] += share * q.probs()
        return int(mass.argmax())
