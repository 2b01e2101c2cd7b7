"""Offline acceptance of every method by request, kept as it is measured: ``offline-TASK.jsonl`` in a work folder.

Beside it ``offline-TASK.json`` says on which weights and with which settings; requests of others are refused, not mixed
in. A line torn by a crash is dropped and that request is measured again.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from foldspec.bench.files import replace, write_json
from foldspec.bench.fingerprint import fingerprint
from foldspec.bench.inputs import Input
from foldspec.bench.machine import environment
from foldspec.bench.methods import AR, check_drafts, parse_methods
from foldspec.bench.offline import leading_drafts, tau_fs
from foldspec.bench.store import differences
from foldspec.engine import Engine
from foldspec.errors import UsageError
from foldspec.options import SamplingParams
from reproduce import options
from reproduce.requests import Request, Taken

METHODS = "full,window,shared_window,fold:alpha=1,fold,fold:alpha=4,streaming,yarn,rerope,infllm,cmr"


def measure(engine: Engine, chosen: argparse.Namespace, work: Path, task: str) -> None:
    """Measure what ``work`` does not have yet of a task."""
    methods = {m.label: engine.using(**m.changes) for m in parse_methods(METHODS) if m.label != AR}
    for label, one in methods.items():
        check_drafts(label, one.method.draft_tokens, one.settings()["drafter"])
    cells, _ = options.cells(engine, chosen, task, chosen.lengths)
    plan = _plan(engine, methods, chosen)
    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(work / f"offline-{task}.lock", timeout=0):
            run, path = _begin(work / f"offline-{task}.json", plan, engine), work / f"offline-{task}.jsonl"
            known = {(row["length"], row["id"]) for row in rows_of(path, run, mend=True)}
            for item in (item for cell in cells for item in cell.inputs):
                if (item.length, item.id) in known:
                    continue
                started = time.perf_counter()
                head = {"run": run, "task": task, "length": item.length, "id": item.id, "n_in": len(item.ids)}
                head["input_sha256"] = item.sha256
                append(path, head | _request(engine, item, methods, chosen.max_new))
                seconds = time.perf_counter() - started
                print(f"offline {task} {item.length} {item.id}: {seconds:.1f} s", file=sys.stderr, flush=True)
    except Timeout:
        raise UsageError("another process measures there", where=str(work / f"offline-{task}.jsonl")) from None


def _request(engine: Engine, item: Input, methods: Mapping[str, Engine], tokens: int) -> dict[str, Any]:
    """``leading``: of each method the leading right drafts by position; empty where the target says too little."""
    with engine.prefill(item.ids) as prefix:
        text = engine.using(draft_tokens=0).generate(prefix, SamplingParams(max_tokens=tokens))
        leading = leading_drafts(engine, prefix, text.token_ids, [one.method for one in methods.values()])
    kept = dict(zip(methods, leading, strict=True))
    return {"n_out": len(text.token_ids), "finish": text.finish_reason, "leading": kept}


def weights_of(engine: Engine) -> dict[str, str]:
    """Fingerprints of target and drafter."""
    found = engine.resources.found
    weights = {"target": fingerprint(found.target.weights)}
    if found.drafter is not None:
        weights["drafter"] = fingerprint(found.drafter.weights)
    return weights


def _plan(engine: Engine, methods: Mapping[str, Engine], chosen: argparse.Namespace) -> dict[str, Any]:
    """What all requests of a file have in common, the drafter's weights included: a folder may be trained into again.
    ``max_new`` is among it, since it decides where the context ends."""
    settings = {label: one.settings() for label, one in methods.items()}
    plan = {"methods": settings, "weights": weights_of(engine), "max_new": chosen.max_new, "seed": chosen.seed}
    return dict(json.loads(json.dumps(plan)))


def _begin(path: Path, plan: dict[str, Any], engine: Engine) -> str:
    """Write the head, or compare it. The word that lines of this run carry."""
    if path.exists():
        differing = list(differences(head_of(path)["plan"], plan))
        if differing:
            what = f"began with other settings or weights: {'; '.join(differing[:3])}"
            raise UsageError(what, where=str(path), do="give the same ones, or another --out")
    else:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_json(path, {"plan": plan, "env": environment(engine), "created": now})
    return word(plan)


def word(plan: Any) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def head_of(path: Path) -> dict[str, Any]:
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(head["plan"], dict) and isinstance(head["env"], dict)):
            raise ValueError(head)
        return dict(head)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError("says not what was measured", where=str(path), do="choose another folder") from None


def rows_of(path: Path, run: str, *, mend: bool = False) -> list[dict[str, Any]]:
    """The requests in a file, without a torn last line; ``mend`` drops it from the file too. Raises
    :class:`UsageError` for what is none, or of another run."""
    if not path.exists():
        return []
    *lines, torn = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
            _check(row)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError("is no request of this table", where=where, do="choose another folder") from None
        if row["run"] != run:
            raise UsageError("is of other settings or weights", where=where, do="choose another folder")
        rows.append(row)
    if torn and mend:
        replace(path, b"".join(line + b"\n" for line in lines))
    return rows


def _check(row: Any) -> None:
    """Raises :class:`ValueError` or its like for what could not be summed up."""
    right = all(isinstance(row[name], str) for name in ("run", "task", "id"))
    right = right and type(row["length"]) is type(row["n_in"]) is int and isinstance(row["leading"], dict)
    for counts in row["leading"].values():
        right = right and isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
    if not right:
        raise ValueError(row)


def read(work: Path, tasks: Iterable[str]) -> Taken:
    """Whatever lies there of these tasks. Raises :class:`UsageError` where that is nothing, or of several settings."""
    taken = Taken("offline")
    for task in tasks:
        path = work / f"offline-{task}.json"
        if not path.exists():
            continue
        head = head_of(path)
        taken.add(path.with_suffix(".jsonl"), head["plan"], {key: head[key] for key in head if key != "plan"})
        for row in rows_of(path.with_suffix(".jsonl"), word(head["plan"])):
            if row["task"] != task:
                raise UsageError(f"holds a request of {row['task']:.20}", where=str(path.with_suffix(".jsonl")))
            leading = {name: counts for name, counts in row["leading"].items() if counts}
            if not leading:
                taken.left_out[row["task"], row["length"], "short_output"] += 1
                continue
            tau = {name: tau_fs(counts) for name, counts in leading.items()}
            rounds = {name: len(counts) for name, counts in leading.items()}
            taken.requests.append(Request(row["task"], row["length"], row["id"], row["n_in"], tau, rounds))
    if not taken.requests:
        raise UsageError(f"holds no offline requests of {', '.join(tasks)}", where=str(work))
    return taken
