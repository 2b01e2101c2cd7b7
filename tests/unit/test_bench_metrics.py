"""One definition each: tau, TPOT, speedup, against numbers worked out by hand and against a real Completion."""

from __future__ import annotations

import pytest

from foldspec.bench import metrics
from foldspec.bench.summary import verdict
from foldspec.errors import MeasurementError
from foldspec.records import Completion, Round


def test_by_hand() -> None:
    commits = [3, 1, 4]  # 9 tokens with the first
    assert metrics.tau(commits) == 8 / 3 and metrics.tau([]) is None
    assert metrics.tau_pooled([commits, [1, 1]]) == 10 / 5 and metrics.tau_pooled([[]]) is None
    assert metrics.tpot(1.0, 5.0, 9) == 0.5 and metrics.tpot(1.0, 1.0, 1) is None
    assert metrics.per_round(1.0, 5.0, 3) == 4 / 3 and metrics.per_round(1.0, 1.0, 0) is None
    assert metrics.ratios([2.0, 6.0], [1.0, 2.0]) == [2.0, 3.0]
    assert metrics.ratio_of_means([2.0, 6.0], [1.0, 2.0]) == 8 / 3


def test_break_even_is_where_the_speedup_is_one() -> None:
    """speedup = tau / cost of a round in AR steps."""
    ar_step, round_time, n_out = 0.030, 0.075, 41
    cost = metrics.round_cost(round_time, ar_step)
    for rounds in (8, 16, 20):
        tau = (n_out - 1) / rounds
        (gain,) = metrics.ratios([ar_step], [metrics.tpot(0, rounds * round_time, n_out) or 0])
        assert gain == pytest.approx(tau / cost)
        assert (gain > 1) == (tau > cost)


def test_the_same_as_what_a_completion_says_of_itself() -> None:
    rounds = [Round(9, (5, 6), 2, (5, 6, 7)), Round(12, (8,), 0, (9,))]
    done = Completion((1,) * 9, (4, 5, 6, 7, 9), "", "length", rounds, first_time=0.25, last_time=1.25)
    commits = [len(r.committed) for r in rounds]
    metrics.check_commits(len(done.token_ids), commits)
    assert metrics.tau(commits) == done.tau == 2.0
    assert metrics.tpot(0.25, 1.25, 5) == done.tpot == 0.25


@pytest.mark.parametrize(("n_out", "commits"), [(9, [3, 1, 5]), (9, [3, 1, 3]), (9, [8, 0]), (1, [1]), (3, [])])
def test_commits_that_do_not_add_up(n_out: int, commits: list[int]) -> None:
    with pytest.raises(MeasurementError, match="the commits say"):
        metrics.check_commits(n_out, commits)


def test_nothing_is_a_gain_whose_interval_contains_one() -> None:
    assert verdict([1.01, 1.2], 20) == "gain" and verdict([0.8, 0.99], 20) == "loss"
    assert verdict([0.99, 1.3], 20) == verdict([1.0, 1.3], 20) == verdict([0.8, 1.0], 20) == "none"
    assert verdict([1.5, 1.6], 4) == "few"
