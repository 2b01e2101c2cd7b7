"""``scripts/reproduce``: measured and resumed on a tiny pair; every table and figure from numbers that are known."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored
from cli.command import ROOT, copied, heed_ctrl_c, main, pair_words, tell_bytes_apart, with_text
from reproduce import alphas, command, figure, offline
from reproduce.requests import Request

from foldspec.bench import store
from foldspec.errors import UsageError

SMALL = ["--tasks", "docs", "--lengths", "512", "--limit", "2", "--max-new", "8", "--window", "64"]
LENGTHS = (1024, 8144)
COUNT = 12
TABLES = ["all_methods", "table4", "table5", "table11", "table12", "figure2", "figure5", "figure6"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = with_text(copied(tmp_path_factory.mktemp("pair")), bos=True)
    tell_bytes_apart(folder)
    return pair_words(folder)


def reproduce(*words: object) -> int:
    return command.main([str(word) for word in words])


def refused(said: Any, *words: str) -> None:
    assert said.out == "" and said.err.startswith("reproduce: ") and said.err.count("\n") == 1, said
    for word in words:
        assert word in said.err, said


# Measured


def test_a_torn_request_is_measured_again_and_other_settings_are_refused(
    tmp_path: Path, pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("all_methods", "--out", tmp_path, "--way", "offline", *pair, *SMALL)
    assert reproduce(*words) == 0
    first = capsys.readouterr()
    path = tmp_path / "work" / "offline-docs.jsonl"
    whole = path.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert len(rows) == first.err.count("offline docs 512") == 2
    assert set(rows[0]["leading"]) == set(offline.METHODS.split(",")), "every method, of one pass of the target"

    path.write_bytes(whole[:-20])
    assert reproduce(*words) == 0
    again = capsys.readouterr()
    assert again.err.count("offline docs 512") == 1, "only the request that was torn"
    assert path.read_bytes() == whole and again.out == first.out

    assert reproduce(*words, "--window", 65) == 2
    refused(capsys.readouterr(), "began with other settings", "window was 64, is 65")
    assert path.read_bytes() == whole


def test_a_folder_of_foldspec_bench_is_taken_as_it_is(
    tmp_path: Path, pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "work" / "live-docs"
    methods = "full,window,shared_window,fold,streaming,yarn,rerope,infllm,cmr"
    small = [*SMALL, "--threads", 1, "--warmup", 0]
    assert main("bench", *pair, "--methods", methods, *small, "--out", folder, "--quiet").code == 0
    path = folder / "requests.jsonl"
    path.write_text(path.read_text().replace('"clock_disturbed": true', '"clock_disturbed": false'))
    before = path.read_bytes()
    (folder / "bench.json").unlink()
    words = ("all_methods", "--out", tmp_path, "--way", "live", *pair, *SMALL, "--live-lengths", "512")
    for _ in range(2):  # without bench.json it is summed up; with it, it is only read
        assert reproduce(*words) == 0
        said = capsys.readouterr()
        assert "warming" not in said.err and path.read_bytes() == before, "nothing was left to measure"
        assert json.loads((folder / "bench.json").read_text())["complete"]
    assert reproduce(*words, "--limit", 1) == 2
    refused(capsys.readouterr(), "began with other settings")


# Made of what lies there


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    for task in ("docs", "code", "kv"):
        stored.write_offline(folder, task, LENGTHS, COUNT)
        stored.write_live(folder, task, LENGTHS, COUNT)
    return folder


@pytest.fixture(scope="module")
def made(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tables and figures of it, one of them drawn."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        assert reproduce("figure2", "--out", out, "--work", work) == 0
        patch.setattr(figure, "save", lambda *_: None)
        for name in TABLES:
            assert reproduce(name, "--out", out, "--work", work) == 0
    return out


def rows_of(work: Path, task: str, length: int) -> dict[str, np.ndarray]:
    """tau_fs of each method by request, counted here."""
    lines = (work / f"offline-{task}.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["length"] == length and row["leading"]["full"]]
    return {name: np.array([1 + np.mean(row["leading"][name]) for row in rows]) for name in rows[0]["leading"]}


def close(found: dict[str, float], values: np.ndarray) -> None:
    """The mean, and an interval by another stream of draws."""
    assert found["mean"] == pytest.approx(values.mean())
    drawn = np.random.default_rng(5).choice(values, (20_000, len(values))).mean(axis=1)
    wide = found["high"] - found["low"]
    ends = np.quantile(drawn, [0.025, 0.975])
    assert (found["low"], found["high"]) == pytest.approx(ends, abs=0.06 * wide + 1e-9)


def read(made: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made / f"{name}.json").read_text())
    assert found["name"] == name and found["mirrors"] and found["differs"] and found["origins"][0]["plan"]
    assert not any(str(part).startswith("/") for part in found["command"])
    return found


def test_the_table_of_all_methods(made: Path, work: Path) -> None:
    cells = read(made, "all_methods")["cells"]
    kinds = [(cell["task"], cell["length"], cell["measure"]) for cell in cells]
    assert kinds == [(t, n, m) for t in ("docs", "code", "kv") for n in LENGTHS for m in ("tau_fs", "tau", "speedup")]
    for cell in cells:
        assert cell["n"] == COUNT
        assert cell["left_out"] == ({"short_output": 1} if cell["measure"] == "tau_fs" else {"clock": 1})
        if cell["measure"] == "tau_fs":
            taus = rows_of(work, cell["task"], cell["length"])
            for name in offline.METHODS.split(","):
                close(cell["methods"][name], taus[name])
                if name != "full":
                    close(cell["less full"][name], taus[name] - taus["full"])
    table = (made / "all_methods.md").read_text()
    assert "made anew at that position" in table and "mean representatives" in table and "| 8144   |" in table
    assert "8144 is the longest prompt" in table and "in a context of 8192" in table


def test_speedups_are_means_of_ratios_paired_by_request(made: Path, work: Path) -> None:
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for line in map(json.loads, (work / "live-kv" / "requests.jsonl").read_text().splitlines()):
        if line["length"] == 8144 and line["id"] != f"kv/{COUNT}":
            groups.setdefault(line["id"], {})[line["method"]] = line
    ratios = np.array([group["ar"]["tpot_ms"] / group["rerope"]["tpot_ms"] for group in groups.values()])
    taus = np.array([np.mean(group["full"]["commits"]) for group in groups.values()])
    (five,) = (c for c in read(made, "figure5")["cells"] if (c["task"], c["length"]) == ("kv", 8144))
    (two,) = (c for c in read(made, "figure2")["cells"] if (c["task"], c["length"]) == ("kv", 8144))
    close(five["methods"]["rerope"], ratios)
    close(two["tau"], taus)
    assert set(five["methods"]) == set(groups["kv/0"]) - {"ar", "ar again"}


def test_the_two_steps_from_full_to_fold(made: Path, work: Path) -> None:
    for name, task in (("table4", "code"), ("table11", "docs")):
        for cell in read(made, name)["cells"]:
            assert cell["task"] == task
            taus = rows_of(work, task, cell["length"])
            close(cell["steps"]["full to window"], taus["window"] - taus["full"])
            close(cell["steps"]["window to fold"], taus["fold"] - taus["window"])
            total = sum(step["mean"] for step in cell["steps"].values())
            assert total == pytest.approx(cell["tau"]["fold"]["mean"] - cell["tau"]["full"]["mean"])


def test_ratios_between_alphas_are_of_requests_over_all_lengths(made: Path, work: Path) -> None:
    groups = {"General": ("docs", "kv"), "Code": ("code",), "docs": ("docs",), "kv": ("kv",), "code": ("code",)}
    for row in read(made, "table5")["groups"] + read(made, "table12")["groups"]:
        taus = [rows_of(work, task, length) for task in groups[row["group"]] for length in LENGTHS]
        two, one, four = (np.concatenate([t[m] for t in taus]) for m in ("fold", "fold:alpha=1", "fold:alpha=4"))
        assert row["n"] == len(two)
        close(row["tau alpha 2"], two)
        close(row["ratios"]["alpha 2 vs 1"], two / one)
        close(row["ratios"]["alpha 4 vs 2"], four / two)


def test_a_ratio_is_marked_where_all_rounds_at_once_say_otherwise() -> None:
    """Nine short requests gain a little, a long one loses much: the mean ratio is above 1, the overall one below."""
    short = [Request("docs", 2048, str(i), 2048, {"a": 1.3, "b": 1.2}, {"a": 10, "b": 10}) for i in range(9)]
    long = Request("docs", 2048, "9", 2048, {"a": 2.0, "b": 2.1}, {"a": 900, "b": 900})
    found = alphas.compared([*short, long], "a", "b")
    assert found["low"] > 1 > found["overall"] and found["other_conclusion"]
    assert not alphas.compared(short, "a", "b")["other_conclusion"]


def test_a_figure_is_a_png_and_an_svg(made: Path) -> None:
    assert (made / "figure2.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (made / "figure2.svg").read_text()


# A process in which Ctrl-C comes as torch is about to be imported.
PRESSED = """
import os, runpy, signal, sys

