"""The law of the output, through the real round loop: target and drafter are tables, noise is enumerated exactly.

Each case goes at least two rounds deep, as one request of a batch of two; the law of its whole output must be that of
plain decoding, whatever the drafter proposes. Mutants of the code, made from its source, must not pass.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from output_laws import keys_of, mutant, output_law
from tables import IDS, PROMPT, TableDrafter, plain_law, total_variation

from foldspec import laws, sampling
from foldspec.acceptance import exact, make_rule, match
from foldspec.cache.rows import Rows
from foldspec.laws import Law
from foldspec.noise import Noise, Purpose
from foldspec.options import SamplingParams
from foldspec.records import PointMass, Proposal, Sampled
from foldspec.sampling import DraftSampling

LENGTH, LONGER = 4, 5  # tokens, drafts drawn or not; a round of two drafts commits three at most
POINT, DRAWN = DraftSampling(), DraftSampling(temperature=1.3)
SHARED = DraftSampling(temperature=1.3, shared=True)

PLAIN = {"temperature": 1.0}
CASES: dict[str, tuple[str, TableDrafter, dict[str, Any]]] = {
    "point mass": ("exact", TableDrafter(POINT), PLAIN),
    "drawn": ("exact", TableDrafter(DRAWN), PLAIN),
    "drawn in a chain": ("exact", TableDrafter(DRAWN, chain=True), PLAIN),
    "draft vocabulary": ("exact", TableDrafter(DRAWN, ids=[0, 2]), PLAIN),
    "draft vocabulary, target top-k": ("exact", TableDrafter(DRAWN, ids=[1, 2, 3]), PLAIN | {"top_k": 2}),
    "draft top-k": ("exact", TableDrafter(DraftSampling(1.3, top_k=2)), PLAIN),
    "draft top-p": ("exact", TableDrafter(DraftSampling(0.9, top_p=0.7)), PLAIN),
    "target top-k": ("exact", TableDrafter(DRAWN), {"temperature": 0.8, "top_k": 2}),
    "target top-p": ("exact", TableDrafter(DRAWN), {"temperature": 1.2, "top_p": 0.75}),
    "target min-p, point mass": ("exact", TableDrafter(POINT), {"temperature": 1.2, "min_p": 0.3}),
    "both sides": ("exact", TableDrafter(DraftSampling(1.3, top_k=3, top_p=0.8)), PLAIN | {"top_k": 3, "top_p": 0.8}),
    "penalties": (
        "exact",
        TableDrafter(DraftSampling(1.3, top_k=2)),
        PLAIN | {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.7},
    ),
    "penalties, point mass, bias": (
        "exact",
        TableDrafter(POINT),
        PLAIN | {"frequency_penalty": -0.8, "presence_penalty": -0.2, "logit_bias": {2: 1.0, 0: -0.5}},
    ),
    "greedy, drawn": ("exact", TableDrafter(DraftSampling(1.3, top_k=2)), {"temperature": 0.0}),
    "greedy under penalties": ("exact", TableDrafter(POINT), {"temperature": 0.0, "frequency_penalty": 1.5}),
    "match, point mass": ("match", TableDrafter(POINT), PLAIN),
    "match, point mass, penalties": (
        "match",
        TableDrafter(POINT),
        PLAIN | {"repetition_penalty": 1.5, "frequency_penalty": 0.8},
    ),
    "match, drawn": ("match", TableDrafter(DraftSampling(1.3, top_k=2)), PLAIN),
    "match, shared": ("match", TableDrafter(SHARED, chain=True), PLAIN),
    "match, shared, filters": (
        "match",
        TableDrafter(DraftSampling(1.3, top_k=3, shared=True)),
        {"temperature": 0.8, "top_p": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_output_has_the_law_of_plain_decoding(name: str) -> None:
    rule, drafter, options = CASES[name]
    params = SamplingParams(max_tokens=LENGTH if drafter.sampling.temperature else LONGER, **options)
    assert total_variation(output_law(make_rule(rule), drafter, params), plain_law(params, PROMPT[-1])) < 1e-12


@pytest.mark.parametrize("rule", ["exact", "match"])
def test_the_first_token_and_stops_that_must_wait(rule: str) -> None:
    """From the prompt's own row on, with an id that ends the request but not among the first two."""
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0, top_p=0.8, min_tokens=2)
    drafter = TableDrafter(DraftSampling(1.3, top_k=2))
    law = output_law(make_rule(rule), drafter, params, first=True, stop_ids=(2,))
    assert total_variation(law, plain_law(params, None, (2,))) < 1e-12
    assert all(2 not in output[:2] for output in law) and any(len(output) == 3 for output in law)


