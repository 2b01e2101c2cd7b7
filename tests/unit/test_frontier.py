"""Frontiers against brute force, hand-made sweeps and scipy's bootstrap."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from foldspec.bench.frontier import dominates, exclusions, frontiers, non_dominated
from foldspec.bench.summary import FEW

CELL = ("sim", 16)
OFTEN = {"resamples": 500, "seed": 0}
Scores = Mapping[str, tuple[float, Sequence[float | None]]]  # method -> latency in s, score of each request


def mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def summary(value: float | None) -> dict[str, Any] | None:
    return None if value is None else {"mean": value, "ci": [value, value]}


def sweep(scores: Scores) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Requests and points; ``ar`` is the verifier; drafters alone and lossless points have names that begin so."""
    count = max(len(values) for _, values in scores.values())
    requests = [
        {name: {"method": name, "score": values[i], "logprob": None} for name, (_, values) in scores.items()}
        for i in range(count)
    ]
    points = [
        {
            **dict(zip(("task", "length"), CELL, strict=True)),
            "method": name,
            "kind": "verifier" if name == "ar" else "drafter" if name.startswith("alone") else "point",
            "lossless": name.startswith("lossless"),
            "score": summary(mean(values)),
            "logprob": None,
            "agreement": None,
            "latency_s": summary(seconds),
            "tokens_s": summary(1 / seconds),
        }
        for name, (seconds, values) in scores.items()
    ]
    return {CELL: requests}, points


def found(scores: Scores, speed: str = "latency_s") -> dict[str, Any]:
    (one,) = [each for each in frontiers(*sweep(scores), **OFTEN) if each["speed"] == speed]
    return one


def steady(value: float, n: int = 8) -> list[float]:
    return [value] * n


def test_what_one_lossless_point_is_better_by_is_chance() -> None:
    better = {"lossless b": (2.0, steady(0.5)), "b": (2.0, steady(0.5))}
    for second, (seconds, values) in better.items():
        fast: Scores = {"lossless a": (1.0, steady(0.2)), second: (seconds, values), "c": (3.0, steady(0.9))}
        front = found(fast)
        assert front["non_dominated"] == list(fast)
        assert front["frontier"] == [name for name in fast if name != "lossless b"]
    between: Scores = {"lossless a": (1.0, steady(0.2)), "b": (2.0, steady(0.5)), "lossless c": (3.0, steady(0.9))}
    assert found(between)["frontier"] == ["lossless a", "b"]
    assert found({"a": (1.0, steady(0.2)), "lossless b": (2.0, steady(0.5))})["frontier"] == ["a", "lossless b"]


# Few values, so that equal coordinates are met.
PLACES = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3), st.tuples(*[st.integers(0, 4).map(float)] * 2), min_size=1, max_size=12
)


@given(PLACES)
def test_what_is_left_is_what_brute_force_leaves(places: dict[str, tuple[float, float]]) -> None:
    """By another way: along falling speed, a point stays if it is better than all that are faster, and the best of its
    own speed."""
    kept = non_dominated(places)
    expected = set()
    for name, (speed, quality) in places.items():
        faster = [q for s, q in places.values() if s > speed]
        level = [q for s, q in places.values() if s == speed]
        if quality == max(level) and all(quality > q for q in faster):
            expected.add(name)
    assert set(kept) == expected and len(kept) == len(expected)
    assert [places[name][0] for name in kept] == sorted((places[name][0] for name in kept), reverse=True)
    assert [places[name][1] for name in kept] == sorted(places[name][1] for name in kept)


@given(PLACES)
def test_each_other_is_dominated_by_one_that_is_left(places: dict[str, tuple[float, float]]) -> None:
    kept = non_dominated(places)
    assert not any(dominates(places[a], places[b]) for a in kept for b in kept)
    for name in places.keys() - set(kept):
        assert any(dominates(places[one], places[name]) for one in kept)


@given(st.tuples(*[st.integers(0, 3)] * 2), st.tuples(*[st.integers(0, 3)] * 2), st.tuples(*[st.integers(0, 3)] * 2))
def test_dominance_is_an_order(a: Any, b: Any, c: Any) -> None:
    assert not dominates(a, a) and not (dominates(a, b) and dominates(b, a))
    assert not (dominates(a, b) and dominates(b, c)) or dominates(a, c)


def test_ties_by_hand() -> None:
    places = {"twin b": (2.0, 1.0), "twin a": (2.0, 1.0), "as fast, worse": (2.0, 0.5), "as good, slower": (1.0, 1.0)}
    assert non_dominated(places) == ["twin a", "twin b"]
    assert non_dominated({**places, "better": (1.0, 2.0)}) == ["twin a", "twin b", "better"]


SWEEPS = st.dictionaries(
    st.sampled_from(["ar", "a", "b", "c", "d", "e", "alone"]),
    st.tuples(
        st.integers(1, 5).map(float),
        st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=8, max_size=8),
    ),
    min_size=2,
)