class Press:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
sys.argv = ["scripts/reproduce", "table4", "--out", "out"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ctrl_c_while_modules_are_imported_ends_it() -> None:
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120, "preexec_fn": heed_ctrl_c}
    done = subprocess.run([sys.executable, "-c", PRESSED], **how)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "reproduce: stopped\n")


# Refused


def test_what_is_no_request_is_refused(tmp_path: Path) -> None:
    good = stored.write_offline(tmp_path, "docs", (1024,), 1)[0]
    changes: list[dict[str, Any]] = [{"run": 3}, {"task": None}, {"length": "3k"}, {"n_in": 1.5}, {"leading": 3}]
    changes += [{"leading": {"full": counts}} for counts in ([-1], [0.5], "12", None, [True])]
    lines = [json.dumps({**good, **change}) for change in changes]
    path = tmp_path / "offline-docs.jsonl"
    for line in [*lines, "3", "[]", "{", '{"task": "kv"}', "[" * 99999]:
        path.write_text(f"{json.dumps(good)}\n{line}\n")
        with pytest.raises(UsageError, match="line 2: is no request"):
            offline.rows_of(path, good["run"])
    path.write_text(json.dumps({**good, "run": "other"}) + "\n")
    with pytest.raises(UsageError, match="line 1: is of other settings"):
        offline.rows_of(path, good["run"])


