"""How much a diffusion drafter denoises a block, which places each step reveals, and what law its drafts then have.

A block is denoised in K steps. A masked drafter reveals places step by step; which ones, the order says:

    origin        at random
    maskgit_plus, static   those whose drawn token is the likeliest (two names of one rule)
    topk_margin   the largest gap between the two likeliest tokens
    entropy       the lowest entropy
    sequential    from the left
    dynamic       every place whose drawn token is likelier than ``confidence``, but at least the step's quota
    dynamic_top1  the same by the likeliest token, whichever is drawn

``entropy_bound`` reveals the longest run of places, in their order, with ``sum H - max H <= bound`` (methods 4.2).
No torch: options are checked with this.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from foldspec.errors import UsageError
from foldspec.values import one_of, real, whole

__all__ = ["BY_TOKEN", "ORDERS", "Q_MODES", "Effort", "above", "balanced", "dream", "surest", "within"]

ORDERS = ("origin", "maskgit_plus", "topk_margin", "entropy", "sequential", "static", "dynamic", "dynamic_top1")
BY_TOKEN = frozenset({"maskgit_plus", "static", "dynamic"})  # look at the tokens that were drawn
BOUNDED = ("entropy", "topk_margin", "sequential")  # what an entropy bound may follow
Q_MODES = ("exact", "reveal_step", "point_mass")
DREAM_END = 1e-3  # where Dream's time ends


@dataclass(frozen=True)
class Effort:
    """None: not given. Raises :class:`UsageError` for a value or a combination that means nothing.

    ``steps``       K; with a threshold each step reveals at least its share of K, without K at least one place
    ``confidence``  in [0, 1], of the orders ``dynamic`` and ``dynamic_top1``
    ``entropy_bound``  in nats
    ``order``       one of :data:`ORDERS`
    ``q_mode``      the law that a draft is judged by. ``reveal_step``: the one it was drawn from. ``exact``: the same
                    for places revealed in the last step, if that was known to be the last before its tokens were
                    drawn; a point mass for all others. ``point_mass``: for all
    """

    steps: int | None = None
    confidence: float | None = None
    entropy_bound: float | None = None
    order: str | None = None
    q_mode: str = "exact"

    def __post_init__(self) -> None:
        whole("steps", self.steps, 1, optional=True)
        if self.confidence is not None:
            real("confidence", self.confidence, 0, 1)
        if self.entropy_bound is not None:
            real("entropy_bound", self.entropy_bound, 0, math.inf)
        if self.order is not None:
            one_of("order", self.order, ORDERS)
        one_of("q_mode", self.q_mode, Q_MODES)
        if self.confidence is not None and self.entropy_bound is not None:
            raise UsageError("goes without a confidence", where="entropy_bound", do="give one of the two")
        if self.confidence is not None and self.order not in (None, "dynamic", "dynamic_top1"):
            raise UsageError(f"is not for the order {self.order}", where="confidence", do="use dynamic or dynamic_top1")
        if self.confidence is None and self.order in ("dynamic", "dynamic_top1"):
            raise UsageError(f"the order {self.order} needs it", where="confidence", do="give --confidence")
        if self.entropy_bound is not None and self.order not in (None, *BOUNDED):
            do = f"use {', '.join(BOUNDED)}"
            raise UsageError(f"is not for the order {self.order}", where="entropy_bound", do=do)

    def filled(self, order: str) -> Effort:
        """With an order in any case: the one that is given, that of the threshold, or ``order``. A confidence alone is
        that of the likeliest token, which keeps drafts exact."""
        if self.order is not None:
            return self
        by_threshold = "dynamic_top1" if self.confidence is not None else "entropy"
        return dataclasses.replace(self, order=by_threshold if self.thresholded else order)

    @property
    def thresholded(self) -> bool:
        """Whether what the network says decides how many places a step reveals."""
        return self.confidence is not None or self.entropy_bound is not None

    @property
    def one_step(self) -> bool:
        """Whether all places are revealed at once, whatever the network says."""
        return self.steps == 1 or (self.steps is None and not self.thresholded)

    def settled(self, drawn: bool) -> Effort:
        """With the ``q_mode`` that runs. ``exact`` is not to be had where the drawn tokens decide which step is the
        last: there it is ``point_mass``. ``drawn``: drafts are drawn, and no argmax."""
        if drawn and self.q_mode == "exact" and self.order == "dynamic" and not self.one_step:
            return dataclasses.replace(self, q_mode="point_mass")
        return self

    def biased(self, drawn: bool) -> str:
        """Why drafts of a masked drafter do not follow their laws; empty if they do (methods 4.4)."""
        if not drawn or self.q_mode != "reveal_step" or self.one_step or self.order == "sequential":
            return ""
        if self.order in BY_TOKEN:
            return (
                f"the order {self.order} keeps drafts by the token that was drawn, and q_mode reveal_step forgets that"
            )
        return f"the order {self.order} draws drafts in the light of later ones, and q_mode reveal_step forgets that"


def balanced(places: int, steps: int) -> list[int]:
    """Places that each step reveals: equal shares, the first ones one more where they do not divide."""
    share, more = divmod(places, steps)
    return [share + (step < more) for step in range(steps)]


def dream(places: int, steps: int) -> list[int]:
    """The same by Dream's clock, which runs from 1 to :data:`DREAM_END`; all that is left in the last step."""
    counts: list[int] = []
    for step in range(steps):
        left = places - sum(counts)
        counts.append(left if step == steps - 1 else int(left * dream_share(step, steps)))
    return counts


def dream_share(step: int, steps: int) -> float:
    """1 - s / t: of the places that are masked, the share that a step reveals."""
    t, s = (1.0 + (DREAM_END - 1.0) * i / steps for i in (step, step + 1))
    return 1 - s / t if step < steps - 1 else 1.0


def surest(scores: Sequence[float], count: int) -> list[int]:
    """The ``count`` largest; of equal ones the first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def above(scores: Sequence[float], threshold: float, least: int) -> list[int]:
    """Those above a threshold, in their order; if they are fewer than ``least``, the ``least`` largest."""
    found = [i for i, score in enumerate(scores) if score > threshold]
    return found if len(found) >= least else sorted(surest(scores, least))


def within(entropies: Sequence[float], bound: float, order: Sequence[int] | None = None) -> list[int]:
    """The longest run in an order (the lowest first) whose entropies without the largest come to at most ``bound``."""
    order = surest([-entropy for entropy in entropies], len(entropies)) if order is None else order
    found: list[int] = []
    total = largest = 0.0
    for i in order:
        total, largest = total + entropies[i], max(largest, entropies[i])
        if total - largest > bound:
            break
        found.append(i)
    return found
