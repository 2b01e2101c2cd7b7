"""A method that is made to say one wrong token: its speedup is nowhere. And what a bench says of how it ran."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.command import main, pair_words, refused

from foldspec.acceptance.match import Match
from foldspec.bench.parity import SPEEDUPS
from foldspec.bench.report import render
from foldspec.records import Verdict

GOOD, BAD = "window:window=16", "full:accept=match"
SMALL = ("--tasks", "random", "--limit", 2, "--max-new", 12, "--threads", 1, "--ignore-eos", "--warmup", 0)
A_SPEEDUP = re.compile(r"\d\.\d{3} \[")


@pytest.fixture(scope="module", autouse=True)
def a_busy_machine_is_no_matter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foldspec.bench.guards.clock_disturbed", lambda run: False)
        patch.setattr("foldspec.bench.session.read_bandwidth", lambda device: None)
        patch.setattr("gc.collect", lambda: 0)  # both take longer than all else
        yield


def one_wrong_token(patch: pytest.MonkeyPatch, position: int) -> None:
    """Let the rule ``match`` take another token than its own at one position of a text."""
    judge = Match.judge

    def altered(self: Match, target: Any, proposal: Any, noise: Any) -> Verdict:
        right = judge(self, target, proposal, noise)
        at = position - target.position
        if not 0 <= at <= right.accepted:
            return right
        return Verdict(at, ((*proposal.tokens[: right.accepted], right.next_token)[at] + 1) % 512)

    patch.setattr(Match, "judge", altered)


@pytest.fixture(scope="module", params=[30, 70])
def red(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Any, Path]:
    """A bench of 24 and 64 tokens; the probe, of 24 and 12 more, sees the first of the wrong tokens alone."""
    out = tmp_path_factory.mktemp("red") / "out"
    with pytest.MonkeyPatch.context() as patch:
        one_wrong_token(patch, request.param)
        words = ("--lengths", "24,64", "--methods", f"{GOOD},{BAD}", "--out", out, "--quiet")
        return request.param, main("bench", *pair_words(), *SMALL, *words), out


def test_nothing_that_bench_prints_has_its_speedup(red: tuple[int, Any, Path]) -> None:
    position, done, out = red
    result = json.loads((out / "bench.json").read_text())  # written all the same
    assert done.code == 1 and result["complete"]
    found = result["parity"]
    assert (found[GOOD]["state"], found[BAD]["state"]) == ("green", "red")
    assert (found[BAD]["probe"]["first_diff"] is None) == (position == 70)
    assert found[BAD]["differing"] and all(d["gap"] > 1e-4 for d in found[BAD]["differing"])
    for form in ("table", "md"):
        text = done.out if form == "table" else render(result, form)
        rows = [line for line in text.splitlines() if BAD in line and "random" in line and "PARITY" not in line]
        rows = [line for line in rows if "differs from AR in" not in line]
        assert len(rows) == 2 and all(f"parity red: {found[BAD]['why']}" in line for line in rows), rows
        assert not any(A_SPEEDUP.search(line) for line in rows)
        assert f"PARITY RED, no speedup of {BAD} is shown: {found[BAD]['why']}" in text
        assert sum(bool(A_SPEEDUP.search(line)) for line in text.splitlines()) >= 4  # the others' are there
    mine = [row for row in result["summary"] if row["method"] == BAD]
    assert len(mine) == 2 and all(row[name] is None for row in mine for name in SPEEDUPS)
    assert all(row["verdict"] == "red" and row["tau_mean"] > 0 for row in mine)
    for row in csv.DictReader(io.StringIO(render(result, "csv"))):
        names = ("speedup_mean", "speedup_ci_low", "speedup_ci_high", "speedup_ratio_of_means")
        assert all((row[name] == "") == (row["method"] == BAD) for name in names), row
        assert row["speedup_mean_equal_output"] == "" or row["method"] != BAD


def test_nothing_that_reads_the_result_has_it(red: tuple[int, Any, Path], tmp_path: Path) -> None:
    _, _, out = red
    assert main("plot", out, "--out", tmp_path).code == 0
    for name, there in (("speedup", False), ("forest", False), ("tau", True)):
        svg = (tmp_path / f"out-{name}.svg").read_text()
        assert (f"<!-- {BAD} -->" in svg) == there and f"<!-- {GOOD} -->" in svg, name
    text = main("compare", out, out).out
    assert f"PARITY RED, not compared: {BAD} in {out}" in text
    assert not any(BAD in line and A_SPEEDUP.search(line) for line in text.splitlines())
    found = json.loads(main("compare", out, out, "--methods", f"{GOOD}/{BAD}", "--format", "json").out)
    assert [row["methods"] for row in found["rows"]] == [["ar", "ar"]] * 2 and len(found["red"]) == 1
    assert main("report", out, "--out", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert f'<p class="warn">PARITY RED, no speedup of {BAD}' in page
    rows = [row for row in re.findall(r"<tr>.*?</tr>", page) if f"<td>{BAD}</td>" in row]
    assert len(rows) == 2 and all("parity red: " in row and not A_SPEEDUP.search(row) for row in rows)


def test_what_is_set_against_a_red_method_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_wrong_token(monkeypatch, 30)
    words = ("--lengths", 24, "--methods", f"{GOOD},{BAD}", "--against", BAD, "--out", tmp_path / "out")
    done = main("bench", *pair_words(), *SMALL, *words)
    assert done.code == 1 and "no speedup is shown of full:accept=match" in done.err
    (row,) = json.loads((tmp_path / "out" / "bench.json").read_text())["against"]
    assert row["method"] == GOOD and row["speedup_mean"] is row["speedup_ci"] is None and row["verdict"] == "red"
    drawn = main("plot", tmp_path / "out", "--out", tmp_path / "figures")
    assert "forest" not in drawn.out and drawn.code == 0


# Draft prefill


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Any, Path]]:
    """One measurement, summed up without and with the drafter's part of prefill."""
    folder = tmp_path_factory.mktemp("prefill")
    words = ("bench", *pair_words(), *SMALL, "--lengths", "24,64", "--methods", f"full,{GOOD}", "--quiet")
    without = main(*words, "--out", folder / "a")
    assert without.code == 0, without
    (folder / "b").mkdir()
    for name in ("plan.json", "requests.jsonl"):
        (folder / "b" / name).write_bytes((folder / "a" / name).read_bytes())
    with_it = main(*words, "--out", folder / "b", "--resume", "--include-draft-prefill")
    assert with_it.code == 0, with_it
    return {False: (without, folder / "a"), True: (with_it, folder / "b")}


