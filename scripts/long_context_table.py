"""tau of every method by length, live and offline: the README's long-context table.

    python scripts/long_context_table.py --work DIR [--tasks docs,code,kv] [--limit 20] [--out FILE.json]

Live: what decoding committed a round, at 512, 2k and 8k tokens. Offline: tau_fs of ``foldspec/bench/offline.py`` on the
target's own greedy text, at 512, 1k, 2k, 4k and 8k. The requests of a task end alike at every length and only reach
back further. One prefill a request serves all. Each request is appended to a file of its task in ``--work`` as soon as
it is done, and the same command skips it the next time, so tasks may also run in processes of their own; the table is
made of whatever lies there. Requests of another drafter, or run otherwise, are refused and not mixed in. Intervals: 95%
percentile bootstrap over requests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foldspec import Engine, SamplingParams
from foldspec.bench.bootstrap import interval
from foldspec.bench.offline import leading_drafts, tau_fs
from foldspec.tasks import make_task
from foldspec.tasks.base import Item

METHODS: dict[str, dict[str, Any]] = {
    "lookup": {"drafter": "lookup"},
    "full": {"context": "full"},
    "window": {"context": "window"},
    "fold 1": {"context": "fold", "alpha": 1.0},
    "fold 2": {"context": "fold", "alpha": 2.0},
    "fold 4": {"context": "fold", "alpha": 4.0},
}
LENGTHS = {"512": 512, "1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192}
LIVE = ("512", "2k", "8k")
PAIRS = (("fold 2", "full"), ("window", "full"), ("fold 2", "window"))


def measure(engine: Engine, item: Item, methods: dict[str, Engine], tokens: int, live: bool) -> dict[str, Any] | None:
    """One request's rounds and taus; None where the target says fewer than two tokens."""
    params = SamplingParams(max_tokens=tokens)
    with engine.prefill(item.prompt) as prefix:
        plain = engine.using(draft_tokens=0).generate(prefix, params)
        if len(plain.token_ids) < 2:
            return None
        found: dict[str, Any] = {"n_out": len(plain.token_ids), "finish": plain.finish_reason, "live": {}}
        if live:
            for name, one in methods.items():
                done = one.generate(prefix, params)
                assert done.token_ids == plain.token_ids, f"{item.id}: {name} is not plain decoding"
                found["live"][name] = [len(done.token_ids) - 1, len(done.rounds)]
        options = [one.method for one in methods.values()]
        leading = leading_drafts(engine, prefix, plain.token_ids, options)
        found["offline"] = {name: tau_fs(drafts) for name, drafts in zip(methods, leading, strict=True) if drafts}
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Do what is not done yet; what the report says of the engine."""
    engine = Engine.load(
        options.pair,
        target=options.target,
        drafter=options.drafter,
        threads=options.threads,
        draft_tokens=options.draft_tokens,
    )
    methods = {name: engine.using(**changes) for name, changes in METHODS.items()}
    run_id = identity(engine, options.tokens, options.seed)
    refuse_others(options.work, run_id)
    for task_name in options.tasks.split(","):
        task, path = make_task(task_name), options.work / f"{task_name}.jsonl"
        known = {(row["length"], row["id"]) for row in rows_of(path)}
        for length in options.lengths.split(","):
            room = min(LENGTHS[length], engine.max_context - options.tokens)
            for item in task.items(engine.encode, room, options.limit, options.seed):
                if (length, item.id) in known:
                    continue
                started = time.perf_counter()
                found = measure(engine, item, methods, options.tokens, length in LIVE)
                row = {"run": run_id, "task": task_name, "length": length, "id": item.id, "n_in": len(item.prompt)}
                row["input"] = hashlib.sha256(json.dumps(item.prompt).encode()).hexdigest()
                append(path, {**row, **(found or {"n_out": 1})})
                print(f"{task_name} {length} {item.id}: {time.perf_counter() - started:.1f} s", flush=True)
    return {"settings": engine.settings(), "env": engine.env()}


def identity(engine: Engine, tokens: int, seed: int) -> str:
    """One word for all that requests must have in common, the drafter's weights included: a folder may be trained into
    again."""
    drafter, digest = engine.resources.found.drafter, hashlib.sha256()
    for path in sorted(drafter.folder.glob("*.safetensors")) if drafter is not None else []:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update(json.dumps([engine.settings(), METHODS, tokens, seed], sort_keys=True).encode())
    return digest.hexdigest()[:16]


def refuse_others(work: Path, run_id: str) -> None:
    for path in sorted(work.glob("*.jsonl")):
        if any(row.get("run") != run_id for row in rows_of(path)):
            raise SystemExit(f"{path} holds requests of another pair or of other settings: choose another --work")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The requests in a file; a torn last line is dropped from it."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    if lines[-1]:
        path.write_bytes(b"\n".join([*lines[:-1], b""]))
    return [json.loads(line) for line in lines[:-1]]


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cells(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A cell a task, length and way of measuring: each method's mean tau with its interval, and paired differences."""
    for task in sorted({row["task"] for row in rows}):
        for length in LENGTHS:
            here = [row for row in rows if (row["task"], row["length"]) == (task, length)]
            for way in ("live", "offline"):
                taus = [tau_of(row, way) for row in here]
                taus = [one for one in taus if len(one) == len(METHODS)]
                if not taus:
                    continue
                cell: dict[str, Any] = {"task": task, "length": length, "way": way, "requests": len(taus)}
                cell["left_out"] = len(here) - len(taus)
                for name in METHODS:
                    cell[name] = summary([one[name] for one in taus])
                for a, b in PAIRS:
                    cell[f"{a} - {b}"] = summary([one[a] - one[b] for one in taus])
                yield cell


def tau_of(row: dict[str, Any], way: str) -> dict[str, float]:
    if way == "offline":
        return dict(row.get("offline", {}))
    return {name: tokens / rounds for name, (tokens, rounds) in row.get("live", {}).items()}


def summary(values: Sequence[float]) -> list[float]:
    """Mean, and the low and high end of its interval."""
    low, high = interval(values)
    return [round(float(x), 4) for x in (sum(values) / len(values), low, high)]


def table(found: Sequence[dict[str, Any]]) -> str:
    names = [*METHODS, "fold 2 - full", "fold 2 - window"]
    lines = ["| task | length | | n | " + " | ".join(names) + " |", "|---" * (4 + len(names)) + "|"]
    for cell in found:
        values = [f"{mean:.2f} [{low:.2f}, {high:.2f}]" for mean, low, high in (cell[name] for name in names)]
        head = [cell["task"], cell["length"], cell["way"], str(cell["requests"])]
        lines.append("| " + " | ".join(head + values) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--target", help="a folder or hub id in place of the pair's target")
    parser.add_argument("--drafter", help="the same for its drafter")
    parser.add_argument("--tasks", default="docs,code,kv")
    parser.add_argument("--lengths", default=",".join(LENGTHS))
    parser.add_argument("--limit", type=int, default=20, help="requests a task and length")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a request")
    parser.add_argument("--draft-tokens", type=int, help="drafts a round; all that the drafter has, if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, required=True, help="where requests are kept as they are done")
    parser.add_argument("--out", type=Path, help="write the report here")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    report = run(options)
    rows = [row for path in sorted(options.work.glob("*.jsonl")) for row in rows_of(path)]
    report["cells"] = list(cells(rows))
    report["command"] = {k: v for k, v in vars(options).items() if k not in ("work", "out", "target", "drafter")}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report["cells"]))


if __name__ == "__main__":
    main()
