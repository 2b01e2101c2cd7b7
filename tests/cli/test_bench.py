"""``foldspec bench`` as a user runs it, on a tiny pair: results, files, resume, Ctrl-C, kill -9."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.command import (
    PAIR,
    Result,
    command,
    copied,
    edit_tensors,
    main,
    pair_words,
    refused,
    result,
    start,
    tell_bytes_apart,
    with_text,
)

from foldspec.bench.schema import check, schema
from foldspec.models.llama import Llama

SMALL = ("--tasks", "random", "--lengths", "24,64", "--limit", 3, "--max-new", 12, "--threads", 1, "--ignore-eos")
METHODS = ("--methods", "full,window:window=16,fold:alpha=4:window=16")
LABELS = ["ar", "full", "window:window=16", "fold:alpha=4:window=16", "ar again"]


def bench(*more: object) -> Result:
    return main("bench", *pair_words(), *SMALL, *METHODS, *more)


def tie_all(pair: Path) -> None:
    """Give every id of the upper half what the target knows of one in the lower."""

    def copy(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name][256:] = tensors[name][:256]

    edit_tensors(pair / "target", copy)


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    for line in found:
        check(line, "request")
    return found


@pytest.fixture(scope="module", autouse=True)
def a_busy_machine_is_no_matter() -> Iterator[None]:
    """Runs of milliseconds beside other processes are disturbed now and then. That this is seen is tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foldspec.bench.guards.clock_disturbed", lambda run: False)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("bench") / "out"
    done = bench("--out", out, "--format", "json", "--trace", "--against", "full", "--seed", 3)
    assert done.code == 0, done
    return done, out


def test_the_result_keeps_its_schema(whole: tuple[Result, Path]) -> None:
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(schema())
    done, out = whole
    jsonschema.Draft202012Validator(schema()).validate(done.json)
    assert json.loads((out / "bench.json").read_text()) == done.json
    with pytest.raises(Exception, match="breaks its schema"):
        check({**done.json, "noise": {"n": 1}})


def test_what_is_in_the_result(whole: tuple[Result, Path]) -> None:
    report, found = whole[0].json, lines(whole[1])
    assert report["complete"] and report["resumed"] == 0
    assert [(r["length"], r["method"]) for r in report["summary"]] == [(n, m) for n in (24, 64) for m in LABELS]
    assert all(r["n"] == 3 and r["excluded"] == 0 and r["verdict"] in ("few", "baseline") for r in report["summary"])
    assert all(r["diff_from_ar"] == 0 for r in report["summary"])
    assert [a["method"] for a in report["against"]] == LABELS[2:4] * 2
    assert report["methods"]["fold:alpha=4:window=16"]["alpha"] == 4
    assert report["env"]["device_type"] == "cpu" and report["env"]["threads"] == 1 and report["env"]["read_gb_s"] > 0
    assert Counter(line["method"] for line in found) == dict.fromkeys(LABELS, 6)
    for line in found:
        assert line["n_out"] == 12 and sum(line["commits"]) == 11 and line["rounds"] >= 1
        assert line["tpot_ms"] == pytest.approx(line["decode_ms"] / 11)
        assert (line["parts_ms"] is None) == (line["method"] == "ar again")
        assert (line["draft_prefill_ms"] > 0) == (line["method"] not in ("ar", "ar again"))
    # one prompt, one prefill, one output for all methods of a request
    for key in {(line["length"], line["id"]) for line in found}:
        group = [line for line in found if (line["length"], line["id"]) == key]
        assert len({line["input_sha256"] for line in group}) == len({line["output_ids_sha256"] for line in group}) == 1
        assert sorted(line["order"] for line in group) == list(range(5))


def test_the_parts_of_a_round_are_most_of_it(whole: tuple[Result, Path]) -> None:
    for row in whole[0].json["summary"]:
        if row["method"] != "ar again":
            parts = row["parts_ms"]
            assert (parts["draft"] > 0.01) == (row["method"] != "ar") and parts["verify"] > 0 and parts["accept"] > 0
            # two passes at two times: this is about units and about what is left out, not about speed
            assert 0.02 * row["round_ms_mean"] < sum(parts.values()) < 50 * row["round_ms_mean"]


