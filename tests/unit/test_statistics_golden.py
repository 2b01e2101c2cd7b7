"""The bench's statistics against numbers made outside foldspec: tau, TPOT, speedup, interval, the rule of length."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny

from foldspec.bench import metrics, summary
from foldspec.bench.bootstrap import counts
from foldspec.bench.offline import leading, tau_fs
from foldspec.tasks.published import longest_prompt

GOLDEN: dict[str, Any] = json.loads((tiny.GOLDEN / "golden_methods.json").read_text())["statistics"]


def cell() -> list[dict[str, dict[str, Any]]]:
    """The golden requests as a bench keeps them: rounds of one token, and what is left in the last."""

    def line(tokens: int, rounds: int, seconds: float) -> dict[str, Any]:
        commits = [1] * (rounds - 1) + [tokens - rounds]
        common = {"first_diff": None, "gap": None, "score": None, "second_opinion": None, "parts_ms": None}
        times = {"ttft_ms": 1.0, "draft_prefill_ms": 0.0, "decode_ms": 1e3 * seconds, "bytes_a_round": 1}
        tpot = metrics.tpot(0, 1e3 * seconds, tokens)
        told = {"order": 0, "n_in": 9, "n_out": tokens, "rounds": rounds, "commits": commits, "tpot_ms": tpot}
        return common | times | told | {"output_ids_sha256": ""}

    return [
        {"ar": line(each["tokens"], each["tokens"] - 1, each["ar_s"])}
        | {"fold": line(each["tokens"], each["rounds"], each["method_s"])}
        for each in GOLDEN["requests"]
    ]


def test_the_figures_of_a_row() -> None:
    groups = cell()
    (_, row) = summary.rows({("docs", 512): groups}, ["ar", "fold"], resamples=2000, seed=0, bandwidth=None)
    assert [metrics.tau(group["fold"]["commits"]) for group in groups] == pytest.approx(GOLDEN["tau"], rel=1e-9)
    for name, arm in (("tpot_method", "fold"), ("tpot_ar", "ar")):
        assert [group[arm]["tpot_ms"] / 1e3 for group in groups] == pytest.approx(GOLDEN[name], rel=1e-9)
    assert summary.speedups(groups, "fold") == pytest.approx(GOLDEN["speedup"], rel=1e-9)
    assert row["tau_mean"] == pytest.approx(GOLDEN["mean_tau"], rel=1e-9)
    assert row["tau_pooled"] == pytest.approx(GOLDEN["overall_tau"], rel=1e-9)
    assert row["speedup_mean"] == pytest.approx(GOLDEN["mean_speedup"], rel=1e-9)
    assert row["speedup_mean"] != pytest.approx(GOLDEN["ratio_of_total_time"], rel=0.1)
    assert row["speedup_ci"] == pytest.approx([GOLDEN["bootstrap"]["lo"], GOLDEN["bootstrap"]["hi"]], rel=1e-9)


def test_the_first_resample() -> None:
    drawn = GOLDEN["bootstrap"]["first_row"]
    assert counts(6)[0].tolist() == [drawn.count(i) for i in range(6)]


def test_each_task_weighs_the_same() -> None:
    golden = GOLDEN["equal_weight"]
    lines = {
        (task, 512): [
            {arm: {"commits": [1], "tpot_ms": tpot} for arm, tpot in (("ar", value), ("fold", 1.0))} for value in values
        ]
        for task, values in golden["tasks"].items()
    }
    (_, row) = summary.averages(lines, ["ar", "fold"], resamples=200, seed=0)
    assert row["speedup_mean"] == pytest.approx(golden["equal_weight_mean"], rel=1e-9)
    every = [value for values in golden["tasks"].values() for value in values]
    assert metrics.mean(every) == pytest.approx(golden["pooled_mean"], rel=1e-9) != row["speedup_mean"]


@pytest.mark.parametrize("case", GOLDEN["required_context"], ids=lambda case: str(case["input"]))
def test_the_context_that_a_prompt_needs(case: dict[str, int]) -> None:
    """It fits a context of what is required, and no smaller one."""
    assert longest_prompt(case["required"], case["limit"]) >= case["input"]
    assert longest_prompt(case["required"] - 1, case["limit"]) < case["input"]


@pytest.mark.parametrize("case", GOLDEN["match_prefix"], ids=lambda case: str(case["draft"]))
def test_leading_drafts(case: dict[str, Any]) -> None:
    found = leading(case["draft"], case["target"])
    assert tau_fs([found]) == case["tau_fs"]
    assert found / len(case["draft"]) == pytest.approx(case["accept_fraction"])