def test_a_folder_that_is_none_of_a_bench_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored.write_live(tmp_path, "docs", (1024,), 2)
    folder, out = tmp_path / "live-docs", tmp_path / "out"
    good = json.loads((folder / "plan.json").read_text())
    bad: list[Any] = [{}, [], 3, {**good, "settings": 3}, {**good, "settings": {"methods": 3}}]
    bad += [{**good, "settings": {"methods": [["full"]]}}]
    bad += [{**good, "methods": each} for each in (None, 3, {}, {"full": 3}, {"full": {}})]
    for value in bad:
        (folder / "plan.json").write_text(json.dumps(value))
        assert reproduce("figure5", "--out", out, "--bench", folder) == 2, value
        refused(capsys.readouterr(), "plan.json" if value == 3 else str(folder))
    (folder / "plan.json").write_text(json.dumps(good))
    for words in (3, [3], "abc"):
        (folder / "bench.json").write_text(json.dumps({"command": words}))
        assert reproduce("figure5", "--out", out, "--bench", folder) == 2, words
        refused(capsys.readouterr(), "bench.json")


def test_a_request_of_another_task_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored.write_offline(tmp_path, "docs", (1024,), 2)
    for form in ("json", "jsonl"):
        (tmp_path / f"offline-docs.{form}").rename(tmp_path / f"offline-kv.{form}")
    assert reproduce("figure6", "--out", tmp_path, "--work", tmp_path) == 2
    refused(capsys.readouterr(), "offline-kv.jsonl: holds a request of docs")


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(
    tmp_path: Path, work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reproduce("figure2", "--out", tmp_path, "--work", work) == 0
    names = [f"figure2.{form}" for form in ("png", "svg", "md", "json")]
    before = [(tmp_path / name).read_bytes() for name in names]
    monkeypatch.setattr(store.os, "fsync", full_disk)
    assert reproduce("figure2", "--out", tmp_path, "--work", work) == 4
    assert "No space left" in capsys.readouterr().err
    assert [(tmp_path / name).read_bytes() for name in names] == before


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_tasks_of_several_settings_make_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("docs", "kv"):
        stored.write_offline(tmp_path, task, (1024,), 2)
    path = tmp_path / "offline-kv.json"
    path.write_text(path.read_text().replace("256", "128"))
    assert reproduce("figure6", "--out", tmp_path, "--work", tmp_path) == 2
    refused(capsys.readouterr(), "offline-kv.jsonl: is not of the settings of offline-docs.jsonl")


def test_without_matplotlib_nothing_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert reproduce("table4", "--out", tmp_path / "out") == 2
    refused(capsys.readouterr(), "matplotlib", "pip install 'foldspec[bench]'")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_used_ends_in_one_line(tmp_path: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, lone = ["--out", tmp_path / "out"], ["--target", ROOT / "tests/golden/pairs/a_llama_zlab/target"]
    cases: list[tuple[list[object], int]] = [
        (["table6"], 2),
        (["table4"], 2),
        (["table4", *out, "--tasks", "x"], 2),
        (["table4", *out, "--tasks", ""], 2),
        (["table4", *out, "--limit", 0], 2),
        (["table4", *out, "--max-new", 1], 2),
        (["table4", *out, "--seed", -1], 2),
        (["table4", *out, "--window", 0], 2),
        (["table4", *out, "--way", "both"], 2),
        (["table4", *out, "--nonsense"], 2),
        (["table4", *out, "--pair", "nonsense"], 2),
        (["table4", *out, *lone, "--drafter", "none"], 2),
        (["table4", *out, *lone, "--drafter", "lookup"], 2),
        (["table4", *out, *lone, "--drafter", tmp_path], 3),
        (["table4", *out, *lone], 2),
        (["table4", *out, "--pair", ""], 2),
        (["table4", *out, "--target", ""], 2),
        (["figure5", *out, "--work", work, "--bench", work / "live-docs"], 2),
        (["figure5", *out, "--bench", Path(__file__)], 2),
        (["table4", *out, "--work", tmp_path / "none"], 2),
        (["table4", *out, "--work", tmp_path], 2),
        (["table5", *out, "--bench", work / "live-docs"], 2),  # it has no other alphas
        (["figure5", *out, "--bench", tmp_path], 2),
        (["figure5", "--out", Path(__file__)], 4),
    ]
    for words, code in cases:
        assert reproduce(*words) == code, words
        refused(capsys.readouterr())
