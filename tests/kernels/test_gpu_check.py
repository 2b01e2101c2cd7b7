"""scripts/gpu_check.py where there is no GPU: it runs dry from one end to the other, finds a wrong kernel, keeps to its
time, and reports; and what it will ask of a GPU is what the ahead-of-time gate knows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu import report, right, rounds, rows, timings
from gpu.rows import Absent, Record, Row, Wrong
from gpu.setting import Setting
from tritons import NEWEST, TRITONS, environment

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/gpu_check.py"


def call(*words: object, version: str = NEWEST, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=environment(version, **more), capture_output=True, text=True)


def planned() -> dict[str, int]:
    """Rows of the dry program and their parts."""
    setting, ceiling = Setting(torch.device("cpu"), dry=True), timings.Ceiling()
    with ExitStack() as stack:
        found = [
            *right.rows(setting),
            *timings.rows(setting, ceiling),
            *rounds.rows(setting, ceiling, stack),
        ]
    return {row.name: row.part for row in found}


def dry(version: str, path: Path) -> None:
    done = call(SCRIPT, "--dry", "--out", path, version=version)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    result = json.loads(path.read_text())
    assert {row["name"]: row["part"] for row in result["rows"]} == planned()
    ends = {row["name"]: row["status"] for row in result["rows"]}
    assert {name for name, end in ends.items() if end != "done"} <= {"right/attention flash-attn"}
    assert result["machine"]["triton"] == version and result["dry"] and result["left"] == []
    figures = {row["name"]: row for row in result["rows"]}
    assert figures["time/attention tiny fold 60"]["us"] > 0
    assert figures["round/llama 120 fold"]["tau"] > 1 and figures["round/llama 120 ar"]["tau"] == 1
    assert figures["round/llama 120 fold"]["graphs"] == "recorded"


def test_dry(tmp_path: Path) -> None:
    dry(NEWEST, tmp_path / "check.json")


@pytest.mark.slow
@pytest.mark.parametrize("version", TRITONS[1:])
def test_dry_with_an_older_triton(version: str, tmp_path: Path) -> None:
    dry(version, tmp_path / "check.json")


PLANTED = """
import importlib.util, pathlib, sys
sys.path[:0] = ["scripts", "tests"]
import gpu_check
from foldspec.kernels import gate_mul
from foldspec.kernels.gate_mul import triton_kernels as whole
text = pathlib.Path(whole.__file__).read_text()
assert text.count("0.044715") == 1
path = pathlib.Path(sys.argv[1])
path.write_text(text.replace("0.044715", "0.054715"))
spec = importlib.util.spec_from_file_location("planted", path)
planted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted)
sys.modules[whole.__name__] = gate_mul.triton_kernels = planted
only = "right/gate_mul", "time/gate_mul", "time/rms_norm"
sys.exit(gpu_check.main(["--dry", "--out", sys.argv[2], "--only", *only]))
"""


def test_a_wrong_kernel_is_found_and_not_timed(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    done = call("-c", PLANTED, tmp_path / "planted.py", path, TRITON_INTERPRET="1")
    assert done.returncode == 1, done.stdout + done.stderr
    ends = {row["name"]: row["status"] for row in json.loads(path.read_text())["rows"]}
    assert ends.pop("right/gate_mul triton gelu fp32") == "wrong"
    assert ends.pop("time/gate_mul triton gate of 10 rows") == "stopped"
    assert set(ends.values()) == {"done"} and "time/rms_norm triton norm of 10 rows" in ends


def test_a_budget_of_seconds(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    done = call(SCRIPT, "--dry", "--out", path, "--budget", 9, "--only", "right/rms", "time/rms", "ceiling")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    ends = {row["name"]: row["status"] for row in result["rows"]}
    assert ends["time/rms_norm triton norm of 10 rows"] == "done"  # may take 8 seconds; all the others may take more
    assert result["left"] == [name for name, end in ends.items() if end == "left"]
    assert len(result["left"]) == len(ends) - 1
    assert all("s left, it may take" in row["why"] for row in result["rows"] if row["status"] == "left")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--part", "1"]) == 2
    assert capsys.readouterr().err == "gpu_check: there is no GPU here; use --dry\n"


def test_no_row_of_that_name_is_an_error(tmp_path: Path) -> None:
    done = call(SCRIPT, "--dry", "--out", tmp_path / "check.json", "--only", "right/nothing")
    assert done.returncode == 2 and "no row" in done.stderr and not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------------- rows


def raising(error: Exception) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        raise error

    return run


def test_every_end_of_a_row(tmp_path: Path) -> None:
    written: list[dict[str, str]] = []
    path = tmp_path / "there" / "check.json"

    def look() -> dict[str, Any]:
        written.append({row["name"]: row["status"] for row in json.loads(path.read_text())["rows"]})
        return {"figure": 1.5, "endless": float("inf")}

    def slow() -> dict[str, Any]:
        time.sleep(5)
        return {}

    plan = [
        Row("a/right", 1, 1, look),
        Row("a/wrong", 1, 1, raising(Wrong("off by one"))),
        Row("b/broken", 1, 1, raising(ValueError("no\nmore"))),
        Row("c/slow", 1, 0.1, slow),
        Row("d/absent", 1, 1, raising(Absent("no such tool"))),
        Row("time/a", 2, 1, look, ("a/",)),
        Row("time/c", 2, 1, look, ("x/", "c/")),
        Row("time/d", 2, 1, look, ("d/", "e/")),
        Row("last", 2, 1000, look),
    ]
    told: list[str] = []
    record = Record(path, {"machine": "some"}, plan)
    rows.run(plan, record, 100, told.append)
    result = json.loads(path.read_text())
    by_name = {row.pop("name"): row for row in result["rows"]}
    assert {name: row["status"] for name, row in by_name.items()} == {
        "a/right": "done", "a/wrong": "wrong", "b/broken": "failed", "c/slow": "late", "d/absent": "absent",
        "time/a": "stopped", "time/c": "stopped", "time/d": "done", "last": "left",
    }  # fmt: skip
    assert by_name["a/right"]["figure"] == 1.5 and by_name["a/right"]["endless"] is None
    assert by_name["b/broken"]["why"].startswith("ValueError: no (test_gpu_check.py:")
    assert by_name["time/a"]["why"] == "a/wrong is wrong" and by_name["c/slow"]["seconds"] < 3
    assert result["left"] == ["last"] and result["machine"] == "some" and len(told) == len(plan)
    # what was planned stood in the file from the beginning, and what was done before the next row began
    assert set(written[0].values()) == {"planned"} and len(written[0]) == len(plan)
    assert written[1]["c/slow"] == "late" and written[1]["last"] == "planned"
    assert list(path.parent.iterdir()) == [path]


def test_time_that_others_took_does_not_count_where_it_is_told_so(tmp_path: Path) -> None:
    def wait() -> dict[str, Any]:
        time.sleep(0.3)
        return {}

    def work() -> dict[str, Any]:
        end = time.process_time() + 5
        while time.process_time() < end:
            pass
        return {}

    plan = [Row("waits", 1, 0.1, wait), Row("works", 1, 0.1, work)]
    record = Record(tmp_path / "check.json", {}, plan)
    rows.run(plan, record, 10, lambda line: None, rows.BUSY)
    assert [line["status"] for line in record.lines.values()] == ["done", "late"]


HANGS = """
import pathlib, signal, sys, time
from gpu import rows
def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)
    return {}