def test_the_table(whole: tuple[Result, Path]) -> None:
    _, out = whole
    for form in ("table", "md"):
        done = bench("--out", out, "--resume", "--trace", "--seed", 3, "--format", form)
        assert done.code == 0
        for words in (*LABELS, "A/A", "CPU: ratios on this machine, not a GPU's", "?", "tau:", "TPOT: (last token"):
            assert words in done.out, words
    done = bench("--out", out, "--resume", "--trace", "--seed", 3, "--format", "csv", "--quiet")
    read = list(csv.DictReader(io.StringIO(done.out)))
    assert len(read) == 10 and float(read[0]["tau_mean"]) == 1.0 and "speedup_ci_low" in read[0] and done.err == ""


def test_outputs_that_differ_are_counted_with_their_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose two best logits tie, and which rounds a block's rows otherwise than a single row: what half
    precision does. The count and the gap are printed, and the first place is kept."""
    pair = copied(tmp_path / "pair")
    tie_all(pair)
    head = Llama.head

    def rounded(self: Llama, x: torch.Tensor, matrix: Any = None, softcap: Any = None) -> torch.Tensor:
        logits = head(self, x, matrix, softcap)
        logits[:, 256:] += 1e-6 * (len(x) > 1)
        return logits

    monkeypatch.setattr(Llama, "head", rounded)
    words = ("--tasks", "random", "--lengths", "24", "--limit", 1, "--max-new", 9, "--threads", 1, "--ignore-eos")
    words = ("bench", *pair_words(pair), *words, "--methods", "full", "--warmup", 1, "--out", tmp_path / "out")
    done = main(*words, "--quiet")
    assert done.code == 0, done
    differ = [line for line in lines(tmp_path / "out") if line["method"] == "full" and line["first_diff"] is not None]
    assert len(differ) == 1 and all(line["gap"] < 1e-4 for line in differ)
    (row,) = (line for line in done.out.splitlines() if line.split()[2:3] == ["full"])
    assert f" {len(differ)} (gap {max(line['gap'] for line in differ):.1e}) " in row, row
    assert "OUTPUTS DIFFER FROM PLAIN DECODING: only near ties" in done.out


@pytest.mark.slow
def test_a_lossy_method_is_called_so_everywhere(tmp_path: Path) -> None:
    ways = ("fold:accept=linear:leniency=1/0.5", "full:accept=linear:leniency=0", "window:accept=typical:epsilon=0.2")
    arguments = (*pair_words(), *SMALL, "--methods", ",".join(ways), "--out", tmp_path)
    done = main("bench", *arguments)
    assert done.code == 0 and f"{ways[0]} (lossy)" in done.out and f"{ways[2]} (lossy)" in done.out
    assert f"{ways[0]} is LOSSY: its output's law is not the target's" in done.out
    assert f"{ways[1]} (lossy)" not in done.out
    again = main("bench", *arguments, "--resume", "--format", "json").json
    assert again["resumed"] == 6
    check(again)
    rows = {row["method"]: row for row in again["summary"]}
    assert {name: row["lossless"] for name, row in rows.items()} == {
        **dict.fromkeys(("ar", "ar again", ways[1]), True),
        ways[0]: False,
        ways[2]: False,
    }
    assert again["methods"][ways[0]]["leniency"] == [1.0, 0.5] and "lambda 1/0.5" in again["methods"][ways[0]]["law"]
    assert rows[ways[0]]["diff_from_ar"] > 0 == rows[ways[1]]["diff_from_ar"] == rows[ways[2]]["diff_from_ar"]


def test_resumed_when_it_is_done_nothing_is_run(whole: tuple[Result, Path]) -> None:
    _, out = whole
    before = (out / "requests.jsonl").read_bytes()
    done = bench("--out", out, "--resume", "--trace", "--seed", 3, "--format", "json")
    assert done.code == 0 and done.json["resumed"] == 6 and done.json["warmup"] == []
    assert (out / "requests.jsonl").read_bytes() == before


def test_refusals(whole: tuple[Result, Path], tmp_path: Path) -> None:
    _, out = whole
    refused(bench("--out", out), 2, "is not empty", "--resume")
    refused(bench("--out", out, "--resume", "--trace", "--seed", 4, "--quiet"), 2, "seed was 3, is 4")
    refused(bench("--resume"), 2, "needs --out")
    refused(bench("--methods", "nonsense"), 2, "unknown context method 'nonsense'")
    for words, says in {
        "lookup:window=16": "window changes nothing about lookup",
        "full:window=16": "window changes nothing about full",
        "fold,window:alpha=2": "alpha changes nothing about window",
        "fold:leniency=0.4": "leniency: changes nothing about the rule exact",
        "fold:accept=linear": "leniency: the rule linear needs it",
        "fold:accept=linear:leniency=2": "leniency: must be a finite number of at least 0 and at most 1, not 2",
        "fold:accept=linear:leniency=much": "'much' is not a number",
        "fold:accept=lax": "unknown acceptance rule 'lax'",
    }.items():
        refused(bench("--methods", words, "--dry-run"), 2, says)
    refused(bench("--methods", "full", "--against", "full"), 2, "--against")
    refused(bench("--tasks", "nonsense"), 2, "nonsense")
    refused(bench("--lengths", "12x"), 2, "12x")
    refused(bench("--lengths", "9" * 5000), 2, "--lengths")
    refused(bench("--limit", 0), 2, "--limit")
    refused(bench("--limit", 10**9), 2, "--limit")
    refused(bench("--bootstrap", 10**9), 2, "--bootstrap")
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused(bench("--out", blocked / "x", "--quiet"), 4, "--out")


def test_a_length_that_does_not_fit_is_cut_and_said() -> None:
    done = main("bench", *pair_words(), *SMALL, *METHODS, "--lengths", "8k", "--max-new", 50, "--dry-run")
    assert done.code == 0 and "length 8k is 1998 here" in done.err and "random 1998: 3 requests" in done.out


def test_dry_run_reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **how: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("foldspec.loading.load_into", load)
    done = bench("--dry-run")
    assert done.code == 0 and "random 24: 3 requests of 24 to 24 tokens, 0 too long" in done.out, done
    assert "15 runs" in done.out
    plan = json.loads(bench("--dry-run", "--format", "json").out)
    assert plan["methods"][0] == "ar" and len(plan["methods"]) == 5 and plan["prefills"] == {"24": 3, "64": 3}
    assert [[one["n_in"] for one in cell["requests"]] for cell in plan["cells"]] == [[24] * 3, [64] * 3]


LONG = ("--tasks", "random", "--lengths", "400", "--limit", 24, "--max-new", 40, "--threads", 1, "--ignore-eos")


def begin(home: Path, out: Path, *more: str) -> Any:
    words = command("bench", *pair_words(), *LONG, "--methods", "full,fold", "--format", "json", "--out", out, *more)
    return start(home, words)


def wait_for_lines(out: Path, count: int, process: Any) -> None:
    end = time.monotonic() + 120
    path = out / "requests.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


def counted(done: Result) -> int:
    """Requests that are in the result, those that a busy machine disturbed included."""
    (cell,) = done.json["tasks"]
    return int(cell["n"]) + sum(cell["excluded"].values())


@pytest.mark.slow
def test_interrupted_and_killed_and_resumed(tmp_path: Path) -> None:
    """Ctrl-C keeps what is done and reports it; kill -9 loses the running request at most; what is left is measured,
    and nothing twice."""
    out = tmp_path / "out"
    process = begin(tmp_path, out)
    wait_for_lines(out, 8, process)
    process.send_signal(signal.SIGINT)
    done = result(process)
    assert done.code == 130 and "Traceback" not in done.err, done
    assert not done.json["complete"] and "interrupted; requests done: " in done.err
    first = lines(out)
    assert len(first) % 4 == 0 and len(first) >= 8 and counted(done) == len(first) // 4

    process = begin(tmp_path, out, "--resume")
    wait_for_lines(out, len(first) + 8, process)
    process.kill()
    process.communicate()
    data = (out / "requests.jsonl").read_bytes()
    killed = [json.loads(line) for line in data.splitlines()[: data.count(b"\n")]]
    assert killed[: len(first)] == first and len(killed) >= len(first) + 8
    with (out / "requests.jsonl").open("ab") as file:  # as if it had died inside a write
        file.write(b'{"task": "random", "length": 400, "id": "5')

    done = result(begin(tmp_path, out, "--resume"), timeout=300)
    assert done.code == 0 and done.json["complete"] and done.json["resumed"] == len(killed) // 4
    final = lines(out)
    assert final[: len(killed) // 4 * 4] == killed[: len(killed) // 4 * 4]
    assert Counter((line["id"], line["method"]) for line in final) == {
        (str(i), m): 1 for i in range(24) for m in ("ar", "full", "fold", "ar again")
    }


@pytest.mark.slow
def test_weights_that_changed_under_the_same_name_are_not_mixed(tmp_path: Path) -> None:
    """A drafter is trained again into its folder; then a bench is resumed."""
    pair, out = copied(tmp_path / "pair"), ("--out", tmp_path / "out")
    words = ("bench", *pair_words(pair), *SMALL, "--methods", "full", "--lengths", "24", "--quiet")
    assert main(*words, *out).code == 0
    path = tmp_path / "out" / "requests.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    weights = pair / "drafter" / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    refused(main(*words, *out, "--resume"), 2, "weights.drafter")
    weights.write_bytes(before)
    assert main(*words, *out, "--resume").code == 0


def test_a_stderr_that_takes_nothing_ends_no_measurement(tmp_path: Path) -> None:
    read, closed = os.pipe()
    os.close(read)
    words = command("bench", *pair_words(), *SMALL, "--methods", "lookup", "--format", "json", "--lengths", "24")
    process = start(tmp_path, words, stderr=closed)
    os.close(closed)
    done = result(process)
    assert done.code == 0 and done.json["complete"] and counted(done) == 3, done


@pytest.mark.slow
def test_tasks_of_real_text(tmp_path: Path) -> None:
    """Through a tokenizer: the prompts are the task's, an answer is looked for, and what they are made from is said."""
    pair = with_text(copied(tmp_path / "pair"), bos=True)
    tell_bytes_apart(pair)
    words = ("--lengths", "512,700", "--limit", 2, "--max-new", 8, "--threads", 1, "--methods", "full,lookup")
    done = main("bench", *pair_words(pair), "--tasks", "docs,code,kv", *words, "--format", "json", "--ignore-eos")
    assert done.code == 0, done
    expected = [(name, length, 2) for length in (512, 700) for name in ("docs", "code", "kv")]
    assert [(t["name"], t["length"], t["n"]) for t in done.json["tasks"]] == expected
    assert all(t["dataset"] for t in done.json["tasks"])
    ids = {t["name"]: t["ids"] for t in done.json["tasks"] if t["length"] == 512}
    assert ids == {t["name"]: t["ids"] for t in done.json["tasks"] if t["length"] == 700}  # paired across lengths
    assert {r["method"] for r in done.json["averages"]} == {"ar", "full", "lookup", "ar again"}
    assert {r["task"]: r["score_mean"] for r in done.json["summary"]} == {"docs": None, "code": None, "kv": 0}
    refused(main("bench", *pair_words(), "--tasks", "docs", *words), 2, "no tokenizer.json")