def test_draft_prefill_is_counted_by_option_and_every_table_says_so(both: dict[bool, tuple[Any, Path]]) -> None:
    results = {key: json.loads((out / "bench.json").read_text()) for key, (_, out) in both.items()}
    assert [results[key]["settings"]["include_draft_prefill"] for key in (False, True)] == [False, True]
    assert results[True]["resumed"] == sum(cell["planned"] for cell in results[True]["tasks"])
    pairs = list(zip(*(results[key]["summary"] for key in (False, True)), strict=True))
    for a, b in pairs:
        assert a["tpot_incl_draft_prefill_ms_median"] == b["tpot_incl_draft_prefill_ms_median"]
        assert b["tpot_ms_median"] == pytest.approx(b["tpot_incl_draft_prefill_ms_median"])
        assert (b["speedup_mean"] < a["speedup_mean"]) == (a["method"] in ("full", GOOD))
        assert a["round_ms_mean"] == b["round_ms_mean"] and a["tau_mean"] == b["tau_mean"]
    for key, (done, out) in both.items():
        head, text = done.out.splitlines()[0], done.out
        assert ("TPOT ms incl. draft prefill" in head) == ("speedup incl. draft prefill" in head) == key
        assert ("(last token - first token + the drafter's part of prefill)" in text) == key
        assert ("prefill excluded, median" in text) != key
        main("plot", out, "--out", out)
        for name in ("speedup", "forest"):
            assert ("incl. draft prefill" in (out / f"{out.name}-{name}.svg").read_text()) == key


def test_two_results_that_differ_in_it_are_not_compared(both: dict[bool, tuple[Any, Path]]) -> None:
    (_, a), (_, b) = both[False], both[True]
    for words in ((a, b), (b, a)):
        refused(main("compare", *words), 2, str(b), "counts draft prefill in TPOT")
    found = json.loads(main("compare", b, b, "--format", "json").out)
    assert found["with_draft_prefill"] and all(row["relative_ci"] == pytest.approx([1, 1]) for row in found["rows"])
    assert "every TPOT counts the drafter's part" in main("compare", b, b).out
    twice = json.loads((b / "bench.json").read_text())
    columns = twice["requests"]["columns"]
    for row in twice["requests"]["rows"]:
        row[columns.index("draft_prefill_ms")] += row[columns.index("decode_ms")] * (row[3] == "full")
    (b / "twice.json").write_text(json.dumps(twice))
    slower = json.loads(main("compare", b, b / "twice.json", "--format", "json").out)["rows"]
    assert all((row["speedup_mean"] < 0.9) == (row["methods"][0] == "full") for row in slower)


def test_an_older_result_is_still_read(both: dict[bool, tuple[Any, Path]], tmp_path: Path) -> None:
    """One without verdicts, flags and clocks."""
    _, out = both[False]
    old = json.loads((out / "bench.json").read_text())
    del old["parity"], old["failed"], old["env"]["clocks"], old["env"]["clocks_locked"]
    del old["settings"]["include_draft_prefill"]
    columns = old["requests"]["columns"]
    at = columns.index("draft_prefill_ms")
    old["requests"] = {
        "columns": columns[:at] + columns[at + 1 :],
        "rows": [r[:at] + r[at + 1 :] for r in old["requests"]["rows"]],
    }
    for row in old["summary"]:
        del row["flagged"], row["parity_red"]
    for cell in old["tasks"]:
        del cell["excluded"]["compiled"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    assert main("compare", path, out).code == main("plot", path, "--out", tmp_path).code == 0
    assert main("report", path, "--out", tmp_path / "page.html").code == 0


# What was recorded within a run


def test_rounds_recorded_within_a_measured_run_void_the_request(tmp_path: Path) -> None:
    """The probe is as short as the first length: rounds with a far read are recorded at the second, by whoever comes
    first, since there is no warm-up; that request is left out."""
    words = (
        "--lengths",
        "24,64",
        "--methods",
        "fold:window=48",
        "--graphs",
        "on",
        "--out",
        tmp_path / "out",
        "--quiet",
    )
    done = main("bench", *pair_words(), *SMALL, *words)
    assert done.code == 0, done
    lines = [json.loads(text) for text in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    assert [(line["length"], line["method"]) for line in lines if line["compiled"]] == [(64, "fold:window=48")]
    result = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(cell["excluded"]["compiled"], cell["n"]) for cell in result["tasks"]] == [(0, 2), (1, 1)]
    assert "random 64: left out: 1 compiled" in done.out
