"""Toy networks of diffusion drafters over a tiny vocabulary, drafted with by the product's own code in the real round
loop, and what the output's law is by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from enumerating import Branches, EnumeratedNoise, outcomes
from tables import NoCache, TableModel, total_variation

from foldspec.acceptance.base import AcceptanceRule
from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters.base import NoDrafter
from foldspec.drafters.denoise import Masked
from foldspec.effort import Effort
from foldspec.models.base import ForwardOutput, ForwardPlan
from foldspec.noise import Noise
from foldspec.options import SamplingParams
from foldspec.records import PointMass, Proposal
from foldspec.sampling import DraftSampling
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Rounds

Probs = list[float]
Tokens = tuple[int, ...]
PROMPT = (0,)


@dataclass(frozen=True)
class Toy:
    """``target(output)`` is the law of the token after an output, whose first token, the anchor, is left out;
    ``network(before, canvas)`` that of every place of a block after such an output."""

    target: Callable[[Tokens], Probs]
    network: Callable[[Tokens, Sequence[int | None]], Sequence[Probs]]
    places: int


class ToyModel(TableModel):
    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self._toy = toy

    def forward(self, ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> ForwardOutput:
        tokens, logits = ids.tolist(), []
        for request, start, packed in plan.rows:
            held = self._held.setdefault(request, {})
            for position, token in enumerate(tokens[packed], start):
                held[position] = token
                before = tuple(held[i] for i in range(len(PROMPT) + 1, position + 1))
                logits.append(self._toy.target(before))
        return ForwardOutput(torch.tensor(logits, dtype=torch.float64).log(), ())

    def output(self, request: int, start: int) -> Tokens:
        """What is committed behind the first token, up to the anchor at ``start``."""
        held = self._held.get(request, {})
        return tuple(held[i] for i in range(len(PROMPT) + 1, start))


Begin = Callable[..., Any]  # (effort, sampling, noise, anchor, count) -> an object with the protocol of Masked


class ToyDrafter(NoDrafter):
    """``begin`` makes the block; ``whole`` drafts all places or none, so that only the first round does."""

    def __init__(
        self, toy: Toy, effort: Effort, sampling: DraftSampling, begin: Begin = Masked, *, whole: bool = False
    ) -> None:
        self.max_drafts, self._toy, self._whole = toy.places, toy, whole
        self._effort, self._sampling, self._begin = effort, sampling, begin
        self.biased = effort.biased(sampling.temperature > 0)
        self.model: ToyModel | None = None

    def block(self, before: Tokens, noise: Noise, anchor: int, count: int) -> Any:
        block = self._begin(self._effort, self._sampling, noise, anchor, count)
        while not block.done:
            laws = self._toy.network(before, block.canvas)
            rows = [laws[i] for i in getattr(block, "masked", range(count))]
            block.step(torch.tensor(rows, dtype=torch.float64).log())
        return block

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        assert self.model is not None
        proposals: list[Proposal] = []
        for request, start, token, budget, noise in zip(
            anchors.requests, anchors.starts, tokens, budgets, noises, strict=True
        ):
            if budget < (self.max_drafts if self._whole else 1):
                proposals.append(PointMass(()))
            else:
                before = (*self.model.output(request, start), token)[start == len(PROMPT) :]
                proposals.append(self.block(before, noise, start, budget).proposal)
        return proposals


def generate(
    toy: Toy, rule: AcceptanceRule, drafter: Any, length: int, noise: Noise, temperature: float = 1.0
) -> Request:
    """A request of ``length`` tokens behind its first, through the real loop."""
    model = drafter.model = ToyModel(toy)
    loop = Rounds(model, cast(PagedCache, NoCache()), drafter, rule, device=torch.device("cpu"))
    params = SamplingParams(max_tokens=length + 1, temperature=temperature)
    request = Request(0, PROMPT, length + 1, params=params, noise=noise)
    model.hold(0, PROMPT)
    request.commit([0])
    while not request.done:
        loop.round([request])
    return request


def output_law(
    toy: Toy, rule: AcceptanceRule, drafter: Any, length: int, count: int | None = None
) -> dict[Tokens, float]:
    """The law of the first ``count`` tokens (None: all) behind the first."""

    def once(branches: Branches) -> Tokens:
        return tuple(generate(toy, rule, drafter, length, EnumeratedNoise(branches)).output[1:][:count])

    return outcomes(once)


def plain_law(toy: Toy, length: int) -> dict[Tokens, float]:
    law = {(): 1.0}
    for _ in range(length):
        law = {(*out, token): mass * p for out, mass in law.items() for token, p in enumerate(toy.target(out))}
    return law


def marginal(law: dict[Tokens, float], count: int) -> dict[Tokens, float]:
    found: dict[Tokens, float] = {}
    for output, mass in law.items():
        found[output[:count]] = found.get(output[:count], 0.0) + mass
    return found


__all__ = ["PROMPT", "Toy", "ToyDrafter", "generate", "marginal", "output_law", "plain_law", "total_variation"]
