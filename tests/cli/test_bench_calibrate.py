"""``foldspec bench --calibrate`` as a user runs it, on a tiny pair: the model's figures, by hand from what was kept."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli.command import PAIR, Result, main, pair_words, refused
from masked import write_masked_llama

from foldspec.acceptance.exact import Exact
from foldspec.bench.schema import check
from foldspec.bench.throughput import rate_from_counts, tokens_a_round
from foldspec.drafters.dflash import DFlash
from foldspec.models.llama import Llama

DRAWN = "full:draft_temperature=1"
METHODS = (DRAWN, f"{DRAWN}:accept=linear:leniency=0.4", f"{DRAWN}:accept=linear:leniency=1", "lookup")
METHODS += (f"{DRAWN}:accept=cactus:leniency=0.2", f"{DRAWN}:accept=match")
SMALL = ("--tasks", "random", "--lengths", "32", "--limit", 2, "--max-new", 20, "--threads", 1, "--ignore-eos")
SMALL += ("--warmup", 0, "--bootstrap", 200, "--quiet")
DRAFTS = 5  # of this pair


@pytest.fixture(scope="module", autouse=True)
def quick_and_a_busy_machine_is_no_matter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foldspec.bench.guards.clock_disturbed", lambda run: False)
        patch.setattr("foldspec.bench.session.read_bandwidth", lambda device: 10.0)
        patch.setattr("gc.collect", lambda: 0)  # these two take longer than all else
        yield


def bench(methods: Sequence[str], *more: object) -> Result:
    return main("bench", *pair_words(), *SMALL, "--methods", ",".join(methods), "--calibrate", *more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("bench") / "out"
    done = bench(METHODS, "--temperature", 1, "--format", "json", "--out", out)
    assert done.code == 0, done
    check(done.json)
    return done.json, out


def kept(out: Path) -> list[dict[str, Any]]:
    """The calibrating runs of each request."""
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    for line in lines:
        check(line, "request")
        assert (line["calibration"] is not None) == (line["method"] == "ar")
    return [line["calibration"] for line in lines if line["calibration"]]


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in report["calibration"]["methods"]}


def test_a_drafter_of_one_step_has_one_k_and_no_b(whole: tuple[dict[str, Any], Path]) -> None:
    report, _ = whole
    assert report["settings"]["temperature"] == 1 and report["settings"]["calibrate"]
    profiles = {row["run"]: row for row in report["calibration"]["profiles"]}
    assert set(profiles) == {f"{DRAWN}, K 1", "lookup, K 1"} and set(rows(report)) == set(METHODS)
    for method, row in rows(report).items():
        assert row["steps"] == 1 and row["b_ms"] == 0 and not row["b_fitted"] and row["n"] == 2
        assert row["a_ms"] == row["draft_ms"] == row["draft_ms_measured"] > 0 and row["verify_ms"] > 0
        assert row["lossless"] == report["methods"][method]["lossless"]
        assert method == "lookup" or row["drafts"] == DRAFTS


def test_d_and_both_estimates_are_those_of_what_was_kept(whole: tuple[dict[str, Any], Path]) -> None:
    report, out = whole
    (profile,) = (row for row in report["calibration"]["profiles"] if row["run"] == f"{DRAWN}, K 1")
    judged = [each for request in kept(out) for each in request[f"{DRAWN}, K 1"]["rounds"]]
    tv = [x for each in judged for x in each["tv"]]
    assert profile["judged"] == len(tv) and profile["d"] == pytest.approx(sum(tv) / len(tv)) and 0 < profile["d"] < 1
    assert profile["accept_by_tv"] == 1 - profile["d"]
    counts = [(each["accepted"], each["drafted"]) for each in judged]
    assert profile["accept_by_counts"] == rate_from_counts(counts)
    for each in judged:  # accepted ones and the first that fell, of those that were not cut
        assert len(each["tv"]) == min(each["accepted"] + 1, each["drafted"]) and each["drafted"] <= DRAFTS
        assert each["whole"] == (each["drafted"] == DRAFTS)
    assert 0 < sum(not each["whole"] for each in judged) < len(judged)


def test_eq_6_and_7_for_linear(whole: tuple[dict[str, Any], Path]) -> None:
    report, out = whole
    found = rows(report)
    for method, share in zip(METHODS[:3], (0.0, 0.4, 1.0), strict=True):
        row = found[method]
        assert row["leniency"] == [share] and row["profile"] == f"{DRAWN}, K 1" and row["mu_from"] == "eq6"
        assert row["mu"] == pytest.approx(1 - (1 - share) * row["d"]) and row["d"] == found[DRAWN]["d"]
        tokens = tokens_a_round(row["mu"], DRAFTS)
        assert row["tokens_a_round_modelled"] == pytest.approx(tokens)
        assert row["tokens_s_modelled"] == pytest.approx(1e3 * tokens / (row["draft_ms"] + row["verify_ms"]))
        assert row["spent"] == pytest.approx(share * row["own_d"], abs=1e-9)
        (measured,) = (each for each in report["summary"] if each["method"] == method)
        assert row["tokens_a_round_measured"] == measured["tau_pooled"]
    every = found[METHODS[2]]
    assert every["mu"] == every["mu_by_counts"] == 1 and every["tokens_a_whole_round"] == DRAFTS + 1
    seconds = sum(
        json.loads(line)["decode_ms"] / 1e3
        for line in (out / "requests.jsonl").read_text().splitlines()
        if json.loads(line)["method"] == METHODS[2]
    )
    assert every["tokens_s_measured"] == pytest.approx(2 * 19 / seconds)


def test_other_rules_by_their_own_chances_or_counts(whole: tuple[dict[str, Any], Path]) -> None:
    found = rows(whole[0])
    cactus, match = found[METHODS[4]], found[METHODS[5]]
    assert cactus["mu_from"] == "chance" and 1 > cactus["mu"] > found[DRAWN]["mu"] and cactus["spent"] > 0
    assert match["mu_from"] == "counts" and match["mu"] == match["mu_by_counts"] and match["spent"] == 0
    assert cactus["leniency"] is match["leniency"] is None


def test_no_other_figure_uses_these_runs_and_texts_that_are_drawn_are_not_compared(
    whole: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    report, out = whole
    some = (DRAWN, METHODS[5])
    plain = main(
        "bench", *pair_words(), *SMALL, "--methods", ",".join(some), "--temperature", 1, "--out", tmp_path / "x"
    )
    assert plain.code == 0 and "DIFFER FROM PLAIN" not in plain.out and "d_K" not in plain.out
    lines = [json.loads(line) for line in (tmp_path / "x" / "requests.jsonl").read_text().splitlines()]
    assert all(line["calibration"] is None for line in lines)
    before = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    outputs = {(x["id"], x["method"]): x["output_ids_sha256"] for x in before}
    assert len(lines) == 8 and all(x["output_ids_sha256"] == outputs[x["id"], x["method"]] for x in lines)
    assert all(row["diff_from_ar"] is None for row in report["summary"])
    # the rule match writes what plain decoding writes, the others what their own coins say
    ids = {x["method"]: x["output_ids_sha256"] for x in lines if x["id"] == "0"}
    assert ids["ar"] == ids["ar again"] == ids[METHODS[5]] != ids[DRAWN]


def test_the_tables_and_resume(whole: tuple[dict[str, Any], Path]) -> None:
    report, out = whole
    before = (out / "requests.jsonl").read_bytes()
    for form in ("table", "md"):
        done = bench(METHODS, "--temperature", 1, "--out", out, "--resume", "--format", form)
        assert done.code == 0, done
        for words in ("the drafters, at lambda 0", "the throughput model beside what was measured", "(b = 0: one K)"):
            assert words in done.out, words
        assert f"{METHODS[1]} (lossy)" in done.out and "(own)" in done.out and "(counts)" in done.out
        assert "d_K: mean total variation" in done.out and "temperature 0:" not in done.out
    assert (out / "requests.jsonl").read_bytes() == before
    done = bench(METHODS, "--temperature", 1, "--out", out, "--resume", "--format", "json")
    assert done.json["calibration"] == report["calibration"] and done.json["resumed"] == 2
    done = bench(METHODS, "--temperature", 1, "--out", out, "--resume", "--format", "csv")
    assert len(list(csv.DictReader(io.StringIO(done.out)))) == len(METHODS) + 2
    refused(bench(METHODS, "--temperature", 0.5, "--out", out, "--resume"), 2, "temperature was 1.0, is 0.5")


def test_a_line_that_was_edited_is_refused(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, out = whole
    for name in ("plan.json", "requests.jsonl"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    text = (tmp_path / "requests.jsonl").read_text()
    (tmp_path / "requests.jsonl").write_text(text.replace('"tv": [', '"tv": [7.0, ', 1))
    refused(bench(METHODS, "--temperature", 1, "--out", tmp_path, "--resume"), 2, "calibration is")


def test_refusals() -> None:
    refused(bench([DRAWN], "--max-new", 6), 2, f"--calibrate, {DRAWN}", "--max-new 7 or more")
    refused(bench([f"{DRAWN}:force_accept=2"]), 2, "decided beforehand")
    refused(bench([DRAWN], "--temperature", -1), 2, "--temperature: must be a finite number of at least 0")
    refused(bench([DRAWN], "--temperature", "nan"), 2, "--temperature")


def test_at_temperature_0_it_is_said_what_d_then_is(tmp_path: Path) -> None:
    """A draft that is an argmax stands or falls by the target's: 1 - d and the counts are one number."""
    report = bench(["full"], "--format", "json", "--out", tmp_path).json["calibration"]
    (profile,), (row,) = report["profiles"], report["methods"]
    assert profile["accept_by_tv"] == pytest.approx(profile["accept_by_counts"]) and row["spent"] == 0
    assert "temperature 0: the target's laws are point masses" in bench(["full"], "--out", tmp_path, "--resume").out


