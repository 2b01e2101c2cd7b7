"""Acceptance that is forced: how many drafts stand, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from foldspec.acceptance import RULES, make_rule
from foldspec.errors import UsageError
from foldspec.forcing import Forcing, parse, published
from foldspec.noise import Noise
from foldspec.options import MethodOptions, SamplingParams
from foldspec.records import PointMass
from foldspec.sampling import target_laws

DRAFTS = 15


class Text:
    """A request whose anchor stands at ``position - 1``."""

    id, stop_ids, params = 0, frozenset[int](), SamplingParams()

    def __init__(self, position: int) -> None:
        self.prompt, self.output = (0,) * (position - 1), [0]


def verdict(rule: Any, position: int, seed: int = 0, drafts: int = DRAFTS) -> Any:
    """Row ``i`` of the target says ``i``, and no draft is what it says."""
    proposal = PointMass((99,) * drafts)
    (target,) = target_laws(torch.eye(drafts + 1, 100), [Text(position)], [proposal])
    return rule.judge(target, proposal, Noise(seed))


def walk(rule: Any, start: int, rounds: int, seed: int = 0) -> list[int]:
    """Tokens that each of some rounds commits."""
    position, commits = start, []
    for _ in range(rounds):
        commits.append(verdict(rule, position, seed).accepted + 1)
        position += commits[-1]
    return commits


def test_it_has_no_name_and_is_not_lossless() -> None:
    rule = make_rule("exact", Forcing(count=3))
    assert not rule.lossless and rule.law().startswith("none") and "forced" not in RULES
    assert make_rule("exact").lossless


def test_a_count() -> None:
    rule = make_rule("exact", parse("3"))
    assert [verdict(rule, p).accepted for p in range(1, 40)] == [3] * 39
    assert verdict(rule, 5).next_token == 3  # the target's own, of the row behind the drafts that stand
    assert verdict(rule, 5, drafts=2).accepted == 2 and verdict(rule, 5, drafts=0).accepted == 0
    assert walk(make_rule("exact", parse("0")), 1, 5) == [1] * 5


@pytest.mark.parametrize("mean", [1, 1.37, 2, 3.4, 7.999, 16])
@pytest.mark.parametrize(("start", "seed"), [(2, 0), (513, 1), (131_072, 2)])
def test_a_mean_comes_out(mean: float, start: int, seed: int) -> None:
    first, *commits = walk(make_rule("exact", parse(f"tau={mean}")), start, 201, seed)
    assert set(commits) <= {math.floor(mean), math.ceil(mean)} and 1 <= first <= math.ceil(mean)
    assert abs(sum(commits) - 200 * mean) < 1


def test_a_mean_has_a_phase_of_its_seed() -> None:
    rule = make_rule("exact", parse("tau=3.4"))
    assert len({tuple(walk(rule, 100, 12, seed)) for seed in range(8)}) > 2
    assert walk(rule, 100, 12, 5) == walk(rule, 100, 12, 5)


def test_probabilities() -> None:
    chances, trials = (0.9, 0.5, 0.2), 4000
    rule = make_rule("exact", parse("0.9,0.5,0.2"))
    counts = [verdict(rule, 1 + 20 * i, seed=i % 7).accepted for i in range(trials)]
    for i in range(5):  # the last one serves all later drafts
        there = [count for count in counts if count >= i]
        share = sum(count > i for count in there) / len(there)
        chance = chances[min(i, 2)]
        assert abs(share - chance) < 4.5 * (chance * (1 - chance) / len(there)) ** 0.5, (i, share)
    assert {verdict(make_rule("exact", parse("1.0")), p).accepted for p in range(1, 9)} == {DRAFTS}
    assert {verdict(make_rule("exact", parse("0.0")), p).accepted for p in range(1, 9)} == {0}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "says no law"),
        ("many", "give a count"),
        ("-1", "from 0 to 1"),
        ("99999", "from 0 to 1"),
        ("0.5,1.5", "from 0 to 1"),
        ("0.5,nan", "from 0 to 1"),
        ("tau=0.9", "at least 1"),
        ("tau=nan", "at least 1"),
        ("tau=1e9", "at most 1000"),
        ("tau=x", "says no law"),
    ],
)
def test_what_says_nothing_is_refused(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        MethodOptions(force_accept=spec)


def test_it_comes_in_place_of_a_rule() -> None:
    with pytest.raises(UsageError, match="in place of a rule"):
        MethodOptions(force_accept="3", accept="match")


def test_what_a_paper_says() -> None:
    assert parse("paper") is None
    assert published("llama-3.1-8b-dflash", "fold") == Forcing(mean=3.77)
    with pytest.raises(UsageError, match=r"no tau of llama-3.1-8b-dflash under window; give one, .* has full, fold"):
        published("llama-3.1-8b-dflash", "window")
    with pytest.raises(UsageError, match="no tau of this pair under fold"):
        published(None, "fold")


def test_drafts_that_it_takes() -> None:
    least = {"3": 3, "tau=1": 0, "tau=3": 2, "tau=3.4": 3, "0.9,0.8": 0}
    assert {spec: parse(spec).least_drafts for spec in least} == least  # type: ignore[union-attr]
