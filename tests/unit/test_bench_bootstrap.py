"""The bootstrap against scipy's, and what its interval covers where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from foldspec.bench.bootstrap import average_interval, counts, interval
from foldspec.bench.summary import NOISY


@pytest.mark.parametrize("n", [2, 7, 40, 200])
def test_scipy_says_the_same(n: int) -> None:
    """With the same generator it draws the same resamples."""
    values = np.random.default_rng(n).lognormal(0, 0.3, n)
    generator = np.random.default_rng(0)
    theirs = scipy.stats.bootstrap((values,), np.mean, method="percentile", n_resamples=2000, rng=generator)
    assert interval(values) == pytest.approx(list(theirs.confidence_interval), rel=1e-12)


def test_many_benches_at_once_are_each_alone() -> None:
    values = np.random.default_rng(1).lognormal(0, 0.3, (5, 12))
    together = interval(values)
    assert together.shape == (5, 2)
    for row, ends in zip(values, together, strict=True):
        assert ends == pytest.approx(interval(row), rel=1e-12)


def test_resamples() -> None:
    drawn = counts(9, 500, 3)
    assert (drawn.sum(axis=1) == 9).all() and (drawn == counts(9, 500, 3)).all() and (drawn != counts(9, 500, 4)).any()


def test_an_average_resamples_inside_each_task() -> None:
    """Spelt out draw by draw; and a task of many requests weighs as much as one of few."""
    tasks = [[1.0, 1.2, 0.9, 1.1], [3.0, 3.3]]
    draws = [np.random.default_rng(i).integers(0, len(v), (2000, len(v))) for i, v in enumerate(tasks)]
    whole = np.mean([np.array(v)[d].mean(axis=1) for v, d in zip(tasks, draws, strict=True)], axis=0)
    assert average_interval(tasks) == pytest.approx(np.quantile(whole, [0.025, 0.975]))
    assert average_interval([[1.0] * 40, [3.0, 3.0]]) == pytest.approx([2.0, 2.0])


def coverage(noise: float, seed: int) -> tuple[float, float]:
    """Over 2,000 A/A benches of 40 requests: how often the interval has 1.00 in it, and the mean speedup. Requests
    differ by 30%, which pairing removes; each of the two runs scatters by ``noise`` (lognormal)."""
    draw = np.random.default_rng(seed)
    request = draw.lognormal(0, 0.3, (2000, 40, 1))
    times = request * np.exp(draw.normal(0, noise, (2000, 40, 2)))
    gains = times[..., 0] / times[..., 1]
    ends = interval(gains)
    return float(((ends[:, 0] <= 1) & (ends[:, 1] >= 1)).mean()), float(gains.mean())


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.03])
def test_against_itself_the_interval_covers_one(noise: float) -> None:
    covered, mean = coverage(noise, seed=0)
    assert 0.92 <= covered <= 0.97
    assert mean == pytest.approx(np.exp(noise**2), rel=1e-3)


def test_where_it_no_longer_does() -> None:
    """A mean of ratios of two noisy times is above 1 by the square of the noise. Once that is not small beside the
    interval, the interval misses 1: which is why the bench says so above a spread of ``NOISY``."""
    at_limit = np.mean([coverage(NOISY, seed)[0] for seed in range(3)])
    assert at_limit >= 0.92
    covered, mean = coverage(0.2, seed=0)
    assert covered < 0.90 and mean == pytest.approx(np.exp(0.04), rel=2e-3)
