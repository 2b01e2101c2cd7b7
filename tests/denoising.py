"""Toy networks of diffusion drafters over a tiny vocabulary, drafted with by the product's own code in the real round
loop, and what the output's law is by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from enumerating import Branches, EnumeratedNoise, outcomes
from relaxing import ByHand
from tables import NoCache, TableModel

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


def begun(toy: Toy, rule: AcceptanceRule, drafter: Any, length: int, noise: Noise) -> tuple[Rounds, Request]:
    """A request of ``length`` tokens behind its first, which it has, and the real loop."""
    model = drafter.model = ToyModel(toy)
    loop = Rounds(model, cast(PagedCache, NoCache()), drafter, rule, device=torch.device("cpu"))
    params = SamplingParams(max_tokens=length + 1, temperature=1.0)
    request = Request(0, PROMPT, length + 1, params=params, noise=noise)
    model.hold(0, PROMPT)
    request.commit([0])
    return loop, request


def first_round(toy: Toy, rule: AcceptanceRule, drafter: Any, noise: Noise) -> Tokens:
    """What the first round commits."""
    loop, request = begun(toy, rule, drafter, toy.places + 1, noise)
    return loop.round([request])[0].committed


def generate(toy: Toy, rule: AcceptanceRule, drafter: Any, length: int, noise: Noise) -> Request:
    loop, request = begun(toy, rule, drafter, length, noise)
    while not request.done:
        loop.round([request])
    return request


def output_law(
    toy: Toy, rule: AcceptanceRule, drafter: Any, length: int, count: int | None = None
) -> tuple[dict[Tokens, float], int]:
    """The law of the first ``count`` tokens (None: all) behind the first, and in how many rounds of one output drafts
    have fallen at most."""
    fell = [0]

    def once(branches: Branches) -> Tokens:
        request = generate(toy, rule, drafter, length, EnumeratedNoise(branches))
        fell.append(sum(each.accepted < len(each.drafted) for each in request.rounds))
        return tuple(request.output[1:][:count])

    return outcomes(once), max(fell)


def plain_law(toy: Toy, length: int) -> dict[Tokens, float]:
    law = {(): 1.0}
    for _ in range(length):
        law = {(*out, token): mass * p for out, mass in law.items() for token, p in enumerate(toy.target(out))}
    return law


@cache
def some_law(size: int, *key: Any) -> Probs:
    """A law of so many ids, of each key another."""
    draw = random.Random(repr(key))
    weights = [math.exp(1.3 * draw.gauss(0, 1)) for _ in range(size)]
    return [weight / sum(weights) for weight in weights]


def random_toy(ids: int, places: int) -> Toy:
    """The target looks at two tokens, the network at the anchor and at the whole canvas."""
    return Toy(
        lambda out: some_law(ids, "target", out[-2:]),
        lambda before, canvas: [some_law(ids, before[-1:], tuple(canvas), place) for place in range(places)],
        places,
    )


# ------------------------------------------------------------------------------------------------- one round by itself


@dataclass(frozen=True)
class Drafted:
    """One outcome of drafting a block. ``laws`` are rounded, for comparisons."""

    mass: float
    tokens: Tokens
    laws: tuple[tuple[float, ...], ...]
    proposal: Proposal


def drafted(toy: Toy, drafter: ToyDrafter, ids: int) -> list[Drafted]:
    """Every outcome of the first block, by every outcome of the noise."""
    kept: dict[Any, Proposal] = {}

    def once(branches: Branches) -> Any:
        proposal = drafter.block((), EnumeratedNoise(branches), len(PROMPT), toy.places).proposal
        laws = tuple(tuple(round(proposal.law(i).prob(v), 13) for v in range(ids)) for i in range(toy.places))
        return kept.setdefault((proposal.tokens, laws), proposal) and (proposal.tokens, laws)

    return [Drafted(mass, *key, kept[key]) for key, mass in outcomes(once).items()]


def unfaithful(found: Sequence[Drafted]) -> float:
    """How far drafts are from their laws at most, each given its law and the drafts and laws before it: the premise of
    every rule that looks at q (methods 4.4)."""
    worst, groups = 0.0, [list(found)]
    for place in range(len(found[0].tokens)):
        parts: dict[Any, list[Drafted]] = {}
        for number, group in enumerate(groups):
            for each in group:
                parts.setdefault((number, each.laws[place]), []).append(each)
        groups = []
        for (_, law), part in parts.items():
            total = sum(each.mass for each in part)
            for token, wanted in enumerate(law):
                same = [each for each in part if each.tokens[place] == token]
                worst = max(worst, total * abs(sum(each.mass for each in same) / total - wanted))
                groups += [same] if same else []
    return worst


class Replayed(NoDrafter):
    """The first block is one of these, by chance."""

    def __init__(self, found: Sequence[Drafted]) -> None:
        self._found = found
        self.max_drafts = len(found[0].tokens)
        self.branches: Branches | None = None
        self.model: ToyModel | None = None

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        assert self.branches is not None
        return [self._found[self.branches.choose([each.mass for each in self._found])].proposal]


def run_law(toy: Toy, rule: AcceptanceRule, found: Sequence[Drafted]) -> dict[Tokens, float]:
    """The law of what one round commits, through the real loop."""
    drafter = Replayed(found)

    def once(branches: Branches) -> Tokens:
        drafter.branches = branches
        return first_round(toy, rule, drafter, EnumeratedNoise(branches))

    return outcomes(once)


def run_law_by_hand(toy: Toy, rule: ByHand, found: Sequence[Drafted]) -> dict[Tokens, float]:
    """The same where each draft follows its law, whatever it really did."""
    law: dict[Tokens, float] = {}

    def add(run: Tokens, mass: float) -> None:
        law[run] = law.get(run, 0.0) + mass

    def go(group: Sequence[Drafted], run: Tokens, mass: float) -> None:
        p, place, total = toy.target(run), len(run), sum(each.mass for each in group)
        if place == toy.places:
            for token, each in enumerate(p):
                add((*run, token), mass * each)
            return
        for q in {each.laws[place] for each in group}:
            part = [each for each in group if each.laws[place] == q]
            share = mass * sum(each.mass for each in part) / total
            stays, falls = rule(p, p, list(q), place)
            for token in range(len(p)):
                add((*run, token), share * falls[token])
                same = [each for each in part if each.tokens[place] == token]
                if same and stays[token] > 0:
                    go(same, (*run, token), share * stays[token])

    go(found, (), 1.0)
    return law


def continued(toy: Toy, law: dict[Tokens, float], length: int) -> dict[Tokens, float]:
    """The law of ``length`` tokens, where plain decoding goes on behind a run."""
    found: dict[Tokens, float] = {}
    for run, mass in law.items():
        tails = {run[:length]: mass}
        for _ in range(length - len(run)):
            tails = {(*out, v): m * p for out, m in tails.items() for v, p in enumerate(toy.target(out))}
        for out, m in tails.items():
            found[out] = found.get(out, 0.0) + m
    return found
