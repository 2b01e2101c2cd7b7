"""The model's parameters from calibrating runs whose truth is known: what was put in comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foldspec.bench import throughput
from foldspec.bench.modelled import Plan, calibration

B, A, STEP, TARGET, OTHER = 6, 2.0, 3.5, 20.0, 1.5  # milliseconds
D = {1: 0.5, 2: 0.4, 4: 0.25}
HOW = {"resamples": 200, "seed": 0}


def rounds(random: Any, d: float, leniency: float, count: int, steps: int, **more: Any) -> list[dict[str, Any]]:
    """Drafts that stand independently of one another; d scatters around its mean, alpha follows by Eq. 6. The last
    round is near the limit and could draft two tokens only."""
    found = []
    for i in range(count + 1):
        whole = i < count
        tv, accepted, drafted = [], 0, B if whole else 2
        for _ in range(drafted):
            tv.append(float(np.clip(d + 0.2 * (random.random() - 0.5), 0, 1)))
            if not random.random() < throughput.accept_rate(tv[-1], leniency):
                break
            accepted += 1
        found.append(
            {
                "whole": whole,
                "drafted": drafted,
                "accepted": accepted,
                "steps": steps,
                "tv": tv,
                "chance": [throughput.accept_rate(x, leniency) for x in tv],
                "spent": [leniency * x for x in tv],
            }
            | more
        )
    return found


def times(random: Any, steps: float, count: int) -> list[list[float]]:
    """The median is exact; every third round is disturbed."""
    return [[A + STEP * steps, TARGET, OTHER + 50.0 * (i % 3 == 2)] for i in range(count)]


def at_lambda_0(random: Any, steps: int, count: int = 40) -> dict[str, Any]:
    return {"rounds": rounds(random, D[steps], 0.0, count, steps), "ms": times(random, steps, count)}


def line(own: list[dict[str, Any]], ms_a_round: float) -> dict[str, Any]:
    commits = [each["accepted"] + 1 for each in own]
    return {"commits": commits, "n_out": 1 + sum(commits), "decode_ms": ms_a_round * len(commits)}


SWEEP = {f"K{k} {share}": (k, share) for k in D for share in (0.0, 0.4, 1.0)}


def plan(label: str, steps: int, **changes: Any) -> Plan:
    share = SWEEP.get(label, (0, 0.0))[1]
    own = f"run {steps}" if share == 0 else label
    costs = tuple(f"run {k}" for k in D)
    known = {"drafting": "full", "profile": f"run {steps}", "costs": costs, "own": own, "leniency": (share,), "most": B}
    return Plan(label=label, **{**known, **changes})


def measured(requests: int = 12) -> dict[tuple[str, int], list[dict[str, Any]]]:
    random = np.random.default_rng(5)
    groups = []
    for _ in range(requests):
        kept = {f"run {k}": at_lambda_0(random, k) for k in D}
        group: dict[str, Any] = {"ar": {"calibration": kept}}
        for label, (k, share) in SWEEP.items():
            own = kept[f"run {k}"]["rounds"] if share == 0 else rounds(random, D[k], share, 40, k)
            kept[label] = {"rounds": own}
            group[label] = line(own, A + STEP * k + TARGET + OTHER)
        groups.append(group)
    return {("docs", 512): groups}


@pytest.fixture(scope="module")
def result() -> dict[str, list[dict[str, Any]]]:
    return calibration(measured(), [plan(label, k) for label, (k, _) in SWEEP.items()], **HOW)


def test_times_come_back_exactly(result: dict[str, list[dict[str, Any]]]) -> None:
    for row in result["methods"]:
        assert row["a_ms"] == pytest.approx(A) and row["b_ms"] == pytest.approx(STEP) and row["b_fitted"]
        assert row["verify_ms"] == TARGET + OTHER and row["draft_ms"] == pytest.approx(row["draft_ms_measured"])
        assert row["drafts"] == B and row["steps"] == SWEEP[row["method"]][0] and row["n"] == 12


def test_d_is_that_of_all_judged_drafts_and_falls_with_k(result: dict[str, list[dict[str, Any]]]) -> None:
    first, *more = result["profiles"]
    assert [row["run"] for row in result["profiles"]] == ["run 1", "run 2", "run 4"]
    assert first["d_change"] is None and first["d_change_ci"] is None
    for row in result["profiles"]:
        low, high = row["d_ci"]
        assert low < row["d"] < high and abs(row["d"] - D[row["steps"]]) < 0.01 and high - low < 0.02
        assert row["accept_by_tv"] == 1 - row["d"] and row["judged"] > 700
        assert row["accept_by_counts"] == pytest.approx(row["accept_by_tv"], abs=0.05)
        assert row["accept_by_counts"] != row["accept_by_tv"]
    for row in more:
        assert row["d_change"] == pytest.approx(row["d"] - first["d"]) and row["d_change_ci"][1] < 0


def test_where_its_assumptions_hold_the_model_meets_what_was_measured(result: dict[str, list[dict[str, Any]]]) -> None:
    for row in result["methods"]:
        k, share = SWEEP[row["method"]]
        assert row["mu"] == pytest.approx(1 - (1 - share) * row["d"]) and row["mu_from"] == "eq6"
        assert row["tokens_a_round_modelled"] == pytest.approx(throughput.tokens_a_round(row["mu"], B))
        assert row["tokens_a_whole_round"] == pytest.approx(row["tokens_a_round_modelled"], rel=0.08)
        assert row["tokens_a_round_measured"] < row["tokens_a_whole_round"] + 1e-9  # the cut rounds are in it
        assert row["tokens_s_modelled"] == pytest.approx(
            1e3 * row["tokens_a_round_modelled"] / (A + STEP * k + TARGET + OTHER)
        )
        assert row["tokens_s_measured"] == pytest.approx(row["tokens_s_modelled"], rel=0.1)
        assert row["spent"] == pytest.approx(share * row["own_d"])
        assert share == 0 or row["spent_ci"][0] < row["spent"] < row["spent_ci"][1]
    assert all(row["tokens_a_whole_round"] == B + 1 for row in result["methods"] if row["leniency"] == [1.0])


def first_row(cells: Any, of: Plan) -> dict[str, Any]:
    (row,) = calibration(cells, [of], **HOW)["methods"]
    return row


def test_with_one_k_b_is_not_measured_and_said_so() -> None:
    row = first_row(measured(3), plan("K2 0.4", 2, costs=("run 2",)))
    assert not row["b_fitted"] and row["b_ms"] == 0 and row["a_ms"] == row["draft_ms"] == A + 2 * STEP


def test_one_lambda_a_draft() -> None:
    row = first_row(measured(3), plan("K2 0.4", 2, leniency=(0.0, 0.5, 1.0)))
    rates = [1 - row["d"], 1 - 0.5 * row["d"], *[1.0] * 4]
    assert row["tokens_a_round_modelled"] == pytest.approx(throughput.tokens_by_position(rates))
    assert row["mu"] == pytest.approx(sum(rates) / B)


def test_another_rule_is_modelled_by_its_own_chances_or_else_its_counts() -> None:
    cells = measured(3)
    row = first_row(cells, plan("K2 0.4", 2, leniency=None))
    assert row["mu_from"] == "chance" and row["mu"] == pytest.approx(1 - 0.6 * row["own_d"]) and row["leniency"] is None
    for group in cells["docs", 512]:
        for each in group["ar"]["calibration"]["K2 0.4"]["rounds"]:
            each |= {"chance": [None] * len(each["tv"]), "spent": [None] * len(each["tv"])}
    row = first_row(cells, plan("K2 0.4", 2, leniency=None))
    assert row["mu_from"] == "counts" and row["mu"] == row["mu_by_counts"] and row["spent"] is row["spent_ci"] is None


def test_where_a_threshold_decides_k_is_the_mean_of_the_passes_and_the_cost_that_of_the_fit() -> None:
    cells, random = measured(3), np.random.default_rng(1)
    for group in cells["docs", 512]:
        both = [rounds(random, 0.3, 0.0, 20, k) for k in (1, 4)]
        group["ar"]["calibration"]["adaptive"] = {
            "rounds": both[0] + both[1],
            "ms": [[9.0, TARGET, OTHER] for _ in range(40)],
        }
    row = first_row(cells, plan("K2 0.4", 2, profile="adaptive"))
    assert row["steps"] == 2.5 and row["draft_ms"] == pytest.approx(A + 2.5 * STEP) and row["draft_ms_measured"] == 9.0


def test_rounds_that_draft_less_are_modelled_as_they_are() -> None:
    cells = measured(3)
    for group in cells["docs", 512]:
        for i, each in enumerate(group["ar"]["calibration"]["run 2"]["rounds"]):
            if each["whole"]:
                each["drafted"] = i % 3
    row = first_row(cells, plan("K2 0.0", 2))
    per_round = [throughput.tokens_a_round(row["mu"], i % 3) for i in range(40)]
    assert row["tokens_a_round_modelled"] == pytest.approx(sum(per_round) / 40)


def test_a_request_without_all_runs_is_left_out() -> None:
    cells = measured(4)
    groups = cells["docs", 512]
    del groups[0]["ar"]["calibration"]["run 1"]
    groups[1]["ar"]["calibration"] = None
    assert first_row(cells, plan("K2 0.4", 2))["n"] == 2
    for group in groups:
        group["ar"]["calibration"] = None
    assert calibration(cells, [plan("K2 0.4", 2)], **HOW) == {"profiles": [], "methods": []}


def test_drafts_that_were_never_judged_give_no_figure() -> None:
    cells = measured(2)
    for group in cells["docs", 512]:
        for run in group["ar"]["calibration"].values():
            for each in run["rounds"]:
                each |= {"drafted": 0, "accepted": 0, "tv": [], "chance": [], "spent": []}
    row = first_row(cells, plan("K2 0.4", 2))
    assert row["d"] is row["mu"] is row["tokens_s_modelled"] is row["spent"] is None


def test_where_no_token_of_the_targets_follows_a_block_a_round_has_one_less() -> None:
    row = first_row(measured(), plan("K2 1.0", 2, followed=False))
    assert row["tokens_a_round_modelled"] == pytest.approx(B) and row["tokens_a_whole_round"] == B