@settings(max_examples=60, deadline=None)
@given(SWEEPS, st.randoms(use_true_random=False))
def test_the_order_of_points_and_requests_says_nothing(scores: Any, chance: random.Random) -> None:
    groups, points = sweep(scores)
    one = frontiers(groups, points, **OFTEN)
    chance.shuffle(points)
    assert frontiers(groups, points, **OFTEN) == one
    for each in one:
        assert set(each["frontier"]) <= set(each["non_dominated"]) and "alone" not in each["non_dominated"]
        assert bool(each["frontier"]) != bool(each["why_not"])


@settings(max_examples=60, deadline=None)
@given(SWEEPS)
def test_neighbours_on_a_frontier_differ_by_scipys_interval(scores: Any) -> None:
    """And what is passed over does not, from the member before it."""
    each = next((f for f in frontiers(*sweep(scores), **OFTEN) if f["speed"] == "latency_s"), None)
    if each is None or each["why_not"]:
        return

    def place(name: str) -> tuple[float, float | None]:
        return scores[name][0], mean(scores[name][1])

    def better(one: str, other: str) -> bool:
        pairs = [(x, y) for x, y in zip(scores[one][1], scores[other][1], strict=True) if None not in (x, y)]
        apart = [x - y for x, y in pairs]
        if len(apart) < FEW or len(set(apart)) == 1:
            return len(apart) >= FEW and apart[0] > 0
        known = scipy.stats.bootstrap(
            (apart,), np.mean, method="percentile", n_resamples=500, rng=np.random.default_rng(0)
        )
        return float(known.confidence_interval.low) > 1e-12

    last = [name for name in each["non_dominated"] if place(name) == place(each["frontier"][0])]
    assert each["frontier"][: len(last)] == last
    for name in each["non_dominated"][len(last) :]:
        step = [other for other in each["non_dominated"] if place(other) == place(name)]
        assert all(better(x, y) for x in step for y in last) == (name in each["frontier"]) or name in last
        last = step if name in each["frontier"] else last


def test_a_frontier_by_hand() -> None:
    noisy = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    scores = {
        "ar": (4.0, steady(0.9)),
        "fast": (1.0, steady(0.2)),
        "by chance": (2.0, [value * 0.5 for value in noisy]),  # better on average, and not by its interval
        "middle": (3.0, steady(0.6)),
        "dominated": (3.5, steady(0.5)),
        "alone": (0.5, steady(1.0)),  # a drafter alone takes no part
    }
    one = found(scores)
    assert one["non_dominated"] == ["fast", "by chance", "middle", "ar"] == found(scores, "tokens_s")["non_dominated"]
    assert one["frontier"] == ["fast", "middle", "ar"] and one["why_not"] == ""


def test_small_steps_add_up() -> None:
    """Each is compared with the last member, not with the point before it."""
    noise = [0.5, -0.5] * 8
    steps = {name: (2.0 + i, [0.1 * (i + 1) + x for x in noise]) for i, name in enumerate("bcd")}
    assert found({"a": (1.0, steady(0.0, 16)), **steps})["frontier"] == ["a", "d"]


def test_a_rounding_is_no_difference() -> None:
    assert found({"a": (1.0, steady(0.3)), "b": (2.0, steady(0.1 + 0.2))})["frontier"] == []


def test_points_of_one_place_go_together() -> None:
    even, odd = [0.0, 1.0] * 4, [1.0, 0.0] * 4
    twins = {"fast": (1.0, steady(0.1)), "one": (2.0, even), "two": (2.0, odd)}
    assert found(twins)["frontier"] == ["fast", "one", "two"]
    assert found({**twins, "slow": (3.0, [value + 0.2 for value in even])})["frontier"] == ["fast", "one", "two"]


def test_where_none_is_claimed_it_is_said_why() -> None:
    few = {"a": (1.0, steady(0.1, FEW - 1)), "ar": (2.0, steady(0.9, FEW - 1))}
    assert found(few)["why_not"] == f"fewer than {FEW} requests decide nothing" and found(few)["frontier"] == []
    assert found(few)["non_dominated"] == ["a", "ar"]
    assert found({"a": (1.0, steady(0.1, FEW)), "ar": (2.0, steady(0.9, FEW))})["frontier"] == ["a", "ar"]
    best = {"a": (1.0, steady(0.9)), "b": (2.0, steady(0.9)), "ar": (3.0, steady(0.2))}
    assert found(best)["why_not"] == "nothing is faster or better than a"
    chance = {"a": (1.0, [0.0, 1.0] * 4), "ar": (2.0, [1.0, 0.0] * 3 + [1.0, 1.0])}
    assert found(chance)["why_not"] == "no slower point is better than a with its interval"


