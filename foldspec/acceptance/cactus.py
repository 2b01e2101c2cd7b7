"""``cactus``: the drafted token's probability is raised within a budget of divergence (ICLR 2026; methods 3.4).

With ``a = p(y)``, the law h that is nearest to p and gives y the mass g scales all others alike:

    h(y) = g        h(v) = p(v) (1 - g) / (1 - a)        g the largest with D(Bern(g) || Bern(a)) <= delta

The draft stands with probability ``min(1, g / q(y))``, else the residual ``Norm([h - q]+)`` is drawn from
(``residual=relaxed``), or ``Norm([p - q]+)`` (``verifier``). Because h depends on the draft, what comes has no closed
form. Divergences: ``taylor`` (as in the official code: KL to second order, g = a + sqrt(2 delta a (1 - a))),
``exact_kl``, ``tv`` (g = a + delta), ``chi2`` (g = a + sqrt(delta a (1 - a))). ``modified`` computes as ``exact_kl``
does: it is our reading of what the second paper calls modified Cactus, whose definition we have not seen.

delta 0 is the rule ``exact``. A token with p(y) = 0 is never raised, so at temperature 0 the rule is ``exact`` too.
"""

from __future__ import annotations

import math

import torch

from foldspec.acceptance.relaxed import Draft, Relaxed
from foldspec.kernels.verify import Case
from foldspec.laws import NEGLIGIBLE, Law

__all__ = ["Cactus", "raised_by"]

HALVINGS = 100  # more than a float has digits


class Cactus(Relaxed):
    """``leniency`` is delta, at least 0."""

    def __init__(self, leniency: float, divergence: str = "taylor", residual: str = "relaxed") -> None:
        self._delta, self._divergence, self._residual = leniency, divergence, residual
        self.lossless = leniency == 0

    def allowed(self, draft: Draft) -> float:
        return draft.p.prob(draft.token) + self._step(draft)

    def residual(self, draft: Draft) -> Law:
        others, step = draft.p.others(draft.token), self._step(draft)
        if self._residual == "verifier" or step >= others:
            return draft.p.minus(draft.q)
        return draft.p.minus(draft.q, others / (others - step))  # h - q, over the factor that scales p

    def spent(self, draft: Draft) -> float:
        """Of the law that comes, over all drafts y: ``min(q, g)``, and ``q(y) - g(y)`` times the residual of each. That
        is p times some c(y) less q, so with ids in the order of q / p all residuals are sums from the first on."""
        if self.lossless or draft.p.token is not None:
            return 0.0
        p, q = draft.p.probs(), draft.p.aligned(draft.q)
        others = 1 - p
        step = _steps(p, others, self._delta, self._divergence)
        stays = torch.minimum(q, p + step)
        falls = torch.cat((q - stays, (1 - q.sum()).clamp_(min=0.0)[None]))  # last: ids that p does not have
        times = torch.ones_like(falls)
        if self._residual == "relaxed":
            times[:-1] = torch.where(step < others, (others - step) / others, 1.0)
        ratio, order = (q / p).sort()
        kept = torch.searchsorted(ratio, times)  # how many ids have more of p than of q, at c(y)
        mass = torch.stack((p[order], -q[order]))
        total = (torch.nn.functional.pad(mass.cumsum(-1), (1, 0))[:, kept] * torch.stack((times, times**0))).sum(0)
        sound = total > NEGLIGIBLE * times
        share = torch.where(sound, falls / total, 0.0)
        weights = p.new_zeros(2, len(p) + 1).index_add_(1, kept, torch.stack((share * times, share)))
        behind = weights.flip(-1).cumsum(-1).flip(-1)[:, 1:]  # of drafts whose residual has the id
        comes = stays + p * falls[~sound].sum()
        comes[order] += (mass * behind).sum(0).clamp_(min=0.0)
        return float((p - comes).clamp_(min=0.0).sum())

    def case(self) -> Case:
        divergence = "exact_kl" if self._divergence == "modified" else self._divergence
        return Case("cactus", leniency=self._delta, divergence=divergence, relaxed=self._residual == "relaxed")

    def law(self) -> str:
        if self.lossless:
            return "the target's own, by rejection sampling (cactus with delta 0)"
        ball = {"modified": "exact KL, an interpretation of modified Cactus"}.get(self._divergence, self._divergence)
        return (
            f"not the target's: each draft's probability is raised within a divergence of {self._delta:g} ({ball}; at "
            "temperature 0 not at all); the token after a round's drafts is the target's own"
        )

    def _step(self, draft: Draft) -> float:
        return raised_by(draft.p.prob(draft.token), draft.p.others(draft.token), self._delta, self._divergence)


def raised_by(a: float, others: float, delta: float, divergence: str) -> float:
    """g - a, at most ``others``, which is 1 - a."""
    if a <= 0 or delta <= 0:
        return 0.0
    if divergence in ("exact_kl", "modified"):
        return _by_kl(a, others, delta)
    step = {"taylor": math.sqrt(2 * delta * a * others), "chi2": math.sqrt(delta * a * others), "tv": delta}[divergence]
    return min(others, step)


def _steps(a: torch.Tensor, others: torch.Tensor, delta: float, divergence: str) -> torch.Tensor:
    """:func:`raised_by` of all ids at once."""
    if divergence in ("exact_kl", "modified"):
        low, high = torch.zeros_like(a), others.clone()
        for _ in range(HALVINGS):
            step = (low + high) / 2
            left = others - step
            spent = (a + step) * torch.log1p(step / a) + left * torch.log1p((-step / others).clamp(min=-1 + 1e-16))
            within = spent <= delta
            low, high = torch.where(within, step, low), torch.where(within, high, step)
        return torch.where(-a.log() <= delta, others, low)
    if divergence == "tv":
        return others.clamp(max=delta)
    return torch.minimum(others, ((2 if divergence == "taylor" else 1) * delta * a * others).sqrt())


def _by_kl(a: float, others: float, delta: float) -> float:
    """The root of KL(Bern(a + step) || Bern(a)) = delta, by bisection."""
    if others <= 0 or -math.log(a) <= delta:  # the divergence at g = 1
        return others
    low, high = 0.0, others
    for _ in range(HALVINGS):
        step = (low + high) / 2
        spent = (a + step) * math.log1p(step / a)
        if step < others:
            spent += (others - step) * math.log1p(-step / others)
        low, high = (step, high) if spent <= delta else (low, step)
    return low
