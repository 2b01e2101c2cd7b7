"""Blocks that a drafter ends early. A score that knows only what is before a draft may end a block there, and the
output keeps the target's law; one that knows the draft itself may not: what is verified no longer comes from its q."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from output_laws import output_law
from tables import IDS, PROMPT, TableDrafter, plain_law, total_variation

from foldspec.acceptance import make_rule
from foldspec.cache.rows import Rows
from foldspec.drafters.dflash import DFlash
from foldspec.noise import Noise
from foldspec.options import SamplingParams
from foldspec.records import PointMass, Proposal
from foldspec.sampling import DraftSampling

STOP = 0.5
SURE = torch.tensor([[0.9, 0.2, 0.8, 0.6], [0.1, 0.7, 0.4, 0.9]])  # [row, token before]: of either kind in each row


class TableChain:
    """What DSpark's heads say of one block, from tables."""

    def __init__(self, table: torch.Tensor, rows: int) -> None:
        self._table, self._row = table, 0
        self.logits = torch.zeros(1, rows, IDS)

    def next(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row, self._row = self._row, self._row + 1
        return self._table[row, previous], SURE[row, previous]


class Unsure(TableDrafter):
    """Drafts that the block drafter's own code draws and ends."""

    _likeliest = DFlash._likeliest

    def __init__(self, temperature: float) -> None:
        super().__init__(DraftSampling(temperature, top_k=3, confidence_stop=STOP), chain=True)
        self._sampling, self._target_ids = self.sampling, None
        self._config = SimpleNamespace(heads=SimpleNamespace(rank=1))
        self.lengths: set[int] = set()

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        proposals: list[Proposal] = []
        for start, token, budget, noise in zip(anchors.starts, tokens, budgets, noises, strict=True):
            chain, own = cast(Any, TableChain(self._table, budget)), cast(DFlash, self)
            if budget < 1:
                proposals.append(PointMass(()))
            elif self.sampling.temperature:
                proposals.append(self.sampling.begin(noise, start))
                DFlash._draw(own, [cast(Any, proposals[-1])], chain, [token], [budget])
            else:
                proposals.append(PointMass(tuple(DFlash._best(own, chain, [token])[0][:budget])))
            if budget == self.max_drafts:
                self.lengths.add(len(proposals[-1].tokens))
        return proposals


class OwnScore(TableDrafter):
    """Wrong: a draft is thrown away, with those after it, where it was itself unlikely."""

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        kept: list[Proposal] = []
        for whole in super().propose(anchors, tokens, budgets, noises):
            laws = [cast(Any, whole).law(i) for i in range(len(whole.tokens))]
            ends = [i for i, token in enumerate(whole.tokens) if laws[i].prob(token) < 0.5]
            shorter = SimpleNamespace(steps=1, tokens=whole.tokens[: min(ends, default=9)], law=laws.__getitem__)
            kept.append(cast(Any, shorter))
        return kept


def off(rule: str, drafter: TableDrafter) -> float:
    params = SamplingParams(max_tokens=4, temperature=1.0, top_k=3)
    law = output_law(make_rule(rule), drafter, params)
    return total_variation(law, plain_law(params, PROMPT[-1]))


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("rule", ["exact", "match"])
def test_a_score_of_what_is_before_may_end_a_block(rule: str, temperature: float) -> None:
    drafter = Unsure(temperature)
    assert off(rule, drafter) < 1e-12
    assert len(drafter.lengths) > 1


def test_the_probability_of_the_draft_itself_may_not() -> None:
    assert off("exact", OwnScore(DraftSampling(1.3, top_k=2))) > 1e-3
