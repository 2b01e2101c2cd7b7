"""A sweep's points from lines made by hand, every figure computed by hand; its quality; its table."""

from __future__ import annotations

from typing import Any

import pytest

from foldspec.bench import lines as stored
from foldspec.bench import pareto_report, sweep
from foldspec.bench.axes import Axes
from foldspec.bench.quality import Quality
from foldspec.bench.report import as_csv, as_table
from foldspec.errors import MeasurementError
from foldspec.tasks import TASKS, chance

HOW = {"resamples": 200, "seed": 0}
AXES = Axes("full", (4,), (("steps", 2),), "linear", (0.0, 0.5), 1.0)
AR, STRICT, LOOSE, ALONE = (point.label for point in AXES.points)
LOSSLESS = {AR: True, STRICT: True, LOOSE: False, ALONE: False}
ROW = {"draft_ms_measured": 10.0, "draft_ms": 12.0, "verify_ms": 28.0, "d": 0.4}  # of the model
MODELLED = [
    {"task": "t", "length": 8, "method": STRICT, **ROW, "leniency": [0.0], "tokens_a_round_modelled": 2.0},
    {"task": "t", "length": 8, "method": LOOSE, **ROW, "leniency": [0.5], "tokens_a_round_modelled": 3.0},
    {"task": "t", "length": 8, "method": ALONE, **ROW, "leniency": None, "tokens_a_round_modelled": 4.0},
]


def line(method: str, n_out: int, decode: float, rounds: int, **more: Any) -> dict[str, Any]:
    unused = {"draft_prefill_ms": 0.0 if method == AR else 50.0, "ttft_ms": 150.0}
    known = {"method": method, "n_out": n_out, "decode_ms": decode, "rounds": rounds, "spent": 0.0}
    return {**unused, **known, "score": 1.0, "logprob": -1.0, **more}


