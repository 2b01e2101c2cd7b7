"""The throughput model: recorded numbers, every outcome counted, and other people's least squares and maximum."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import optimize

from foldspec.bench import throughput as model

GOLDEN: dict[str, Any] = json.loads((tiny.GOLDEN / "golden_methods.json").read_text())["throughput"]
RATES = st.floats(0, 1)


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def test_no_case_was_lost() -> None:
    assert set(GOLDEN) == {"prop1", "eq6_eq7", "position_dependent", "least_squares", "mu_from_counts"}
    assert len(GOLDEN["prop1"]) == 24 and len(GOLDEN["eq6_eq7"]) == 24


@pytest.mark.parametrize("case", GOLDEN["prop1"], ids=lambda case: f"mu {case['mu']}, B {case['B']}")
def test_tokens_a_round(case: dict[str, Any]) -> None:
    assert model.tokens_a_round(case["mu"], case["B"]) == near(case["expected_tokens"])


@pytest.mark.parametrize("case", GOLDEN["eq6_eq7"], ids=lambda case: f"K {case['K']}, lambda {case['lambda']}")
def test_tokens_a_time(case: dict[str, Any]) -> None:
    alpha = model.accept_rate(case["d_K"], case["lambda"])
    assert alpha == near(case["accept"])
    assert model.agreement(case["d_K"], case["lambda"]) == near(case["verifier_agreement"])
    draft = model.DraftCost(case["a_ms"], case["b_ms"], fitted=True).of(case["K"])
    found = model.throughput(model.tokens_a_round(alpha, case["B"]), draft, case["cv_ms"])
    assert found == near(case["tokens_per_ms"])


def test_the_rest_of_the_golden_numbers() -> None:
    by_position, fit, counts = (GOLDEN[name] for name in ("position_dependent", "least_squares", "mu_from_counts"))
    assert model.tokens_by_position(by_position["alphas"]) == near(by_position["expected_tokens"])
    cost = model.fit_draft_cost(fit["K"], fit["draft_ms"])
    assert (cost.a, cost.b) == (near(fit["a"]), near(fit["b"])) and cost.fitted
    rate = model.rate_from_counts([tuple(pair) for pair in counts["accepted_drafted"]])
    assert rate == near(counts["mu_mle"]) and rate != pytest.approx(counts["naive_accept_rate"], abs=0.1)


@given(st.lists(RATES, max_size=7))
def test_tokens_by_position_is_the_mean_over_every_outcome(rates: list[float]) -> None:
    """Of all ways in which drafts stand or fall, in whole fractions: 1 + those before the first that falls."""
    exact = [Fraction(rate) for rate in rates]
    mean = Fraction(0)
    for stands in itertools.product((True, False), repeat=len(rates)):
        chance = math.prod((r if s else 1 - r for r, s in zip(exact, stands, strict=True)), start=Fraction(1))
        mean += chance * (1 + len(list(itertools.takewhile(bool, stands))))
    assert model.tokens_by_position(rates) == pytest.approx(float(mean), rel=1e-12)


@given(RATES, st.integers(0, 300))
def test_a_rate_for_all_is_the_power_series_in_whole_fractions(mu: float, drafts: int) -> None:
    exact = sum((Fraction(mu) ** j for j in range(drafts + 1)), start=Fraction(0)) if drafts < 40 else None
    found = model.tokens_a_round(mu, drafts)
    assert 1 <= found <= (drafts + 1) * (1 + 1e-12)
    assert exact is None or found == pytest.approx(float(exact), rel=1e-12)
    if mu < 0.999:
        assert found == pytest.approx((1 - mu ** (drafts + 1)) / (1 - mu), rel=1e-9)


@pytest.mark.parametrize("gap", [1e-3, 1e-7, 1e-9, 1e-12, 2.0**-53, 0.0])
def test_near_a_rate_of_1_no_digit_is_lost(gap: float) -> None:
    """The closed form as it stands in the paper is off by 1e-4 here, or divides 0 by 0."""
    mu = 1 - gap
    exact = sum((Fraction(mu) ** j for j in range(17)), start=Fraction(0))
    assert model.tokens_a_round(mu, 16) == pytest.approx(float(exact), rel=1e-14)


@given(RATES, RATES, st.integers(0, 30), st.integers(0, 30))
def test_more_rate_or_more_drafts_never_give_fewer_tokens(a: float, b: float, m: int, n: int) -> None:
    assert model.tokens_a_round(min(a, b), min(m, n)) <= model.tokens_a_round(max(a, b), max(m, n))


@given(RATES, RATES)
def test_what_leniency_gives_acceptance_it_takes_from_agreement(d: float, leniency: float) -> None:
    gained = model.accept_rate(d, leniency) - model.accept_rate(d)
    assert gained == pytest.approx(1 - model.agreement(d, leniency), abs=1e-12)
    assert model.accept_rate(d, 1.0) == 1.0 and model.agreement(d) == 1.0


TIMES = st.lists(st.tuples(st.integers(1, 32), st.floats(0.1, 1e4)), min_size=2, max_size=12)


@given(TIMES)
def test_least_squares_is_numpys(pairs: list[tuple[int, float]]) -> None:
    steps, times = map(list, zip(*pairs, strict=True))
    assume(len(set(steps)) > 1)
    b, a = np.polyfit(np.array(steps, dtype=float), times, 1)
    cost = model.fit_draft_cost(steps, times)
    assert (cost.a, cost.b) == (pytest.approx(a, rel=1e-7, abs=1e-6), pytest.approx(b, rel=1e-7, abs=1e-6))


def test_with_one_k_nothing_is_fitted() -> None:
    cost = model.fit_draft_cost([1, 1], [3.0, 5.0])
    assert cost == model.DraftCost(4.0, 0.0, fitted=False) and cost.of(1) == 4.0


@given(st.lists(st.integers(0, 8).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=12))
def test_the_rate_makes_the_counts_likeliest(counts: list[tuple[int, int]]) -> None:
    """A round of ``a`` accepted of ``n``: mu^a, and 1 - mu once where a < n."""
    rate = model.rate_from_counts(counts)
    if rate is None:
        assert all(drafted == 0 for _, drafted in counts)
        return

    def unlikely(mu: float) -> float:
        return -sum(a * math.log(mu) + (math.log1p(-mu) if a < n else 0.0) for a, n in counts)

    found = optimize.minimize_scalar(unlikely, bounds=(1e-9, 1 - 1e-9), method="bounded", options={"xatol": 1e-9})
    assert rate == pytest.approx(found.x, abs=1e-4)
