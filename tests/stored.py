"""Work folders as ``scripts/reproduce`` leaves them, of numbers that are made up and known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from reproduce import live, offline

ROUNDS = 30


def write_offline(
    work: Path, task: str, lengths: tuple[int, ...], count: int, *, seed: int = 0
) -> list[dict[str, Any]]:
    """``count`` requests a length, whose leading drafts are drawn; one more of which the target said too little."""
    draw, labels, rows = np.random.default_rng([seed, *task.encode()]), offline.METHODS.split(","), []
    work.mkdir(parents=True, exist_ok=True)
    methods = {label: {"pair": "made up", "target": {}, "window": 256, "max_context": 8192} for label in labels}
    head: dict[str, Any] = {"plan": {"methods": methods}, "env": {"device": "none"}, "created": "never"}
    (work / f"offline-{task}.json").write_text(json.dumps(head))
    for length in lengths:
        for i in range(count + 1):
            easy = draw.uniform(0.3, 0.7)
            leading = {
                label: draw.binomial(5, easy * (0.8 if label == "full" else 1), ROUNDS).tolist() for label in labels
            }
            row = {"run": offline.word(head["plan"]), "task": task, "length": length, "id": f"{task}/{i}"}
            rows.append(row | {"n_in": length, "leading": leading if i < count else {label: [] for label in labels}})
    (work / f"offline-{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_live(work: Path, task: str, lengths: tuple[int, ...], count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """A bench folder of ``count`` requests a length, and one more whose clock was disturbed; without bench.json."""
    draw, labels, lines = np.random.default_rng([seed, *task.encode()]), ["ar", *live.METHODS.split(",")], []
    folder = work / f"live-{task}"
    folder.mkdir(parents=True)
    methods = {label: {"pair": "made up", "target": {}, "window": 256, "max_context": 8192} for label in labels}
    settings = {"methods": labels, "tasks": [task]}
    plan = {"settings": settings, "methods": methods, "weights": {}, "machine": {"device": "none"}, "inputs": {}}
    (folder / "plan.json").write_text(json.dumps(plan))
    for length in lengths:
        for i in range(count + 1):
            for label in [*labels, "ar again"]:
                plain = label.startswith("ar")
                rounds = ROUNDS if plain else int(draw.integers(10, 25))
                commits = [1] * (rounds - 1) + [ROUNDS + 1 - rounds]
                ms = float(draw.uniform(9, 10) if plain else draw.uniform(5, 9))
                line = {"task": task, "length": length, "id": f"{task}/{i}", "method": label, "made_up": "", "order": 0}
                line |= {"input_sha256": "a" * 64, "n_in": length, "n_out": ROUNDS + 1, "finish": "length"}
                line |= {"rounds": rounds, "commits": commits, "ttft_ms": 1.0, "draft_prefill_ms": 0.0}
                line |= {"decode_ms": ms * ROUNDS, "tpot_ms": ms, "output_ids_sha256": "b" * 64, "first_diff": None}
                line |= {"clock_disturbed": i == count, "gap": None, "score": None, "bytes_a_round": 1}
                lines.append(line | {"parts_ms": None, "calibration": None})
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines
