"""Laws: filters against a plain definition, residuals against sums, ties, extremes, and the penalties of each row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from deciding import targets
from hypothesis import given
from hypothesis import strategies as st
from tables import filtered, processed

from foldspec.laws import Law, law_of
from foldspec.noise import Noise, Purpose
from foldspec.options import SamplingParams
from foldspec.records import PointMass

LOGITS = st.lists(st.integers(-4, 4), min_size=1, max_size=9)  # whole numbers: ties come often
FILTERS = st.fixed_dictionaries(
    {
        "top_k": st.integers(0, 9),
        "top_p": st.sampled_from([1.0, 0.95, 0.6, 0.3, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    }
)


def dense(law: Law, size: int) -> list[float]:
    return [law.prob(token) for token in range(size)]


def law_from(probs: list[float], ids: list[int] | None = None) -> Law:
    """A law with these probabilities; those of 0 are left out of the ids that are given."""
    return Law(torch.tensor(probs, dtype=torch.float64).log(), None if ids is None else torch.tensor(ids))


@given(LOGITS, st.sampled_from([0.0, 1e-300, 0.01, 0.7, 1.0, 3.0]), FILTERS)
def test_a_processed_law_is_what_the_definition_says(logits: list[int], temperature: float, filters: Any) -> None:
    law = law_of(torch.tensor(logits, dtype=torch.float64), temperature, **filters)
    found, wanted = dense(law, len(logits)), filtered(logits, temperature, **filters)
    assert found == pytest.approx(wanted, abs=1e-12) and math.fsum(found) == pytest.approx(1)
    assert [value > 0 for value in found] == [value > 1e-300 for value in wanted]
    if law.token is None:
        own = law.probs().tolist()
        assert own == [law.prob(i if law.ids is None else int(law.ids[i])) for i in range(len(own))]


@given(LOGITS, FILTERS)
def test_a_law_over_part_of_the_ids(logits: list[int], filters: Any) -> None:
    ids = torch.arange(len(logits)) * 3 + 1
    law, same = (law_of(torch.tensor(logits).double(), 0.9, ids=where, **filters) for where in (ids, None))
    assert dense(law, 30) == [
        pytest.approx(same.prob((token - 1) // 3)) if token % 3 == 1 and token < 3 * len(logits) else 0.0
        for token in range(30)
    ]


def test_a_large_vocabulary_whose_top_p_reaches_past_the_likeliest() -> None:
    random = np.random.default_rng(0)
    logits = np.round(random.normal(size=5000), 2)  # with ties
    for top_p in (0.05, 0.5, 0.999):
        law = law_of(torch.tensor(logits), 1.3, top_p=top_p)
        wanted = filtered(logits.tolist(), 1.3, top_p=top_p)
        assert law.ids is not None and law.ids.tolist() == [i for i, value in enumerate(wanted) if value]
        assert law.probs().tolist() == pytest.approx([value for value in wanted if value], abs=1e-12)
    assert law_of(torch.zeros(3000), 1.0, top_p=0.89999).ids.tolist() == list(range(2700))  # type: ignore[union-attr]
    assert law_of(torch.zeros(3000), 1.0, top_k=7).ids.tolist() == list(range(7))  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_and_temperatures_give_no_nan(dtype: torch.dtype) -> None:
    for logits in ([1e30, -1e30, 0.0], [3e38, 3e38, -3e38], [-math.inf, 0.0, -math.inf], [0.0, 1e-30, -1e-30]):
        for temperature in (1e-320, 1e-45, 1e-6, 1.0, 1e30):
            found = dense(law_of(torch.tensor(logits, dtype=dtype), temperature), 3)
            assert math.fsum(found) == pytest.approx(1, abs=1e-6)
    assert dense(law_of(torch.tensor([2.0, 2.0]), 1e-300), 2) == [0.5, 0.5]


def test_the_law_of_bf16_logits_is_that_of_their_values() -> None:
    """Near ties: what is drawn from is what is used as q, whatever precision the logits came in."""
    logits = torch.tensor([1.0, 1.0078125, 0.9921875]).bfloat16()
    law = law_of(logits.float(), 1.0)
    assert dense(law, 3) == pytest.approx(torch.softmax(logits.double(), -1).tolist(), abs=1e-7)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=7), st.booleans(), st.booleans())
def test_a_residual_is_what_p_has_more_than_q(pairs: list[tuple[int, int]], some_p: bool, some_q: bool) -> None:
    p, q = (np.array([pair[i] for pair in pairs], float) for i in (0, 1))
    if p.sum() == 0 or q.sum() == 0:
        return
    p, q = p / p.sum(), q / q.sum()
    ids_p, ids_q = (np.flatnonzero(x).tolist() if some else None for x, some in ((p, some_p), (q, some_q)))
    laws = [law_from((x if ids is None else x[ids]).tolist(), ids) for x, ids in ((p, ids_p), (q, ids_q))]
    left = np.clip(p - q, 0, None)
    wanted = left / left.sum() if left.sum() > 1e-12 else p
    assert dense(laws[0].minus(laws[1]), len(p)) == pytest.approx(wanted.tolist(), abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=7), st.booleans(), st.booleans())
def test_total_variation_is_half_the_sum_of_differences(
    pairs: list[tuple[int, int]], some_p: bool, some_q: bool
) -> None:
    p, q = (np.array([pair[i] for pair in pairs], float) for i in (0, 1))
    if p.sum() == 0 or q.sum() == 0:
        return
    p, q = p / p.sum(), q / q.sum()
    ids_p, ids_q = (np.flatnonzero(x).tolist() if some else None for x, some in ((p, some_p), (q, some_q)))
    laws = [law_from((x if ids is None else x[ids]).tolist(), ids) for x, ids in ((p, ids_p), (q, ids_q))]
    assert laws[0].tv(laws[1]) == pytest.approx(np.abs(p - q).sum() / 2, abs=1e-12)
    assert laws[1].tv(laws[0]) == pytest.approx(laws[0].tv(laws[1]), abs=1e-12)
    assert laws[0].aligned(laws[1]).tolist() == pytest.approx((q if ids_p is None else q[ids_p]).tolist())
    for token in range(len(p)):
        for law, probs in zip(laws, (p, q), strict=True):
            assert law.tv(Law.point(token)) == pytest.approx(1 - probs[token], abs=1e-12)
            assert Law.point(token).tv(law) == pytest.approx(1 - probs[token], abs=1e-12)


def test_total_variation_at_the_edges() -> None:
    p = law_from([0.1, 0.2, 0.3, 0.4])
    assert Law.point(3).tv(Law.point(3)) == 0 and Law.point(3).tv(Law.point(2)) == 1
    assert p.tv(p) == 0 and law_from([0.5, 0.5], [0, 2]).tv(law_from([1.0], [1])) == 1
    for broken in (math.nan, math.inf):
        q = Law(torch.tensor([broken, 0.0, 0.0, 0.0]))
        assert p.tv(q) == Law.point(0).tv(q) == law_from([1.0], [2]).tv(q) == 1


def test_residuals_at_the_edges() -> None:
    p = law_from([0.1, 0.2, 0.3, 0.4])
    assert dense(p.minus(Law.point(1)), 4) == pytest.approx([0.125, 0.0, 0.375, 0.5])
    assert dense(law_from([0.4, 0.6], [1, 3]).minus(Law.point(2)), 4) == pytest.approx([0.0, 0.4, 0.0, 0.6])
    assert dense(p.minus(p), 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])  # nothing is left: only rounding comes here
    assert Law.point(3).minus(p).token == 3
    for broken in (math.nan, math.inf):  # a drafter's logits may be anything: p must come through
        q = Law(torch.tensor([broken, 0.0, 0.0, 0.0]))
        assert dense(p.minus(q), 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])


# ----------------------------------------------------------------------------------------------------- rows of a target


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 0.4, -0.4]),
        "frequency_penalty": st.sampled_from([0.0, 0.6, -0.3]),
        "logit_bias": st.dictionaries(st.integers(0, 5), st.sampled_from([-3.0, 0.5, 2.0]), max_size=3),
        "min_tokens": st.integers(0, 4),
        "top_k": st.integers(0, 3),
    }
)
IDS = st.lists(st.integers(0, 5), max_size=5)


@given(OPTIONS, IDS.filter(bool), IDS, IDS, st.integers(0, 99))
def test_each_row_is_processed_after_the_drafts_before_it(
    options: dict[str, Any], prompt: list[int], output: list[int], drafts: list[int], seed: int
) -> None:
    """A token repeated inside a block is penalised from its second row on: once for each time, and the prompt's own
    tokens by the repetition penalty alone."""
    logits = np.random.default_rng(seed).normal(size=(len(drafts) + 1, 6))
    proposal = PointMass(tuple(drafts))
    (target,) = targets(torch.tensor(logits), [proposal], prompt=prompt, output=output, stop_ids=(4,), **options)
    assert target.position == len(prompt) + len(output)
    params = SamplingParams(**options)
    for row in reversed(range(len(drafts) + 1)):
        wanted = processed(logits[row], params, prompt, [*output, *drafts[:row]], (4,))
        assert dense(target.law(row), 6) == pytest.approx(wanted, abs=1e-9)
    assert np.array_equal(target.logits.numpy(), logits)  # the raw logits are left as they were


def test_a_token_repeated_in_a_block() -> None:
    """By hand: logits 1; presence 0.5 and frequency 0.25, for a token drafted three times over."""
    rows = torch.ones(4, 2, dtype=torch.float64)
    (target,) = targets(
        rows, [PointMass((1, 1, 1))], prompt=(1,), temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    for row, penalty in enumerate((0.0, 0.75, 1.0, 1.25)):
        ratio = math.exp(-penalty)
        assert target.law(row).prob(1) == pytest.approx(ratio / (1 + ratio))


def test_a_repetition_penalty_divides_positive_logits_and_multiplies_the_others() -> None:
    rows = torch.tensor([[2.0, -2.0, 2.0, -2.0]], dtype=torch.float64)
    (target,) = targets(rows, [PointMass(())], prompt=(0, 1), output=(), temperature=1.0, repetition_penalty=2.0)
    wanted = torch.softmax(torch.tensor([1.0, -4.0, 2.0, -2.0], dtype=torch.float64), -1)
    assert dense(target.law(0), 4) == pytest.approx(wanted.tolist())


def test_greedy_rows_cost_one_look_and_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("foldspec.sampling.law_of", never)
    proposals = [PointMass((1, 2)), PointMass(())]
    first, second = targets(torch.eye(4), proposals, min_tokens=0, top_k=3, top_p=0.5, seed=4)
    assert [first.law(i).token for i in range(3)] == [0, 1, 2] and second.law(0).token == 3


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize(
    "penalties",
    [
        {"logit_bias": {2: 1e39}},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"frequency_penalty": -1e308, "presence_penalty": -1e308},
    ],
)
def test_penalties_beyond_the_range_of_logits(penalties: dict[str, Any], filters: dict[str, Any]) -> None:
    rows = torch.tensor([[1.0, -1.0, 0.5, 0.0]])
    (target,) = targets(rows, [PointMass(())], prompt=(0,), output=(2, 3), temperature=1.0, **penalties, **filters)
    token = Noise(0).draw(target.law(0), Purpose.TARGET, 5)
    assert 0 < target.law(0).prob(token) <= 1


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_a_law_that_is_not_finite_is_refused_as_a_draft(filters: dict[str, Any]) -> None:
    """What a drafter with NaN weights draws never stands, and the target's own law is left."""
    q = law_of(torch.full((4,), torch.nan), 1.0, **filters)
    p = law_of(torch.zeros(4), 1.0)
    assert 0 <= Noise(0).draw(q, Purpose.DRAFT, 5) < 4
    assert p.minus(q) is p
