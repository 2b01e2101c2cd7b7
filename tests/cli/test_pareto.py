"""``foldspec pareto`` as a user runs it, on a tiny pair whose drafter denoises in steps."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.command import PAIR, Result, main, pair_words, refused, start
from masked import write_masked_llama

from foldspec.bench.schema import check

SMALL = ("--tasks", "random", "--lengths", "32", "--limit", 2, "--max-new", 16, "--threads", 1, "--ignore-eos")
SMALL += ("--warmup", 0, "--bootstrap", 200, "--quiet", "--temperature", 1)
AXES = ("--draft-tokens", "3,7", "--steps", "1,2", "--leniency", "0,0.5")  # 7: more than the pair's own 5
LABELS = [
    f"full:draft_tokens={drafts}:steps={steps}:draft_temperature=1:accept={rule}"
    for drafts in (3, 7)
    for steps in (1, 2)
    for rule in ("linear:leniency=0", "linear:leniency=0.5", "unverified")
]


@pytest.fixture(scope="module", autouse=True)
def quick_and_a_busy_machine_is_no_matter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foldspec.bench.guards.clock_disturbed", lambda run: False)
        patch.setattr("foldspec.bench.session.read_bandwidth", lambda device: 10.0)
        patch.setattr("foldspec.bench.calibrate.STEPS", (1, 2))
        patch.setattr("gc.collect", lambda: 0)
        yield


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 2048}
    folder = write_masked_llama(tmp_path_factory.mktemp("masked") / "drafter", **shape)
    return ["--target", str(PAIR / "target"), "--drafter", str(folder)]


@pytest.fixture(scope="module")
def whole(masked: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[Any]]:
    out = tmp_path_factory.mktemp("pareto") / "out"
    words = ["pareto", *masked, *SMALL, *AXES, "--out", out]
    done = main(*words, "--format", "json")
    assert done.code == 0, done
    check(done.json)
    assert json.loads((out / "bench.json").read_text()) == done.json
    return done.json, out, words


def lines(out: Path) -> dict[str, list[dict[str, Any]]]:
    """By method, those of both requests."""
    found: dict[str, list[dict[str, Any]]] = {}
    for text in (out / "requests.jsonl").read_text().splitlines():
        line = json.loads(text)
        check(line, "request")
        found.setdefault(line["method"], []).append(line)
    return found


def test_a_sweep_is_a_bench_with_points(whole: tuple[dict[str, Any], Path, list[Any]]) -> None:
    report, out, _ = whole
    pareto, kept = report["pareto"], lines(out)
    assert list(report["methods"]) == ["ar", *LABELS] and [p["method"] for p in pareto["points"]] == ["ar", *LABELS]
    assert pareto["axes"] == {
        "draft_tokens": [3, 7],
        "effort": ["K 1", "K 2"],
        "accept": "linear",
        "leniency": [0, 0.5],
    }
    assert pareto["exclusions"] == []  # nothing is scored
    assert {(f["quality"], f["speed"]) for f in pareto["frontiers"]} == {
        (quality, speed) for quality in ("logprob", "agreement") for speed in ("latency_s", "tokens_s")
    }
    rows = {row["method"]: row for row in report["calibration"]["methods"]}
    for point in pareto["points"]:
        mine = kept[point["method"]]
        assert point["n"] == 2 and point["score"] is None
        assert point["lossless"] == (point["kind"] == "verifier" or point["leniency"] == 0)
        assert point["logprob"]["mean"] == pytest.approx(sum(line["logprob"] for line in mine) / 2)
        if point["lossless"]:
            assert point["agreement"]["mean"] == 1
        else:  # nothing is judged twice: what is spent is of the calibrating runs
            runs = [ar["calibration"][point["method"]]["rounds"] for ar in kept["ar"]]
            spent = [[x for each in run for x in each["spent"]] for run in runs]
            means = [1 - sum(each) / len(each) for each in spent]
            assert point["agreement"]["mean"] == pytest.approx(sum(means) / 2) and max(means) < 1
        if point["kind"] == "point":
            seconds = [(line["ttft_ms"] + line["decode_ms"]) / 1e3 for line in mine]
            assert point["latency_s"]["mean"] == pytest.approx(sum(seconds) / 2)
            assert point["tokens_s"]["mean"] == pytest.approx(32 / sum(seconds))
            d = rows[point["method"]]["d"]
            assert point["agreement_modelled"] == pytest.approx(1 - point["leniency"] * d)
        if point["kind"] == "drafter":
            draft = rows[point["method"]]["draft_ms_measured"]
            seconds = [(line["ttft_ms"] + line["rounds"] * draft) / 1e3 for line in mine]
            assert point["latency_s"]["mean"] == pytest.approx(sum(seconds) / 2)
        assert point["kind"] == "verifier" or point["tokens_s_modelled"] > 0


def test_the_log_probability_is_the_targets(whole: tuple[dict[str, Any], Path, list[Any]]) -> None:
    """Plain decoding drawn at temperature 1: what transformers says of the same ids."""
    import torch
    from transformers import AutoModelForCausalLM

    from foldspec import Engine, SamplingParams
    from foldspec.bench.inputs import random_source
    from foldspec.bench.protocol import SEED_DIGITS
    from foldspec.bench.timing import sha256_of

    _, out, _ = whole
    first = lines(out)["ar"][0]
    (item, *_) = random_source(512, 0)(32, 2)
    assert sha256_of(item.prompt) == first["input_sha256"]
    with Engine.load(target=str(PAIR / "target"), drafter="none", threads=1) as engine:
        seed = int(first["input_sha256"][:SEED_DIGITS], 16)
        params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=seed)
        text = engine.generate(list(item.prompt), params).token_ids
    assert sha256_of(text) == first["output_ids_sha256"]
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*item.prompt, *text]])).logits[0, 31:-1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(text)[:, None]).mean().item()
    assert first["logprob"] == pytest.approx(wanted, abs=1e-4)


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    """What two benches of the same seed agree in, whenever and wherever they ran."""
    pareto = report.get("pareto") or {"points": [], "exclusions": []}
    points = [
        {name: value for name, value in point.items() if name not in ("latency_s", "tokens_s", "tokens_s_modelled")}
        for point in pareto["points"]
    ]
    columns = report["requests"]["columns"]
    timed = [i for i, name in enumerate(columns) if name in ("ttft_ms", "decode_ms")]
    rows = [[x for i, x in enumerate(row) if i not in timed] for row in report["requests"]["rows"]]
    tau = [(row["method"], row["n"], row["tau_mean"], row["tau_ci"], row["commit_counts"]) for row in report["summary"]]
    return {"points": points, "exclusions": pareto["exclusions"], "rows": rows, "tau": tau, "tasks": report["tasks"]}


def test_the_order_in_which_requests_were_done_changes_nothing(
    whole: tuple[dict[str, Any], Path, list[Any]], tmp_path: Path
) -> None:
    report, out, words = whole
    text = (out / "requests.jsonl").read_text().splitlines()
    by_id: dict[str, list[str]] = {}
    for line in text:
        by_id.setdefault(json.loads(line)["id"], []).append(line)
    assert list(by_id) == ["0", "1"]
    for group in by_id.values():
        random.Random(1).shuffle(group)
    other = tmp_path / "out"
    other.mkdir()
    (other / "plan.json").write_bytes((out / "plan.json").read_bytes())
    (other / "requests.jsonl").write_text("".join(f"{line}\n" for id in ("1", "0") for line in by_id[id]))
    done = main(*words[:-1], other, "--resume", "--format", "json")
    assert done.code == 0 and done.json["resumed"] == 2, done
    for name in ("summary", "calibration", "pareto", "requests", "noise", "tasks"):
        assert done.json[name] == report[name], name


def test_what_a_person_reads(whole: tuple[dict[str, Any], Path, list[Any]]) -> None:
    report, _, words = whole
    for form in ("table", "md"):
        done = main(*words, "--resume", "--format", form)
        assert done.code == 0, done
        rows = [text for text in done.out.split("\n\n")[0].splitlines() if text.strip("| ").startswith("random")]
        assert len(rows) == len(LABELS) + 1
        assert "fewer than 5 requests decide nothing" in done.out and "CPU: ratios on this machine" in done.out
        assert "its times are derived" in done.out and "verifier alone; 3 drafts, K 1, leniency 0" in done.out
    found = list(csv.DictReader(io.StringIO(main(*words, "--resume", "--format", "csv").out)))
    for row, point in zip(found, report["pareto"]["points"], strict=True):
        assert row["method"] == point["method"] and float(row["tokens_s_mean"]) == point["tokens_s"]["mean"]


def test_a_bench_and_a_sweep_do_not_go_on_with_each_other(whole: tuple[dict[str, Any], Path, list[Any]]) -> None:
    _, out, words = whole
    labels = ",".join(LABELS)
    bench = ["bench", *words[1:5], *SMALL, "--methods", labels, "--calibrate", "--draft-tokens", 7]
    refused(main(*bench, "--out", out, "--resume"), 2, "began with other settings", "settings.axes")


def dry(pair: list[str], *more: object) -> Result:
    return main("pareto", *pair, *SMALL, "--dry-run", *more)


def test_dry_run_and_refusals_read_no_weights(masked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("foldspec.loading.load_into", load)
    done = dry(masked, *AXES)
    assert done.code == 0 and "drafts: 3, 7; effort: K 1, K 2; rule: linear, leniency 0, 0.5" in done.out, done
    assert "8 points, 4 drafters alone" in done.out and "28 runs" in done.out
    assert "effort: K 1, K 2, K 4;" in dry(masked).out and "drafts: 5;" in dry(masked).out
    of_one = dry(pair_words())  # DFlash
    assert of_one.code == 0 and "drafts: 5; effort: K 1; rule: linear, leniency 0, 0.4, 1" in of_one.out
    assert "drafts: 7; effort: K 1;" in dry(["--target", str(PAIR / "target"), "--drafter", "lookup"]).out
    for pair, words, says in (
        (pair_words(), ("--steps", "1,2"), "--steps: the drafter has one step"),
        (pair_words(), ("--confidence", ".5"), "--confidence: the drafter has one step"),
        (pair_words(), ("--draft-tokens", "4,6"), "--draft-tokens: the drafter proposes 5 at most, not 6"),
        (masked, ("--context", "fold"), "--context: "),
        (masked, ("--draft-tokens", 15), "--max-new 16: no round would draft all of its 15 tokens"),
        (masked, ("--accept", "cactus", "--temperature", 0), "--accept cactus: at temperature 0"),
        (masked, ("--accept", "linear:epsilon=1"), "epsilon: changes nothing about the rule linear"),
        (["--target", str(PAIR / "target"), "--drafter", "none"], (), "there is no drafter"),
        (["--target", str(PAIR / "target"), "--drafter", "lookup"], ("--steps", "2"), "--steps: is for a drafter with"),
    ):
        refused(main("pareto", *pair, *SMALL, *words), 2, says)


@pytest.mark.slow
def test_at_temperature_0_every_lossless_point_says_what_plain_decoding_says(masked: list[str]) -> None:
    words = ("--temperature", 0, "--confidence", "0.5", "--accept", "linear", "--leniency", "0,1", "--context", "full")
    done = main("pareto", *masked, *SMALL, *words, "--format", "json")
    assert done.code == 0, done
    rows = {row["method"]: row for row in done.json["summary"]}
    points = {(p["kind"], p["leniency"]): p for p in done.json["pareto"]["points"]}
    strict, plain = points["point", 0.0], points["verifier", None]
    assert rows[strict["method"]]["diff_from_ar"] == 0 and strict["logprob"] == plain["logprob"]
    assert points["point", 1.0]["agreement"]["mean"] < 1 and points["point", 1.0]["agreement_modelled"] < 1


# the command, on a machine that disturbs no clock
UNDISTURBED = """
import sys
from foldspec import cli
from foldspec.bench import calibrate, guards
calibrate.STEPS = (1, 2)
guards.clock_disturbed = lambda run: False
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["bench", "pareto"])
def test_killed_and_resumed_it_is_as_if_nothing_had_happened(command: str, masked: list[str], tmp_path: Path) -> None:
    """kill -9 among 40 requests: at most the one that ran is lost, and the summary is that of a run in one go."""
    own = ["--leniency", "0.5", "--steps", "1"] if command == "pareto" else ["--methods", "full,full:steps=2"]
    words = [command, *masked, *SMALL, *own, "--limit", 40, "--format", "json"]
    words.remove("--quiet")
    killed = tmp_path / "killed"
    process = start(tmp_path, [sys.executable, "-c", UNDISTURBED, *map(str, words), "--out", str(killed)])
    kept, end = killed / "requests.jsonl", time.monotonic() + 120
    arms = 4
    while not kept.exists() or kept.read_bytes().count(b"\n") < 12 * arms:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)
    process.kill()
    _, said = process.communicate()
    told = max(int(number) for number in re.findall(r"random 32: \d+, (\d+) of 40", said))
    done = kept.read_bytes().count(b"\n") // arms
    assert 11 <= told <= done <= told + 1 < 40  # none that was told is lost
    resumed = main(*words, "--out", killed, "--resume")
    whole = main(*words, "--out", tmp_path / "whole")
    assert resumed.code == whole.code == 0 and resumed.json["resumed"] == done and whole.json["resumed"] == 0
    assert resumed.json["complete"] and without_times(resumed.json) == without_times(whole.json)
    assert len(resumed.json["requests"]["rows"]) == 40 * arms
