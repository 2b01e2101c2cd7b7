"""``scripts/long_context_table.py``: its figures from rows that are known, and what it does on resuming."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cli.command import PAIR

from foldspec.bench.offline import tau_fs
from foldspec.errors import UsageError

SCRIPT = Path(__file__).parents[2] / "scripts" / "long_context_table.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("long_context_table", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load()


def rows(n: int) -> list[dict[str, Any]]:
    """``n`` requests: method ``k`` has 60 + k tokens in a number of rounds of its own; one more without a figure."""
    draw, found = np.random.default_rng(0), []
    for i in range(n):
        live = {name: [60 + k, int(draw.integers(20, 60))] for k, name in enumerate(script.METHODS)}
        offline = {name: float(draw.uniform(1, 3)) for name in script.METHODS}
        found.append({"run": "a", "task": "docs", "length": "2k", "id": f"docs/{i}", "live": live, "offline": offline})
    return [*found, {"run": "a", "task": "docs", "length": "2k", "id": "docs/99", "n_out": 1}]


def test_a_cell_is_the_mean_of_its_requests_and_differences_are_paired() -> None:
    asked = rows(24)
    live, offline = script.cells(asked)
    assert (live["way"], live["requests"], live["left_out"]) == ("live", 24, 1) and offline["way"] == "offline"
    taus = {name: np.array([r["live"][name][0] / r["live"][name][1] for r in asked[:24]]) for name in script.METHODS}
    draw = np.random.default_rng(5)  # another stream: intervals agree but for the noise of resampling
    for name, values in [*taus.items(), ("fold 2 - full", taus["fold 2"] - taus["full"])]:
        mean, low, high = live[name]
        assert mean == pytest.approx(values.mean(), abs=1e-4)
        resampled = draw.choice(values, (20_000, 24)).mean(axis=1)
        assert (low, high) == pytest.approx(np.quantile(resampled, [0.025, 0.975]), abs=0.06 * (high - low) + 1e-3)
    wanted = np.mean([r["offline"]["fold 1"] for r in asked[:24]])
    assert offline["fold 1"][0] == pytest.approx(wanted, abs=1e-4)
    line = script.table([live]).splitlines()[2]
    assert line.startswith("| docs | 2k | live | 24 | ") and f"{live['full'][0]:.2f}" in line


def test_a_request_torn_by_a_crash_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    for row in rows(2):
        script.append(path, row)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"run": "a", "id"')
    assert script.rows_of(path) == rows(2) and path.read_bytes() == whole
    assert script.rows_of(tmp_path / "none.jsonl") == []


def test_requests_of_another_run_are_refused(tmp_path: Path) -> None:
    script.append(tmp_path / "docs.jsonl", rows(1)[0])
    script.refuse_others(tmp_path, "a")
    with pytest.raises(UsageError, match="holds requests of another pair"):
        script.refuse_others(tmp_path, "b")


def test_what_is_no_request_is_refused(tmp_path: Path) -> None:
    good = rows(1)[0]
    changes: list[dict[str, Any]] = [{"run": 3}, {"task": None}, {"length": "3k"}, {"length": []}, {"live": 3}]
    changes += [{"live": {"full": pair}} for pair in ([3, 0], [1, 2], [3], "ab", None, [3.5, 2])]
    changes += [{"offline": {"full": tau}} for tau in (0.5, "2", None, math.nan, math.inf)]
    path = tmp_path / "docs.jsonl"
    for line in [json.dumps({**good, **change}) for change in changes] + [
        "3",
        "[]",
        "{",
        '{"task": "kv"}',
        "[" * 99999,
    ]:
        path.write_text(f"{json.dumps(good)}\n{line}\n")
        with pytest.raises(UsageError, match="line 2: is no request"):
            script.rows_of(path)


def test_what_cannot_be_used_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, pair = ["--work", str(tmp_path / "work")], ["--target", str(PAIR / "target")]
    cases = [
        (["--tasks", "x"], 2),
        (["--tasks", ""], 2),
        (["--lengths", "3k"], 2),
        (["--limit", "0"], 2),
        (["--tokens", "1"], 2),
        (["--draft-tokens", "0"], 2),
        (["--seed", "-1"], 2),
        (["--threads", "0"], 2),
        (["--out", str(tmp_path)], 2),
        (["--out", str(tmp_path / "none" / "file")], 2),
        (["--pair", "nonsense"], 2),
        (["--nonsense"], 2),
        ([*pair, "--drafter", "none"], 2),
        ([*pair, "--drafter", "lookup"], 2),
        ([*pair, "--drafter", str(tmp_path)], 3),
        (["--work", str(SCRIPT)], 4),
    ]
    for words, code in cases:
        monkeypatch.setattr("sys.argv", ["long_context_table.py", *work, *words])
        assert script.main() == code, words
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("long_context_table: ") and said.err.count("\n") == 1, said


def test_tau_fs_is_one_more_than_the_leading_drafts() -> None:
    assert tau_fs([0, 7, 2, 0]) == 3.25