def groups() -> list[dict[str, dict[str, Any]]]:
    """Two requests: one of 11 tokens, one of 21."""
    return [
        {
            AR: line(AR, n, 40.0 * (n - 1), n - 1, score=1.0, logprob=-0.5),
            STRICT: line(STRICT, n, 20.0 * (n - 1), (n - 1) // 2, score=1.0, logprob=-1.5 * i),
            LOOSE: line(LOOSE, n, 10.0 * (n - 1), (n - 1) // 5, score=float(i), spent=0.1 + 0.2 * i),
            ALONE: line(ALONE, n, 35.0 * (n - 1), (n - 1) // 5, score=0.0, spent=None if i else 0.75),
        }
        for i, n in enumerate((11, 21))
    ]


def made() -> dict[str, dict[str, Any]]:
    found = sweep.points(AXES, {("t", 8): groups()}, MODELLED, LOSSLESS, **HOW)
    assert [point["method"] for point in found] == [AR, STRICT, LOOSE, ALONE]
    return {point["method"]: point for point in found}


def test_latency_and_throughput_have_the_prefill_in_them() -> None:
    points = made()
    # the first token after 150 ms, 10 or 20 more at 20 ms each
    assert points[STRICT]["latency_s"]["mean"] == pytest.approx((0.350 + 0.550) / 2)
    assert points[STRICT]["tokens_s"]["mean"] == pytest.approx(32 / 0.900)  # of both together, not a mean of rates
    low, high = points[STRICT]["latency_s"]["ci"]
    assert low == pytest.approx(0.350) and high == pytest.approx(0.550)
    low, high = points[STRICT]["tokens_s"]["ci"]
    assert low == pytest.approx(11 / 0.350) and high == pytest.approx(21 / 0.550)


def test_plain_decoding_does_not_pay_for_the_drafters_prefill() -> None:
    assert made()[AR]["latency_s"]["mean"] == pytest.approx((0.100 + 0.400 + 0.100 + 0.800) / 2)


def test_the_drafter_alone_is_not_charged_with_the_targets_pass() -> None:
    """2 and 4 rounds of 10 ms each, whatever its own runs took."""
    alone = made()[ALONE]
    assert alone["kind"] == "drafter" and alone["latency_s"]["mean"] == pytest.approx((0.170 + 0.190) / 2)
    assert alone["tokens_s"]["mean"] == pytest.approx(32 / 0.360)
    missing = sweep.points(AXES, {("t", 8): groups()}, [], LOSSLESS, **HOW)
    assert [point["kind"] for point in missing] == ["verifier", "point", "point"]  # no time of it is known


def test_quality_is_the_mean_of_the_requests_that_have_it() -> None:
    points = made()
    assert points[STRICT]["logprob"]["mean"] == -0.75 and points[LOOSE]["score"]["mean"] == 0.5
    assert points[LOOSE]["agreement"]["mean"] == pytest.approx(0.8) and points[AR]["agreement"]["mean"] == 1
    assert points[ALONE]["agreement"] == {"mean": 0.25, "ci": [0.25, 0.25]}
    bare = groups()
    for group in bare:
        for each in group.values():
            each |= {"score": None, "spent": None}
    found = sweep.points(AXES, {("t", 8): bare}, MODELLED, LOSSLESS, **HOW)
    assert all(point["score"] is None and point["agreement"] is None for point in found)


def test_the_model_stands_beside_what_was_measured() -> None:
    points = made()
    # Eq. 6: 1 - lambda d; of the drafter alone lambda is 1
    agreements = [points[label]["agreement_modelled"] for label in (AR, STRICT, LOOSE, ALONE)]
    assert agreements == [None, 1.0, pytest.approx(0.8), pytest.approx(0.6)]
    # Eq. 7: 2 and 3 tokens in 12 + 28 ms, 4 in 12 ms; 30 tokens after the first of two requests, 300 ms before those
    speeds = [points[label]["tokens_s_modelled"] for label in (STRICT, LOOSE, ALONE)]
    assert speeds == [pytest.approx(32 / (0.300 + 30 * ms / 1e3)) for ms in (20, 40 / 3, 3)]
    assert points[AR]["tokens_s_modelled"] is None
    other = [{**row, "leniency": None} for row in MODELLED]  # a rule that Eq. 6 says nothing of
    found = sweep.points(AXES, {("t", 8): groups()}, other, LOSSLESS, **HOW)
    assert [point["agreement_modelled"] for point in found] == [None, None, None, pytest.approx(0.6)]


def test_a_point_whose_parity_is_red_is_on_no_frontier() -> None:
    cells = {("t", 8): [group for _ in range(4) for group in groups()]}
    chances = {"t": 0.0}
    for red in ((), (STRICT,)):
        found = sweep.pareto(AXES, cells, MODELLED, LOSSLESS, chances, red, **HOW)
        fronts = found["frontiers"]
        assert any(STRICT in front["non_dominated"] for front in fronts) is not bool(red)
        assert [point["method"] for point in found["points"] if point["parity_red"]] == list(red)
        place = [name for name, _ in pareto_report.columns(found)].index("front")
        row = next(point for point in found["points"] if point["method"] == STRICT)
        assert (pareto_report.columns(found)[place][1](row) == "PARITY RED") is bool(red)


class Text:
    def __init__(self) -> None:
        self.scored: list[tuple[int, ...]] = []

    def score(self, tokens: tuple[int, ...]) -> Any:
        self.scored.append(tokens)
        return type("TextScore", (), {"logprobs": tuple(-float(token) for token in tokens)})


def test_each_text_is_scored_once_and_what_is_spent_is_of_the_methods_own_run() -> None:
    def run(*tokens: int) -> Any:
        return type("Run", (), {"token_ids": tokens})

    def judged(*spent: float | None) -> dict[str, Any]:
        return {"rounds": [{"spent": list(spent)}, {"spent": []}, {"spent": [0.5]}]}

    prefix = Text()
    quality = Quality({STRICT: "drafting, K 2", LOOSE: LOOSE, ALONE: ALONE})
    runs = {
        AR: run(1, 2),
        "ar again": run(1, 2),
        STRICT: run(1, 2),
        LOOSE: run(
            4,
        ),
        ALONE: run(1, 5),
    }
    calibration = {"drafting, K 2": judged(0.0), LOOSE: judged(0.1, 0.3), ALONE: {"rounds": [{"spent": [None]}]}}
    found = quality.request(prefix, runs, calibration)
    assert sorted(prefix.scored) == [(1, 2), (1, 5), (4,)]
    assert [found[label]["logprob"] for label in (AR, STRICT, LOOSE, ALONE)] == [-1.5, -1.5, -4.0, -3.0]
    assert found[AR]["spent"] == found["ar again"]["spent"] == 0.0 and found[STRICT]["spent"] == 0.25
    assert found[LOOSE]["spent"] == pytest.approx(0.3) and found[ALONE]["spent"] is None
    assert quality.request(prefix, runs, None)[LOOSE]["spent"] is None  # there was no room for those runs


def test_a_stored_line_may_have_them_and_then_they_are_checked() -> None:
    head = {"task": "t", "length": 8, "id": "0", "method": AR, "order": 0, "input_sha256": "x", "n_in": 8}
    body: dict[str, Any] = {"finish": "length", "n_out": 2, "rounds": 1, "commits": [1], "ttft_ms": 1.0}
    body |= {"draft_prefill_ms": 0.0, "decode_ms": 5.0, "tpot_ms": 5.0, "output_ids_sha256": "y", "gap": None}
    body |= {"clock_disturbed": False, "first_diff": None, "score": None, "bytes_a_round": 1, "parts_ms": None}
    plain = head | body | {"calibration": None}
    stored.check_line(plain, "here")
    assert "logprob" not in plain and "spent" not in plain  # a plain bench's line stays what it is
    stored.check_line(plain | {"logprob": -3.5, "spent": 0.2}, "here")
    stored.check_line(plain | {"logprob": None, "spent": None}, "here")
    for wrong in ({"logprob": "x"}, {"logprob": float("nan")}, {"spent": 1.5}, {"spent": -0.1}):
        with pytest.raises(MeasurementError, match=f"{next(iter(wrong))} is"):
            stored.check_line(plain | wrong, "here")


def pareto(**more: Any) -> dict[str, Any]:
    many = [group for i in range(3) for group in groups()]
    whole = sweep.pareto(AXES, {("t", 8): many}, MODELLED, LOSSLESS, {"t": 0.25}, **HOW)
    return whole | more


def test_the_table_marks_frontiers_and_says_them_in_words() -> None:
    result = pareto()
    text = as_table(pareto_report.columns(result), result["points"], "table")
    head, ar, strict, loose, alone = text.splitlines()
    assert head.split()[:5] == ["task", "length", "drafts", "effort", "leniency"]
    assert "verifier alone" in ar and ar.endswith("- / LT / -")
    assert "0 (lossless)" in strict and strict.endswith("LT / lt / LT")  # by log-prob not beyond chance
    assert "  0.5  " in loose and loose.endswith("LT / LT / LT")
    assert "drafter alone" in alone and alone.endswith("82.1")  # on no frontier
    assert "0.18 [0.17, 0.19]" in alone
    said = pareto_report.pareto_remarks(result, 1.0)
    (score,) = (one for one in said if one.startswith("t 8, score by latency"))
    assert "frontier, fastest first: K 2, leniency 0.5; K 2, leniency 0" in score
    (excluded,) = (one for one in said if "exclusions" in one)
    assert "verifier 1.00, best drafter alone (K 2) 0.00, difference 1.00 [1.00, 1.00], chance 0.25" in excluded
    assert excluded.endswith("BELOW CHANCE (the drafter is worse than guessing)")
    assert any(one.startswith("lossless: verifier alone; K 2, leniency 0; the others are LOSSY") for one in said)
    assert any("its times are derived" in one for one in said)
    assert not any("temperature 0" in one for one in said)
    assert any("temperature 0" in one for one in pareto_report.pareto_remarks(result, 0.0))
    assert pareto_report.pareto_remarks(pareto(points=[], frontiers=[], exclusions=[]), 1.0) == []


def test_the_file_of_commas_has_every_number() -> None:
    head, *rows = as_csv(pareto_report.flat(pareto())).splitlines()
    names = head.split(",")
    assert {"score_mean", "latency_s_ci_low", "tokens_s_ci_high", "agreement_modelled", "front"} <= set(names)
    assert len(rows) == 4 and dict(zip(names, rows[2].split(","), strict=True))["leniency"] == "0.5"


def test_the_chance_of_a_guess() -> None:
    chances = {name: chance(name) for name in (*TASKS, "random")}
    assert {name for name, value in chances.items() if value} == {
        "mcq_synthetic",
        "gpqa_diamond",
        "longbench_v2",
        "en_mc",
    }
    assert {value for value in chances.values() if value} == {0.25}
    assert chances["kv"] == chances["gsm8k"] == 0 and chances["docs"] is chances["random"] is None
