"""The law of one row: what a token is drawn from, and what is used as p or q, is one and the same object."""

from __future__ import annotations

import math

import torch

__all__ = ["Law", "law_of"]

NEGLIGIBLE = 1e-12  # a residual of less mass is rounding (methods 3.1)
LIKELIEST = 512  # ids among which the end of a top-p set is looked for first


class Law:
    """A distribution over ids: processed logits and their log-sum-exp, or a point mass.

    ``logits`` [m] in fp32 or better, ``ids`` [m] int64 the ids that they belong to, ascending; None: 0 .. m-1. An id
    that is not among them has probability 0. ``token`` is the id of a point mass, else None. Probabilities are float64.
    """

    __slots__ = ("_log_total", "ids", "logits", "token")

    def __init__(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        self.logits, self.ids = logits, ids
        self.token: int | None = None
        self._log_total: float | None = None

    @classmethod
    def point(cls, token: int) -> Law:
        """All mass on one token."""
        law = cls.__new__(cls)
        law.token = token
        return law

    @property
    def log_total(self) -> float:
        if self._log_total is None:
            self._log_total = float(torch.logsumexp(self.logits.double(), dim=-1))
        return self._log_total

    def probs(self) -> torch.Tensor:
        """[m] float64, as ``ids``; not of a point mass."""
        return (self.logits.double() - self.log_total).exp_()

    def _place(self, token: int) -> int | None:
        """Where among the logits an id is."""
        if self.ids is None:
            return token if token < len(self.logits) else None
        place = int(torch.searchsorted(self.ids, token))
        return place if place < len(self.ids) and int(self.ids[place]) == token else None

    def prob(self, token: int) -> float:
        if self.token is not None:
            return float(token == self.token)
        place = self._place(token)
        return 0.0 if place is None else math.exp(float(self.logits[place]) - self.log_total)

    def others(self, token: int) -> float:
        """1 - prob(token), as the sum of the others where the difference would lose digits."""
        own = self.prob(token)
        if own < 0.9 or self.token is not None:
            return 1.0 - own
        mass = self.probs()
        mass[self._place(token)] = 0.0
        return float(mass.sum())

    def entropy(self) -> float:
        """In nats."""
        return 0.0 if self.token is not None else float(torch.special.entr(self.probs()).sum())

    def likeliest(self) -> int:
        """Of equal ones the lowest id."""
        if self.token is not None:
            return self.token
        best = int(self.logits.argmax())
        return best if self.ids is None else int(self.ids[best])

    def minus(self, q: Law, times: float = 1.0) -> Law:
        """The residual law ``Norm([p - times q]+)`` (methods 3.1), this law being p. Where nothing is left, or nothing
        can be said because q is not finite: p itself. What is left of a point mass is that point."""
        if self.token is not None:
            return self
        mass = self._above(q, times)
        left = float(mass.sum())
        return Law(mass.log_(), self.ids) if left > NEGLIGIBLE else self  # false for NaN too

    def tv(self, q: Law) -> float:
        """The total variation of two laws, in [0, 1]: the mass that this one has above the other. 1 where q is not
        finite: nothing of such a law stands."""
        if q.token is None and not math.isfinite(q.log_total):
            return 1.0
        apart = q.others(self.token) if self.token is not None else float(self._above(q).sum())
        return min(1.0, apart)

    def aligned(self, q: Law) -> torch.Tensor:
        """[m] float64: the probabilities that q gives this law's ids; not for a point mass."""
        if q.token is None and q.ids is None:
            return q.probs() if self.ids is None else q.probs()[self.ids]
        found = torch.zeros(len(self.logits), dtype=torch.float64, device=self.logits.device)
        if q.token is not None:
            place = self._place(q.token)
            if place is not None:
                found[place] = 1.0
        elif self.ids is None:
            found[q.ids] = q.probs()
        elif q.ids is not None:
            places = torch.searchsorted(self.ids, q.ids).clamp_(max=len(self.ids) - 1)
            both = self.ids[places] == q.ids
            found[places[both]] = q.probs()[both]
        return found

    def _above(self, q: Law, times: float = 1.0) -> torch.Tensor:
        """[m] float64, as ``ids``: [p - times q]+, p being this law and no point mass."""
        return self.probs().sub_(self.aligned(q), alpha=times).clamp_(min=0.0)


def law_of(
    logits: torch.Tensor,
    temperature: float,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    ids: torch.Tensor | None = None,
) -> Law:
    """The law of a row [V]: temperature, then top-k, top-p and min-p, each over what the one before has left.

    Temperature 0: a point mass on the largest logit. ``top_k`` 0 and ``top_p`` 1 keep all; top-p keeps the fewest
    likeliest ids that together have at least that mass, min-p those of at least that share of the largest probability.
    Of equal logits the lowest ids are kept first. ``ids`` [V], ascending: what the logits belong to, if not 0 .. V-1.
    """
    if temperature == 0:
        best = int(logits.argmax())
        return Law.point(best if ids is None else int(ids[best]))
    # the largest is subtracted first: a low temperature sends the others to -inf, and nothing to inf
    scaled = ((logits.double() - logits.amax()) / temperature).to(torch.promote_types(logits.dtype, torch.float32))
    if 0 < top_k < len(scaled):
        scaled, ids = _likeliest(scaled, ids, top_k)
    if top_p < 1:
        scaled, ids = _likeliest(scaled, ids, _nucleus(scaled, top_p))
    if min_p > 0:
        kept = (scaled >= math.log(min_p)).nonzero()[:, 0]
        scaled, ids = scaled[kept], kept if ids is None else ids[kept]
    return Law(scaled, ids)


def _likeliest(scaled: torch.Tensor, ids: torch.Tensor | None, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest logits and their ids, in the order of ids."""
    least = scaled.topk(count).values[-1]
    kept = (~(scaled < least)).nonzero()[:, 0]  # NaN, of a broken drafter, is kept and so found by ``minus``
    if len(kept) > count:  # equal ones at the end
        over = (scaled == least).nonzero()[:, 0][count - len(kept) :]
        kept = kept[~torch.isin(kept, over)]
    return scaled[kept], kept if ids is None else ids[kept]


def _nucleus(scaled: torch.Tensor, top_p: float) -> int:
    """How many of the likeliest ids it takes for a mass of ``top_p``."""
    total = torch.logsumexp(scaled.double(), dim=-1)
    for some in (min(LIKELIEST, len(scaled)), len(scaled)):
        mass = (scaled.topk(some).values.double() - total).exp_().cumsum(0)
        count = int((mass < top_p).sum()) + 1
        if count <= some:
            return count
    return len(scaled)  # rounding has kept the sum of all below top_p