rows.GRACE = 0.2
plan = [rows.Row("one", 1, 0.1, dict), rows.Row("two", 1, 0.1, hang), rows.Row("three", 1, 0.1, dict)]
rows.run(plan, rows.Record(pathlib.Path(sys.argv[1]), {}, plan), 0.5, print)
"""


def test_what_cannot_be_interrupted_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    start = time.monotonic()
    done = call("-c", HANGS, path)
    assert done.returncode == 3 and time.monotonic() - start < 30, done.stderr
    result = json.loads(path.read_text())
    assert [row["status"] for row in result["rows"]] == ["done", "late", "planned"] and result["ended"] == "two hung"


# ------------------------------------------------------------------------------------------------------------- report


def document(**figures: dict[str, Any]) -> dict[str, Any]:
    machine = {"device": "a GPU", "torch": "2", "triton": "3", "nvcc": "13", "commit": "c0ffee", "nvidia": None}
    made = [{"part": 1, "status": "done", **row, "name": name} for name, row in figures.items()]
    return {"dry": False, "at": "now", "machine": machine, "rows": made}


LLAMA = "round/llama-3.1-8b-dflash"
FIGURES: dict[str, dict[str, Any]] = {
    "right/gate_mul triton silu": {"error": 1e-3, "tolerance": 1e-2},
    "right/attention flash-attn": {"status": "absent", "why": "not installed"},
    "time/attention Llama-3.1-8B fold 131072": {"us": 180.0, "floor_us": 126.0, "share": 0.7},
    f"{LLAMA} 1024 ar": {"ms": 4.0, "floor_ms": 3.0, "share": 0.75, "tau": 1.0, "graphs": "recorded"},
    f"{LLAMA} 131072 full": {"ms": 11.5, "floor_ms": 8.0, "share": 0.7, "tau": 2.3, "graphs": "recorded"},
    f"{LLAMA} 131072 fold": {"ms": 11.75, "floor_ms": 8.0, "share": 0.7, "tau": 3.8, "graphs": "recorded"},
    f"{LLAMA} 131072 ar": {"status": "left", "why": "3 s left, it may take 25"},
}


def verdicts(*documents: dict[str, Any]) -> list[str]:
    return [line.rpartition(": ")[2] for line in report.lines(list(documents)) if line.startswith("target, ")]


def test_report() -> None:
    assert verdicts(document(**FIGURES)) == ["met (0)", "not met (0.75)", "not measured", "met (180)", "met (0.25)"]
    text = "\n".join(report.lines([document(**FIGURES)]))
    assert "11.8 ms, floor 8 (70% of the copy ceiling), tau 3.8, graphs: recorded" in text.replace("11.75", "11.8")
    assert "with fold, on an H100, mean of four tasks: 12.3 ms; here 11.8 ms" in text
    assert "with cmr, on an H100, mean of four tasks: 14 ms; here not measured" in text
    assert text.endswith(f"left: {LLAMA} 131072 ar")
    wrong = {**FIGURES, "right/verify cuda": {"status": "wrong", "why": "off"}}
    slow = {"time/attention Llama-3.1-8B fold 131072": {"us": 181.0}, f"{LLAMA} 131072 full": {"ms": 11.4}}
    assert verdicts(document(**wrong), document(**slow))[0] == "not met (1)"
    assert verdicts(document(**wrong), document(**slow))[3:] == ["not met (181)", "not met (0.35)"]
    unknown = {**FIGURES, "right/verify cuda": {"status": "late"}}
    assert verdicts(document(**unknown))[0] == verdicts(document())[0] == "not measured"


def test_a_dry_run_meets_nothing() -> None:
    text = list(report.lines([{**document(**FIGURES), "dry": True}]))
    assert {line.rpartition(": ")[2] for line in text if line.startswith("target, ")} == {"not measured"}
    assert text[1].startswith("DRY: ")


def test_a_file_that_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some.json"
    for content in ("", "[]", "{}", '{"rows": [{}]}', '{"rows": [], "machine": null}'):
        path.write_text(content)
        assert report.show([path]) == 2
        assert "no result of a check" in capsys.readouterr().out
    path.write_text(json.dumps(document(**FIGURES)))
    assert report.show([path]) == 0


# ---------------------------------------------------------------------------------------------- what a GPU is asked for


def asked(version: str, *names: str) -> None:
    done = call("tests/fake_gpu.py", *names, version=version)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_the_gate_knows_what_kernels_and_rounds_ask_for() -> None:
    asked(NEWEST, "kernels", rounds.PLAN[0].pair)


@pytest.mark.slow
@pytest.mark.parametrize("version", TRITONS)
def test_the_gate_knows_every_pair(version: str) -> None:
    asked(version, "kernels", *dict.fromkeys(cells.pair for cells in rounds.PLAN))


UNKNOWN = """
import torch, fake_gpu
from foldspec.kernels.rms_norm.triton import launch
x, weight = (torch.empty(*shape, device="meta") for shape in ((3, 2, 40), (40,)))
with fake_gpu.there() as missed:
    launch(x, weight, x, 1e-6)()
(line,) = missed
assert line.startswith("rms_norm: not in the gate: ") and "('WIDTH', '40')" in line, line
"""


def test_what_the_gate_does_not_know_is_not_compiled() -> None:
    done = call("-c", UNKNOWN)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