def test_either_place_in_the_batch() -> None:
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0, top_k=3)
    law = output_law(make_rule("exact"), TableDrafter(DraftSampling(1.3, top_k=2)), params, place=1)
    assert total_variation(law, plain_law(params, PROMPT[-1])) < 1e-12


# ---------------------------------------------------------------------------------------------------- half precision


class DrawnInHalf(TableDrafter):
    """Wrong: tokens are drawn from logits in bfloat16, and q is computed from those in fp32."""

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Any]:
        precise, self._table = self._table, self._table.bfloat16()
        proposals = super().propose(anchors, tokens, budgets, noises)
        self._table = precise

        def law_after(token: int) -> Any:
            return lambda i: self.sampling.law(precise[i, token])

        pairs = zip(proposals, tokens, strict=True)
        return [types.SimpleNamespace(steps=1, tokens=each.tokens, law=law_after(token)) for each, token in pairs]


@pytest.mark.parametrize("drafts", [DraftSampling(1.0, top_k=3), DraftSampling(1.3, top_k=2)])
def test_near_ties_in_bfloat16(drafts: DraftSampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits between 64 and 66, which bfloat16 holds in steps of a half: draws are from the very numbers that are q."""
    random = np.random.default_rng(2)
    near = torch.tensor(64 + 2 * random.random(size=(3, IDS, IDS)), dtype=torch.float32)
    target = torch.tensor(64 + 2 * random.random(size=(IDS, IDS, IDS))).bfloat16()
    assert all(len(row.unique()) < IDS for row in target[0]) and len(near.unique()) == near.numel()
    monkeypatch.setattr("tables.TARGET", target.double().numpy())
    for drafter, table, length in (
        (TableDrafter(drafts), near.bfloat16(), LENGTH),
        (DrawnInHalf(drafts), near, LENGTH - 1),
    ):
        drafter._table = table
        params = SamplingParams(max_tokens=length, temperature=1.0)
        off = total_variation(output_law(make_rule("exact"), drafter, params), plain_law(params, PROMPT[-1]))
        assert off > 1e-3 if table is near else off < 1e-12, off


# --------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("name", ["drawn", "drawn in a chain", "point mass", "match, point mass", "match, drawn"])
def test_no_number_is_looked_at_twice_and_drafts_are_keyed_by_their_anchor(name: str) -> None:
    rule, drafter, _ = CASES[name]
    anchors = 0
    for keys in keys_of(make_rule(rule), drafter):
        assert len({key[1:] for key in keys}) == len(keys)
        drafted = [key for key in keys if key[1] is Purpose.DRAFT]
        assert all(0 <= anchor < position <= anchor + 2 for _, _, position, anchor, _ in drafted)
        anchors = max(anchors, len({anchor for *_, anchor, _ in drafted}))
        assert all(key[3:] == (0, 0) for key in keys if key[1] is not Purpose.DRAFT)
    assert anchors >= 2 or not drafter.sampling.temperature


# ------------------------------------------------------------------------------------------------------------- mutants


ACCEPT, RESIDUAL = "noise.uniform(Purpose.ACCEPT, position)", "Purpose.RESIDUAL, position"
DRAFT_KEY = "Purpose.DRAFT, position, anchor=target.position - 1"
# name -> module, what is changed, into what, and the case above that shows it
WRONG: dict[str, tuple[types.ModuleType, str, str, str]] = {
    "residual from p": (exact, "p.minus(q)", "p", "both sides"),
    "residual from q": (exact, "p.minus(q)", "q.minus(p)", "both sides"),
    "accept stream = draft stream": (exact, ACCEPT, f"noise.uniform({DRAFT_KEY})", "both sides"),
    "residual stream = draft stream": (exact, RESIDUAL, DRAFT_KEY, "target top-k"),
    "residual stream = accept stream": (exact, RESIDUAL, "Purpose.ACCEPT, position", "point mass"),
    "q of the row before": (exact, "proposal.law(i)", "proposal.law(max(0, i - 1))", "both sides"),
    "p of the row after": (exact, "target.law(i), target", "target.law(i + 1), target", "point mass"),
    "argmax for a draw": (
        match,
        "noise.draw(target.law(i),",
        "noise.draw(law_of(target.logits[i], 0),",
        "match, point mass",
    ),
    "q without the draft's filters": (sampling, "return Sampled(source,", "return Unfiltered(source,", "draft top-k"),
    "q at another temperature": (sampling, "return Sampled(source,", "return Untempered(source,", "both sides"),
    "penalties blind to the block": (
        sampling,
        "self._counts + Counter(self._drafts[:row])",
        "self._counts",
        "match, point mass, penalties",
    ),
    "penalties one draft early": (
        sampling,
        "self._drafts[:row]",
        "self._drafts[: row + 1]",
        "match, point mass, penalties",
    ),
    "penalties for the output alone": (
        sampling,
        "counts.keys() | set(text.prompt)",
        "counts.keys()",
        "match, point mass, penalties",
    ),
}


class Unfiltered(Sampled[Any]):
    """q as it was before top-k: the ids that were ruled out are put back, a little below the others."""

    def law(self, i: int) -> Any:
        kept = super().law(i)
        logits = torch.full((IDS,), float(kept.logits.min()) - 0.1, dtype=torch.float64)
        logits[kept.ids] = kept.logits
        return Law(logits)


class Untempered(Sampled[Any]):
    """q as if the drafter's temperature were 1."""

    def law(self, i: int) -> Any:
        kept = super().law(i)
        return Law(kept.logits * 1.3, kept.ids)


@pytest.mark.parametrize("name", WRONG)
def test_mutants_have_another_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a case that the code itself passes above."""
    module, old, new, case = WRONG[name]
    names = mutant(module, old, new, Unfiltered=Unfiltered, Untempered=Untempered, law_of=laws.law_of)
    rule, like, options = CASES[case]
    drafter = TableDrafter(like.sampling, ids=like.ids)
    rules: dict[str, Any] = {"exact": names.get("Exact", exact.Exact), "match": names.get("Match", match.Match)}
    if module is sampling:
        drafter.sampling = names["DraftSampling"](**vars(like.sampling))
        monkeypatch.setattr("foldspec.schedule.rounds.target_laws", names["target_laws"])
    params = SamplingParams(max_tokens=LENGTH if like.sampling.temperature else LENGTH + 1, **options)
    assert total_variation(output_law(rules[rule](), drafter, params), plain_law(params, PROMPT[-1])) > 1e-3


# -------------------------------------------------------------------------------------------------- drafts in any order


class RightFirst(TableDrafter):
    """Two drafts of ids 0 and 2, drawn in two steps, the right one first: step 0 draws a left draft that is not kept
    and then the right one given it, step 1 the left one given the right one. q is exact if the numbers are independent:
    of the left one its marginal, of the right one its law given the left one.

    Published multi-step drafters draw in such orders. What the verifier then finds of the left draft says something of
    the right one's number, so a position that is drafted again must not meet the same number again.
    """

    def __init__(self, *, anchored: bool = True, stepped: bool = True) -> None:
        super().__init__(DRAWN, ids=[0, 2])
        self._anchored, self._stepped = anchored, stepped
        self._right = torch.softmax(self._table[1, [0, 2]], -1)  # [left, right]
        self._left = torch.softmax(2.0 * self._table[2, [0, 2]], -1)  # [right, left]

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        return [self._one(*each) for each in zip(anchors.starts, tokens, budgets, noises, strict=True)]

    def _one(self, start: int, token: int, budget: int, noise: Noise) -> Any:
        def draw(probs: torch.Tensor, row: int, step: int) -> int:
            anchor, step = start if self._anchored else 0, step if self._stepped else 0
            return noise.draw(Law(probs.log()), Purpose.DRAFT, start + 1 + row, anchor=anchor, step=step)

        if budget < 2:
            return PointMass(())
        first = torch.softmax(self._table[0, token], -1)
        right = draw(self._right[draw(first, 0, 0)], 1, 0)
        left = draw(self._left[right], 0, 1)
        joint = (first @ self._right)[:, None] * self._left  # [right, left]
        q = Law(joint.sum(0).log(), self.ids), Law(joint[:, left].log(), self.ids)
        return types.SimpleNamespace(steps=1, tokens=(2 * left, 2 * right), law=lambda i: q[i])


def right_first(**how: bool) -> float:
    params = SamplingParams(max_tokens=5, temperature=1.0, top_k=2)
    return total_variation(output_law(make_rule("exact"), RightFirst(**how), params), plain_law(params, PROMPT[-1]))


def test_drafts_drawn_in_another_order_need_their_anchor_and_their_step_in_the_key() -> None:
    assert right_first() < 1e-12
    assert right_first(anchored=False) > 1e-3
    assert right_first(stepped=False) > 1e-3


def test_block_drafts_without_their_anchor_in_the_key_are_noticed() -> None:
    """Drawn from left to right they would do no harm; the rule is kept all the same, and is seen in the keys."""
    names = mutant(sampling, "anchor + 1 + i, anchor=anchor, step=step)", "anchor + 1 + i)")
    drafter = TableDrafter(names["DraftSampling"](temperature=1.3))
    assert any(len({key[1:] for key in keys}) < len(keys) for keys in keys_of(make_rule("exact"), drafter))