def test_methods_that_cannot_run(tmp_path: Path) -> None:
    words = ("--tasks", "random", "--lengths", "24", "--limit", 1, "--quiet", "--threads", 1)
    alone = ("--target", PAIR / "target", "--drafter", "none")
    refused(main("bench", *alone, *words, "--methods", "full"), 2, "no drafter")
    refused(main("bench", *alone, *words, "--methods", "full", "--dry-run"), 2, "no drafter")
    # figures of one thing under the name of another
    other = ("--target", PAIR / "target", "--drafter", "lookup")
    refused(main("bench", *other, *words, "--methods", "full"), 2, "--methods full", "no drafter")
    refused(main("bench", *other, *words, "--methods", "full", "--dry-run"), 2, "--methods full", "no drafter")
    refused(bench("--quiet", "--methods", "full:drafter=lookup"), 2, "is no option")
    refused(bench("--quiet", "--methods", "lookup:context=fold"), 2, "is no option")
    refused(bench("--quiet", "--methods", "full,fold:draft_tokens=0"), 2, "fold:draft_tokens=0", "plain decoding")
    refused(bench("--quiet", "--draft-tokens", 0, "--dry-run"), 2, "--methods full", "plain decoding")
    refused(bench("--quiet", "--methods", "fold:alpha=4,fold", "--alpha", 4), 2, "the same as fold:alpha=4")
    done = main("bench", *alone, *words, "--methods", "lookup", "--max-new", 8, "--ignore-eos", "--format", "csv")
    assert done.code == 0 and "lookup" in done.out
