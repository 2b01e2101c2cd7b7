"""``--ray``: the same results from two actors as from one process, and what is left when actors or the command die."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cli.command import Result, command, main, pair_words, refused, result, start

TIMES = ("ttft_ms", "draft_prefill_ms", "decode_ms", "tpot_ms", "clock_disturbed")  # a machine's, not the method's
POINTS = ("--draft-tokens", "4", "--leniency", "0,0.5", "--temperature", "1", "--warmup", "1", "--bootstrap", "100")
INPUTS = ("--tasks", "random", "--max-new", "12", "--threads", "1", "--ignore-eos", "--format", "json")
RUNS = 5  # a request: plain decoding twice, two points, the drafter alone
TWO = ("--ray", "--ray-actors", "2")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def words(*more: object) -> list[str]:
    return command("pareto", *pair_words(), *POINTS, *INPUTS, *more)


def lines(out: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """By request and method, without what is a machine's."""
    found = {}
    for text in (out / "requests.jsonl").read_text().splitlines():
        line = json.loads(text)
        for run in (line["calibration"] or {}).values():
            run.pop("ms", None)
        key = line["task"], line["length"], line["id"], line["method"]
        assert key not in found
        found[key] = {name: value for name, value in line.items() if name not in (*TIMES, "device")}
    return found


def requests(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a result, in its order, without what is a machine's."""
    table = report["requests"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def quality(report: dict[str, Any]) -> list[list[Any]]:
    """Of each point all that no clock has a part in."""
    names = ("task", "length", "method", "kind", "n", "score", "logprob", "agreement", "agreement_modelled")
    return [[point[name] for name in names] for point in report["pareto"]["points"]]


def descendants(process: int) -> dict[int, str]:
    """The processes below one, with the names they go by."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    below = {process}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return {child: names[child] for child in below - {process}}


def wait_for_lines(out: Path, process: Any) -> None:
    end, path = time.monotonic() + 120, out / "requests.jsonl"
    while not path.exists() or not path.read_bytes():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)


def wait_for_the_end(processes: Iterable[int]) -> None:
    end = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < end, [process for process in processes if Path(f"/proc/{process}").exists()]
        time.sleep(0.1)


@pytest.mark.slow
@needs_ray
def test_two_actors_give_what_one_process_gives(tmp_path: Path) -> None:
    """Field by field, but for times; and the one process goes on with what two began."""
    sizes = ("--lengths", "24,64", "--limit", "2")
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    first = result(start(tmp_path, words(*sizes, "--out", alone)))
    assert first.code == 0, first
    before = {path.name for path in Path("/tmp").glob("foldspec-*")}
    second = result(start(tmp_path, words(*sizes, "--out", spread, *TWO)))
    assert second.code == 0 and "Traceback" not in second.err, second
    assert {path.name for path in Path("/tmp").glob("foldspec-*")} <= before
    assert all(line.startswith("foldspec: ") for line in second.err.splitlines()), second.err
    assert lines(spread) == lines(alone) and len(lines(alone)) == 4 * RUNS
    assert (spread / "plan.json").read_text() == (alone / "plan.json").read_text()
    assert requests(second.json) == requests(first.json) and quality(second.json) == quality(first.json)
    devices = second.json["env"]["devices"]
    assert sum(one["requests"] for one in devices) == 4 and all(one["requests"] for one in devices)
    assert {one["machine"] for one in devices} == {0} and "devices" not in first.json["env"]

    path = spread / "requests.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[: 3 * RUNS]))
    resumed = result(start(tmp_path, words(*sizes, "--out", spread, "--resume")))
    assert resumed.code == 0 and resumed.json["resumed"] == 3, resumed
    assert requests(resumed.json) == requests(first.json) and quality(resumed.json) == quality(first.json)


@pytest.mark.slow
@needs_ray
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for actors in /proc")
def test_an_actor_that_dies_and_ctrl_c(tmp_path: Path) -> None:
    """The other actor goes on; Ctrl-C keeps what is done and leaves no actor; a run without Ray does the rest."""
    out, sizes = tmp_path / "out", ("--lengths", "24", "--limit", "16")
    process = start(tmp_path, words(*sizes, "--out", out, *TWO))
    wait_for_lines(out, process)
    below = descendants(process.pid)
    actors = [pid for pid, name in below.items() if name.startswith("ray::Hand")]
    assert len(actors) == 2
    os.kill(actors[0], signal.SIGKILL)
    assert any("is gone (" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    cut = result(process)
    assert cut.code == 130 and "interrupted; requests done: " in cut.err and "Traceback" not in cut.err, cut
    assert not cut.json["complete"] and any("is gone (" in line for line in cut.json["notices"])
    wait_for_the_end(below)
    count, torn = divmod(len(lines(out)), RUNS)
    assert 1 <= count < 16 and not torn
    done = result(start(tmp_path, words(*sizes, "--out", out, "--resume")))
    assert done.code == 0 and done.json["complete"] and done.json["resumed"] == count
    assert len(lines(out)) == 16 * RUNS


@needs_ray
def test_refusals_with_ray() -> None:
    """None of these begins a cluster, but for the last."""
    for word, code, says in (
        ("nonsense", 2, "--ray: must be local, auto or HOST:PORT, not 'nonsense'"),
        ("127.0.0.1:9", 4, "--ray 127.0.0.1:9: no Ray cluster answers there"),
    ):
        refused(bench("--ray", word), code, says)
    refused(bench(*TWO, "--device", "cuda:0"), 2, "--device cuda:0: is one device")


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(bench("--ray-actors", "2"), 2, "--ray-actors: needs --ray")
    refused(bench("--ray", "--ray-actors", "0"), 2, "--ray-actors: must be a whole number of at least 1, not 0")
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(bench("--ray"), 2, "--ray: Ray is not installed; pip install 'foldspec[ray]'")


def bench(*more: object) -> Result:
    return main("bench", *pair_words(), *INPUTS, "--lengths", "24", *more)


@pytest.mark.slow
@needs_ray
def test_more_actors_than_cores(tmp_path: Path) -> None:
    asked = start(tmp_path, words("--lengths", "24", "--ray", "--ray-actors", "4000"))
    refused(result(asked), 4, "--ray local: 4000 actors of a core or more were asked for, the cluster has ")
