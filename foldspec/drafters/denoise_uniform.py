"""Uniform diffusion: every place of one request's block holds some token, and every step draws all of them anew
(methods 4.3; targets 9.4, 9.5).

A block begins with random ids. The last step draws every place from its law there, given the block before that step,
whatever the block held: so each draft follows its law, after any number of steps. The protocol is that of
``denoise.py``, with ids everywhere. :class:`Ancestral` is the general form (Duo), :class:`Annealed` is
DiffusionGemma's sampler.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from foldspec.effort import Effort, within
from foldspec.laws import Law
from foldspec.noise import Noise, Purpose
from foldspec.records import Sampled
from foldspec.sampling import DraftSampling

__all__ = ["Ancestral", "Annealed", "Uniform", "posterior"]


class Uniform(ABC):
    """The ``count`` drafts after the anchor at a position. ``vocabulary``: the ids that a random one is among.

    With drafts that are an argmax the last step takes the likeliest token of each place; the steps before it draw all
    the same, at temperature 1.
    """

    def __init__(
        self, effort: Effort, sampling: DraftSampling, noise: Noise, anchor: int, count: int, vocabulary: int
    ) -> None:
        self._steps, self._point = effort.steps or 1, effort.q_mode == "point_mass"
        self._sampling = sampling
        self._drawing = sampling if sampling.temperature else dataclasses.replace(sampling, temperature=1.0)
        self._noise, self._anchor, self._vocabulary = noise, anchor, vocabulary
        self._drafts = sampling.begin(noise, anchor)
        self.steps_used, self.done = 0, count == 0
        self.canvas = [self._random(place) for place in range(count)]

    @property
    def proposal(self) -> Sampled[Law]:
        """The drafts, each with the law that it is judged by."""
        assert self.done, "the last step is to come"
        return self._drafts

    def step(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """One step. ``logits`` [count, m], in the order of the canvas, belong to ``ids`` [m], ascending; None: 0 ..
        m-1. What must not be drafted is -inf or left out."""
        assert not self.done and len(logits) == len(self.canvas), "one row for each place, until the last step"
        laws, last = self._laws(logits, ids)
        number = self.steps_used
        self._drafts.steps = self.steps_used = number + 1
        drawn = [self._drafts.draw(law, place, number) for place, law in enumerate(laws)]
        self.canvas, self.done = (drawn if last else self._next(laws, drawn)), last
        if last and self._point:
            for place in range(len(drawn)):
                self._drafts.settle(place)

    @abstractmethod
    def _laws(self, logits: torch.Tensor, ids: torch.Tensor | None) -> tuple[list[Law], bool]:
        """The law of each place, and whether this step is the last: it is told before any token is drawn."""

    @abstractmethod
    def _next(self, laws: Sequence[Law], drawn: list[int]) -> list[int]:
        """The canvas of the next step, from what this one has drawn."""

    def _random(self, place: int) -> int:
        """An id by chance; of each place and step another."""
        position = self._anchor + 1 + place
        return self._noise.whole(self._vocabulary, Purpose.CANVAS, position, anchor=self._anchor, step=self.steps_used)


class Ancestral(Uniform):
    """The signal rises in equal shares: before step i of K it is i / K, and after the last it is 1."""

    def _laws(self, logits: torch.Tensor, ids: torch.Tensor | None) -> tuple[list[Law], bool]:
        before, after = (step / self._steps for step in (self.steps_used, self.steps_used + 1))
        last = self.steps_used == self._steps - 1
        laws = []
        for row, z in zip(logits, self.canvas, strict=True):
            law = self._drawing.law(row, ids)
            support = torch.arange(len(law.logits), device=row.device) if law.ids is None else law.ids
            x = torch.zeros(self._vocabulary, dtype=torch.float64, device=row.device)
            x[support] = law.probs()
            q = posterior(x, z, before, after).log()
            laws.append(Law(q[support], law.ids) if last else Law(q))  # in the end what the network says, and no more
        if last and not self._sampling.temperature:
            laws = [Law.point(law.likeliest()) for law in laws]
        return laws, last

    def _next(self, laws: Sequence[Law], drawn: list[int]) -> list[int]:
        return drawn


def posterior(x: torch.Tensor, z: int, before: float, after: float) -> torch.Tensor:
    """x [vocabulary], what the network says of a place that holds z -> q [vocabulary], the law of what it holds next,
    where the signal rises from ``before`` to ``after`` (alpha_t and alpha_s of methods 4.3)."""
    size = len(x)
    q = (after - before) * x + (1 - before / after) * (1 - after) / size
    q[z] += size * before * x[z] + before / after - before
    return q / (size * before * x[z] + 1 - before)


class Annealed(Uniform):
    """DiffusionGemma's: the temperature falls from step to step, and of what a step draws the surest places are kept
    for the next one, by the bound on their entropies; the others become random ids again.

    ``hottest``, ``coolest``  the temperature falls from the one towards the other, in equal shares: the first step has
                 ``hottest``, the last of K ``coolest + (hottest - coolest) / K``. The drafts' own multiplies it
    ``bound``    on the entropies, if the effort gives none
    ``still``    the step is the last too if every place's likeliest token is that of the step before and the mean
                 entropy is below; None: never

    ``processed`` [count, m] are the logits over the temperature: what a network that conditions on itself wants next.
    """

    def __init__(
        self,
        effort: Effort,
        sampling: DraftSampling,
        noise: Noise,
        anchor: int,
        count: int,
        vocabulary: int,
        *,
        hottest: float = 0.8,
        coolest: float = 0.4,
        bound: float = 0.1,
        still: float | None = None,
    ) -> None:
        super().__init__(effort, sampling, noise, anchor, count, vocabulary)
        self._hottest, self._coolest, self._still = hottest, coolest, still
        self._bound = bound if effort.entropy_bound is None else effort.entropy_bound
        self._likeliest: list[int] = []
        self.processed: torch.Tensor | None = None

    def _laws(self, logits: torch.Tensor, ids: torch.Tensor | None) -> tuple[list[Law], bool]:
        left = self._steps - self.steps_used
        self.processed = logits / (self._coolest + (self._hottest - self._coolest) * left / self._steps)
        laws = [self._drawing.law(row, ids) for row in self.processed]
        last = left == 1
        if not last and self._still is not None:
            likeliest, self._likeliest = self._likeliest, [law.likeliest() for law in laws]
            mean = sum(law.entropy() for law in laws) / len(laws)
            last = likeliest == self._likeliest and mean < self._still
        if last and not self._sampling.temperature:
            laws = [Law.point(law.likeliest()) for law in laws]
        return laws, last

    def _next(self, laws: Sequence[Law], drawn: list[int]) -> list[int]:
        kept = set(within([law.entropy() for law in laws], self._bound))
        return [token if place in kept else self._random(place) for place, token in enumerate(drawn)]
