"""What ``fold_auto`` and its fixed arms do live, kept request by request in ``adaptive-TASK.jsonl`` of a work folder,
whose first line says with which settings. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from filelock import FileLock, Timeout

from foldspec.bench.files import replace
from foldspec.bench.machine import environment
from foldspec.context import METHODS
from foldspec.context.base import Read
from foldspec.context.fold_auto import FoldAuto
from foldspec.engine import Engine
from foldspec.errors import MeasurementError, UsageError
from foldspec.options import SamplingParams
from reproduce.offline import append, weights_of
from reproduce.options import cells

if TYPE_CHECKING:
    import torch

AUTO = "fold_auto"
FIXED = {"window": (0.0,), "fold:alpha=1": (1.0,), "fold": (2.0,), "fold:alpha=4": (4.0,)}


class Watched(FoldAuto):
    """Leaves the sharpness and the modelled cost of each round that drafts."""

    rounds: ClassVar[list[tuple[float, float]]] = []

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        if layer == 0 and q is not None:
            self.rounds.append((self.options.auto_alphas[state.arm], self.cost(state, n)))
        return super().reads(layer, state, n, q)


def measure(engine: Engine, chosen: argparse.Namespace, work: Path, task: str) -> None:
    """Measure what ``work`` does not have yet of a task. Raises :class:`UsageError` for a file of other settings or
    weights, and for one that another process measures into."""
    METHODS["watched"] = f"{__name__}:Watched"
    methods = {name: engine.using(context="watched", auto_alphas=alphas) for name, alphas in FIXED.items()}
    methods[AUTO] = engine.using(context="watched")
    settings = {name: one.settings() for name, one in methods.items()}
    plan = {"methods": settings, "weights": weights_of(engine), "seed": chosen.seed, "max_new": chosen.max_new}
    inputs = [one for cell in cells(engine, chosen, task, chosen.lengths)[0] for one in cell.inputs]
    work.mkdir(parents=True, exist_ok=True)
    path = work / f"adaptive-{task}.jsonl"
    try:
        with FileLock(path.with_suffix(".lock"), timeout=0):
            if not path.exists():
                replace(path, f"{json.dumps({'plan': plan, 'about': {'env': environment(engine)}})}\n".encode())
            head, rows = read(path)
            if head["plan"] != json.loads(json.dumps(plan)):
                what = "began with other settings or weights"
                raise UsageError(what, where=str(path), do="give the same ones, or another --out")
            known = {(row["length"], row["id"]) for row in rows}
            for one in inputs:
                if (one.length, one.id) not in known:
                    found = decode(engine, methods, one.ids, chosen.max_new)
                    append(path, {"task": task, "length": one.length, "id": one.id, "n_in": len(one.ids), **found})
                    print("adaptive", *one.key, file=sys.stderr, flush=True)
    except Timeout:
        raise UsageError("another process measures there", where=str(path)) from None


def decode(engine: Engine, methods: Mapping[str, Engine], prompt: tuple[int, ...], tokens: int) -> dict[str, Any]:
    """Of each method the tokens, rounds and cost of a request, no method where the target says less than a round; and
    the rounds of fold_auto by sharpness. Raises :class:`MeasurementError` where outputs differ."""
    found: dict[str, Any] = {}
    with engine.prefill(prompt) as prefix:
        ids: tuple[int, ...] = ()
        for name, method in methods.items():
            Watched.rounds.clear()
            done = method.generate(prefix, SamplingParams(max_tokens=tokens))
            ids = ids or done.token_ids
            if done.token_ids != ids:
                raise MeasurementError("gives another output than the method before it", where=name)
            if done.rounds:
                # the last round may have had no place left for drafts, and then read nothing
                cost = sum(cost for _, cost in Watched.rounds) + len(done.rounds) - len(Watched.rounds)
                count = sum(len(one.committed) for one in done.rounds)
                found[name] = {"tokens": count, "rounds": len(done.rounds), "cost": cost}
    arms = Counter(f"{alpha:g}" for alpha, _ in Watched.rounds)
    return {"methods": found, "arms": dict(arms)}


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The head and the requests of a file, without a torn last line, which is dropped. Raises :class:`UsageError`."""
    *lines, torn = path.read_bytes().split(b"\n")
    try:
        head, *rows = (json.loads(line) for line in lines)
        if not isinstance(head["plan"], dict) or not isinstance(head["about"], dict):
            raise ValueError(head)
        for row in rows:
            _check(row, path.stem)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError("is no file of this comparison", where=str(path), do="choose another --out") from None
    if torn:
        replace(path, b"".join(line + b"\n" for line in lines))
    return head, rows


def _check(row: Any, stem: str) -> None:
    """Raises :class:`ValueError` or its like for what could not be summed up with the rest of its file."""
    methods = row["methods"]
    right = f"adaptive-{row['task']}" == stem and isinstance(row["id"], str)
    right = right and type(row["length"]) is type(row["n_in"]) is int
    right = right and (not methods or set(methods) == {*FIXED, AUTO})
    right = right and all(type(count) is int and count >= 0 for count in row["arms"].values())
    for one in methods.values():
        right = right and type(one["tokens"]) is type(one["rounds"]) is int and min(one["tokens"], one["rounds"]) > 0
        right = right and isinstance(one["cost"], float | int) and 0 < one["cost"] < math.inf
    if not right:
        raise ValueError(row)