@pytest.mark.parametrize(
    ("slow", "where"),
    [("draft", (DFlash, "propose")), ("target", (Llama, "forward")), ("other", (Exact, "judge"))],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_each_part_of_a_round_is_timed_as_itself(
    slow: str, where: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the three is held up for 30 ms a round."""
    kind, method = where
    original = getattr(kind, method)

    def late(*args: Any, **how: Any) -> Any:
        time.sleep(0.03)
        return original(*args, **how)

    monkeypatch.setattr(kind, method, late)
    report = bench(["full"], "--limit", 1, "--max-new", 8, "--format", "json").json["calibration"]
    (profile,), (row,) = report["profiles"], report["methods"]
    parts = {part: profile[f"{part}_ms_median"] for part in ("draft", "target", "other")}
    assert parts[slow] >= 30 and max(parts, key=lambda part: parts[part]) == slow
    assert row["draft_ms"] == parts["draft"] and (row["verify_ms"] >= 30) == (slow != "draft")


@pytest.fixture(scope="module")
def masked_pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same target with a masked drafter of random weights, which denoises in as many steps as one asks for."""
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 2048}
    folder = write_masked_llama(tmp_path_factory.mktemp("masked") / "drafter", **shape)
    return ["--target", str(PAIR / "target"), "--drafter", str(folder)]


def test_a_drafter_that_takes_steps_is_fitted_at_every_k(masked_pair: list[str]) -> None:
    """Each K of the fit once, though two methods share them; a method's own K joins in; each way of judging has its own
    d, and a threshold no K of its own, but a mean of passes."""
    base = "full:draft_temperature=1"
    sweep = [f"{base}:steps=2:q_mode=reveal_step", f"{base}:steps=3:q_mode=reveal_step:accept=linear:leniency=0.5"]
    sweep += [f"{base}:confidence=0.05"]
    words = ("--methods", ",".join(sweep), "--calibrate", "--draft-tokens", 4, "--temperature", 1, "--limit", 1)
    done = main("bench", *masked_pair, *SMALL, *words, "--format", "json")
    assert done.code == 0, done
    check(done.json)
    report, found = done.json["calibration"], rows(done.json)
    runs = {row["run"]: row for row in report["profiles"]}
    revealed = [f"{base}:q_mode=reveal_step, K {k}" for k in (1, 2, 4, 8)]
    exact = [f"{base}, K {k}" for k in (1, 2, 4, 8)]
    assert set(runs) == {*revealed, *exact, f"{base}:q_mode=reveal_step, K 3", f"{base}:confidence=0.05, adaptive"}
    passes = [runs[name]["steps"] for name in revealed]  # a draft over two of the drafter's blocks takes more than K
    assert passes[0] >= 1 and passes[0] < passes[1] < passes[2] <= passes[3] == 4  # and one of four places no eight
    assert runs[revealed[2]]["draft_ms_median"] > runs[revealed[0]]["draft_ms_median"]
    for label, k in zip(sweep[:2], (2, 3), strict=True):
        row = found[label]
        assert row["profile"] == f"{base}:q_mode=reveal_step, K {k}" and row["drafts"] == 4
        steps = row["steps"]
        assert steps == runs[row["profile"]]["steps"] > 1 and row["b_fitted"] and row["b_ms"] > 0
        assert row["draft_ms"] == pytest.approx(row["a_ms"] + steps * row["b_ms"])
        assert row["d"] == runs[row["profile"]]["d"] and not row["lossless"]
    adaptive = found[sweep[2]]
    assert adaptive["profile"] == f"{base}:confidence=0.05, adaptive" and adaptive["lossless"]
    assert 1 <= adaptive["steps"] <= 4 and adaptive["b_fitted"]
    assert adaptive["draft_ms"] == pytest.approx(adaptive["a_ms"] + adaptive["steps"] * adaptive["b_ms"])
    for name in (*revealed[1:], *exact[1:]):
        low, high = runs[name]["d_change_ci"]
        assert low <= runs[name]["d_change"] <= high
    # a point mass in place of the law that a draft was drawn from: one step alone is judged alike by both
    assert runs[revealed[0]]["d"] == runs[exact[0]]["d"] and runs[revealed[2]]["d"] < runs[exact[2]]["d"]