def test_requests_without_a_score() -> None:
    """Only those that have both are paired; fewer than enough of them are no difference."""
    gaps: list[float | None] = [None, None, None, 0.9, 0.9, 0.9, 0.9, 0.9]
    assert found({"a": (1.0, steady(0.1)), "ar": (2.0, gaps)})["frontier"] == ["a", "ar"]
    assert found({"a": (1.0, steady(0.1)), "ar": (2.0, [*gaps[:3], None, *gaps[4:]])})["frontier"] == []
    assert frontiers(*sweep({"a": (1.0, [None] * 8), "ar": (2.0, [None] * 8)}), **OFTEN) == []
    assert frontiers(*sweep({"a": (1.0, [None] * 8), "ar": (2.0, steady(0.1))}), **OFTEN) == []


def test_every_quality_that_there_is() -> None:
    groups, points = sweep({name: (1.0 + i, steady(0.1 * i)) for i, name in enumerate(["a", "b", "c", "ar"])})
    logprobs = {"a": -2.0, "b": -1.0, "c": -0.8, "ar": -0.5}
    spent = {"a": 0.3, "b": 0.1, "c": None, "ar": None}  # c's rule says not what it spends
    for point in points:
        name = point["method"]
        point["logprob"] = summary(logprobs[name])
        point["agreement"] = summary(1.0 if name == "ar" else None if spent[name] is None else 1.0 - spent[name])
    for group in groups[CELL]:
        for name, line in group.items():
            line |= {"logprob": logprobs[name], "spent": spent[name]}
    by = {(each["quality"], each["speed"]): each for each in frontiers(groups, points, **OFTEN)}
    assert len(by) == 6
    for speed in ("latency_s", "tokens_s"):
        assert by["logprob", speed]["frontier"] == ["a", "b", "c", "ar"]
        assert by["agreement", speed]["frontier"] == ["a", "b", "ar"]


def excluded(scores: Scores, chance: float | None = 0.25) -> list[dict[str, Any]]:
    return exclusions(*sweep(scores), {"sim": chance}, **OFTEN)


def test_a_drafter_as_good_as_its_verifier_is_excluded() -> None:
    scores = [0.03, 0.91, 0.18, 0.77, 0.29, 0.65, 0.34, 0.83]
    near = {"ar": (2.0, scores), "alone a": (1.0, scores[::-1]), "alone b": (1.0, steady(0.1))}
    (one,) = excluded(near)
    assert (one["drafter"], one["drafter_score"], one["verifier_score"]) == ("alone a", *[pytest.approx(0.5)] * 2)
    assert one["difference"]["mean"] == pytest.approx(0) and one["difference"]["ci"][0] < 0 < one["difference"]["ci"][1]
    assert one["no_benefit"] and not one["below_chance"]
    apart = [a - b for a, b in zip(near["ar"][1], near["alone a"][1], strict=True)]
    known = scipy.stats.bootstrap((apart,), np.mean, method="percentile", n_resamples=500, rng=np.random.default_rng(0))
    assert one["difference"]["ci"] == pytest.approx(list(known.confidence_interval))


def test_a_verifier_that_is_better_by_chance_is_no_benefit() -> None:
    """The paper's "nearly the same" goes by the interval, not by which mean is larger."""
    (one,) = excluded({"ar": (2.0, [1.0, 0.0] * 3 + [1.0, 1.0]), "alone": (1.0, [0.0, 1.0] * 4)})
    assert one["difference"]["mean"] > 0 > one["difference"]["ci"][0] and one["no_benefit"]


def test_a_drafter_that_is_better_leaves_nothing_to_verify() -> None:
    (one,) = excluded({"ar": (2.0, steady(0.4)), "alone": (1.0, steady(0.9))})
    assert one["no_benefit"] and one["difference"]["mean"] == pytest.approx(-0.5)


def test_a_drafter_below_chance_is_excluded() -> None:
    (one,) = excluded({"ar": (2.0, steady(0.9)), "alone": (1.0, steady(0.2))})
    assert one["below_chance"] and not one["no_benefit"] and one["chance"] == 0.25
    (one,) = excluded({"ar": (2.0, steady(0.9)), "alone": (1.0, steady(0.25))})
    assert not one["below_chance"] and not one["no_benefit"]
    (one,) = excluded({"ar": (2.0, steady(0.9)), "alone": (1.0, steady(0.2))}, None)
    assert not one["below_chance"] and one["chance"] is None


def test_few_requests_exclude_nothing() -> None:
    (one,) = excluded({"ar": (2.0, steady(0.2, 4)), "alone": (1.0, steady(0.2, 4))})
    assert not one["no_benefit"] and not one["below_chance"]
    assert excluded({"ar": (2.0, [None] * 8), "alone": (1.0, [None] * 8)}) == []
    assert excluded({"ar": (2.0, [None, 0.1]), "alone": (1.0, [0.1, None])}) == []
    assert excluded({"ar": (2.0, steady(0.2)), "a": (1.0, steady(0.2))}) == []
