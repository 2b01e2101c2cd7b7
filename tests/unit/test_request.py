"""The one place that cuts a verified run: at a stop id, at the limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from foldspec.options import SamplingParams
from foldspec.records import Completion, Round
from foldspec.schedule.request import Request

CASES: list[dict[str, Any]] = json.loads((tiny.GOLDEN / "golden_methods.json").read_text())["stopping"]


def test_the_golden_cases_are_there() -> None:
    assert len(CASES) == 7 and {case["finish"] for case in CASES} == {"stop", "length", None}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['verified_run']} of {c['max_new']} -> {c['finish']}")
def test_golden_cuts(case: dict[str, Any]) -> None:
    stops = frozenset() if case["ignore_eos"] else frozenset(case["eos"])
    params = SamplingParams(max_tokens=case["max_new"], min_tokens=case["min_new"])
    request = Request(0, (5, 6), case["max_new"], stops, params, output=list(case["already"]))
    taken = request.commit(case["verified_run"])
    assert list(taken) == case["emitted"]
    assert request.output == case["already"] + case["emitted"]
    assert request.finish_reason == (case["finish"] or "") and request.done == bool(case["finish"])
    run = case["verified_run"]
    done = Completion((5, 6), tuple(request.output), rounds=[Round(3, tuple(run[:-1]), len(run) - 1, taken)])
    assert done.tau == case["count_for_tau"]


@given(
    prompt=st.integers(1, 9),
    runs=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=8),
    limit=st.integers(1, 20),
    stops=st.frozensets(st.integers(0, 6), max_size=2),
)
def test_any_way_of_cutting_a_stream_into_runs_emits_the_same(
    prompt: int, runs: list[list[int]], limit: int, stops: frozenset[int]
) -> None:
    """Up to and with the first stop id, or up to the limit, whichever comes first; on one token, the stop id wins."""
    request = Request(0, (1,) * prompt, limit, stops)
    taken: list[int] = []
    for run in runs:
        if request.done:
            break
        taken += request.commit(run)
        assert request.anchor_pos == prompt + len(request.output) - 1
        assert request.draft_budget == limit - len(request.output) - 1
    stream = [token for run in runs for token in run]
    cut = next((i + 1 for i, token in enumerate(stream) if token in stops), len(stream) + 1)
    assert request.output == taken == stream[: min(cut, limit)]
    if cut <= min(limit, len(stream)):
        assert request.finish_reason == "stop"
    elif limit <= len(stream):
        assert request.finish_reason == "length"
    else:
        assert request.finish_reason == ""
