"""``scripts/long_context_table.py``: its figures from rows that are known, and what it does on resuming."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from foldspec.bench.offline import tau_fs

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
    with pytest.raises(SystemExit, match=r"docs\.jsonl holds requests of another pair"):
        script.refuse_others(tmp_path, "b")
    (tmp_path / "kv.jsonl").write_text(json.dumps({"task": "kv"}) + "\n")
    with pytest.raises(SystemExit, match=r"kv\.jsonl"):
        script.refuse_others(tmp_path, "a")


def test_tau_fs_is_one_more_than_the_leading_drafts() -> None:
    assert tau_fs([0, 7, 2, 0]) == 3.25
