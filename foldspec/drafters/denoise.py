"""Masked diffusion: the places of one request's block, revealed step by step (methods 4.2, 4.4).

No network is in here. A drafter makes one :class:`Masked` a request and round, and feeds it logits until it is done:

    while not block.done:
        logits = network(block.canvas)          # None stands where the mask goes
        block.step(logits[block.masked])

It is thrown away with the round, so nothing of a block that was rejected reaches the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch

from foldspec.effort import BY_TOKEN, Effort, above, balanced, dream, dream_share, surest, within
from foldspec.laws import Law
from foldspec.noise import Noise, Purpose
from foldspec.records import Sampled
from foldspec.sampling import DraftSampling

__all__ = ["Masked", "score"]


class Masked:
    """The ``count`` drafts after the anchor at a position, none known yet.

    ``quota``   how many places a step reveals: ``balanced``, or ``dream``: by Dream's clock, and with the order
                ``origin`` by a coin for each place. Steps that reveal nothing are left out: they would not change what
                the network sees. With a threshold: how many at least, and always ``balanced``
    ``block``   places that the quotas share out, where some were known before (None: ``count``)
    ``drafts``  the proposal to go on with, where this block follows one of the same round
    """

    def __init__(
        self,
        effort: Effort,
        sampling: DraftSampling,
        noise: Noise,
        anchor: int,
        count: int,
        *,
        quota: str = "balanced",
        block: int | None = None,
        drafts: Sampled[Law] | None = None,
    ) -> None:
        self._effort = effort = effort.filled("static")
        self._sampling, self._noise, self._anchor = sampling, noise, anchor
        self._drafts = sampling.begin(noise, anchor) if drafts is None else drafts
        self._first, self._before = (0, 0) if drafts is None else (len(drafts.tokens), drafts.steps)
        self.canvas: list[int | None] = [None] * count
        self.steps_used = 0
        block = count if block is None else block
        steps = effort.steps or (max(1, block) if effort.thresholded else 1)
        by_clock = quota == "dream" and not effort.thresholded
        self._quotas = [each for each in (dream if by_clock else balanced)(block, steps) if each]
        self._plan: list[list[int]] | None = None  # what each step reveals, where that hangs on nothing drawn
        if effort.order == "origin":
            self._plan = self._by_coins(steps) if by_clock else self._shared_out(self._shuffled(count))
        elif effort.order == "sequential" and not effort.thresholded:
            self._plan = self._shared_out(range(count))

    @property
    def masked(self) -> list[int]:
        """The places that are not known yet, rising."""
        return [place for place, token in enumerate(self.canvas) if token is None]

    @property
    def done(self) -> bool:
        return None not in self.canvas

    @property
    def proposal(self) -> Sampled[Law]:
        """The drafts, each with the law that it is judged by, behind those that this block went on with."""
        assert self.done, "there are places without a token"
        return self._drafts

    def step(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """One step. ``logits`` [masked places, m], in the order of :attr:`masked`, belong to ``ids`` [m], ascending;
        None: 0 .. m-1. What must not be drafted, the mask above all, is -inf or left out."""
        places, number = self.masked, self.steps_used
        assert len(logits) == len(places) > 0, "one row for each place without a token"
        self.steps_used += 1
        self._drafts.steps = self._before + self.steps_used
        chosen = self._planned(places, number)
        laws = {i: self._sampling.law(logits[i], ids) for i in (range(len(places)) if chosen is None else chosen)}
        if chosen is None and self._effort.order not in BY_TOKEN:
            chosen = self._choose(laws, logits, ids, None, number)
        # told before anything is drawn: a token that makes this the last step no longer follows its law
        last = chosen is not None and len(chosen) == len(places)
        tokens = {i: self._drafts.draw(laws[i], self._first + places[i], number) for i in chosen or laws}
        if chosen is None:
            chosen = self._choose(laws, logits, ids, tokens, number)
        for i in chosen:
            self.canvas[places[i]] = tokens[i]
            if self._effort.q_mode == "point_mass" or (self._effort.q_mode == "exact" and not last):
                self._drafts.settle(self._first + places[i])

    def _planned(self, places: Sequence[int], number: int) -> list[int] | None:
        """Which of the places are due, where that is known without a look at the network; else None."""
        if self._plan is not None:
            return [places.index(place) for place in self._plan[number]]
        return list(range(len(places))) if self._quotas[number] >= len(places) else None

    def _choose(
        self,
        laws: Mapping[int, Law],
        logits: torch.Tensor,
        ids: torch.Tensor | None,
        tokens: Mapping[int, int] | None,
        number: int,
    ) -> list[int]:
        """The rows to reveal, by their laws, and by the tokens drawn from them if the order looks there. An argmax says
        nothing of how sure it is: at temperature 0 that is looked up at temperature 1."""
        effort, least = self._effort, self._quotas[number]
        sure = [law if law.token is None else Law(logits[i], ids) for i, law in laws.items()]
        scores = [score(str(effort.order), i, law, None if tokens is None else tokens[i]) for i, law in enumerate(sure)]
        if effort.entropy_bound is not None:
            order = surest(scores, len(scores))
            run = within([law.entropy() for law in sure], effort.entropy_bound, order)
            return order[: max(least, len(run))]
        if effort.confidence is not None:
            return above(scores, effort.confidence, least)
        return surest(scores, least)

    def _shared_out(self, places: Sequence[int]) -> list[list[int]]:
        left = iter(places)
        steps = [list(islice(left, each)) for each in self._quotas]
        return [step for step in steps if step]

    def _shuffled(self, count: int) -> list[int]:
        left = list(range(count))
        key = {"anchor": self._anchor}
        first = self._anchor + 1 + self._first
        return [left.pop(self._noise.whole(len(left), Purpose.PLACE, first + i, **key)) for i in range(count)]

    def _by_coins(self, steps: int) -> list[list[int]]:
        """Each place is revealed in the first step whose coin says so, in the last at the latest."""
        plan: list[list[int]] = [[] for _ in range(steps)]
        for place in range(len(self.canvas)):
            position = self._anchor + 1 + self._first + place
            step = 0
            while step < steps - 1 and not (
                self._noise.uniform(Purpose.PLACE, position, anchor=self._anchor, step=step) < dream_share(step, steps)
            ):
                step += 1
            plan[step].append(place)
        return [step for step in plan if step]


def score(order: str, row: int, law: Law, token: int | None = None) -> float:
    """How much an order would rather reveal a row than others; ``token`` was drawn there, if the order looks at it."""
    if order == "sequential":
        return -float(row)
    if order == "entropy":
        return -law.entropy()
    if order == "topk_margin":
        likeliest = law.probs().topk(min(2, len(law.logits))).values.tolist()
        return float(likeliest[0] - sum(likeliest[1:]))
    return law.prob(law.likeliest() if token is None else token)  # maskgit_plus, static, dynamic; dynamic_top1
