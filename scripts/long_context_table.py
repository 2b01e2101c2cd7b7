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
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from _options import Parser, whole

from foldspec import Engine, SamplingParams
from foldspec.bench.bootstrap import interval
from foldspec.bench.fingerprint import fingerprint
from foldspec.bench.methods import check_drafts
from foldspec.bench.offline import leading_drafts, tau_fs
from foldspec.bench.timing import sha256_of
from foldspec.errors import FoldspecError, MeasurementError, ResourceError, UsageError
from foldspec.tasks import TASKS, make_task
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
                if done.token_ids != plain.token_ids:
                    raise MeasurementError(f"{name} is not plain decoding", where=item.id)
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
    for name, method in methods.items():
        check_drafts(name, options.draft_tokens, method.settings()["drafter"])
    run_id = identity(engine, options.tokens, options.seed)
    refuse_others(options.work, run_id)
    for task_name in options.tasks:
        task, path = make_task(task_name), options.work / f"{task_name}.jsonl"
        known = {(row["length"], row["id"]) for row in rows_of(path)}
        for length in options.lengths:
            room = min(LENGTHS[length], engine.max_context - options.tokens)
            for item in task.items(engine.encode, room, options.limit, options.seed):
                if (length, item.id) in known:
                    continue
                started = time.perf_counter()
                found = measure(engine, item, methods, options.tokens, length in LIVE)
                row = {"run": run_id, "task": task_name, "length": length, "id": item.id, "n_in": len(item.prompt)}
                row["input_sha256"] = sha256_of(item.prompt)
                append(path, {**row, **(found or {"n_out": 1})})
                print(f"{task_name} {length} {item.id}: {time.perf_counter() - started:.1f} s", flush=True)
    return {"settings": engine.settings(), "env": engine.env()}


def identity(engine: Engine, tokens: int, seed: int) -> str:
    """One word for all that requests must have in common, the drafter's weights included: a folder may be trained into
    again."""
    drafter = engine.resources.found.drafter
    weights = fingerprint(drafter.weights) if drafter is not None else None
    shared = json.dumps([weights, engine.settings(), METHODS, tokens, seed], sort_keys=True)
    return hashlib.sha256(shared.encode()).hexdigest()[:16]


def refuse_others(work: Path, run_id: str) -> None:
    for path in sorted(work.glob("*.jsonl")):
        if any(row.get("run") != run_id for row in rows_of(path)):
            what = "holds requests of another pair or of other settings"
            raise UsageError(what, where=str(path), do="choose another --work")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The requests in a file; a torn last line is dropped from it. Raises :class:`UsageError` for what is none."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    if lines[-1]:
        path.write_bytes(b"\n".join([*lines[:-1], b""]))
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(json.loads(line))
            check_row(rows[-1])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            where = f"{path}, line {number}"
            raise UsageError("is no request of this table", where=where, do="choose another --work") from None
    return rows


def check_row(row: Any) -> None:
    """Raises :class:`ValueError` or its like for what :func:`cells` could not sum up."""
    right = all(isinstance(row[name], str) for name in ("run", "task", "id")) and row["length"] in LENGTHS
    for tokens, rounds in row.get("live", {}).values():
        right = right and type(tokens) is type(rounds) is int and 1 <= rounds <= tokens
    for tau in row.get("offline", {}).values():
        right = right and 1 <= tau < float("inf")
    if not right:
        raise ValueError(row)


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


def named(known: Collection[str]) -> Callable[[str], list[str]]:
    """A reader of comma-separated names, each taken once."""

    def read(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r:.60} names others than {', '.join(known)}")
        return names

    return read


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--target", help="a folder or hub id in place of the pair's target")
    parser.add_argument("--drafter", help="the same for its drafter")
    parser.add_argument("--tasks", type=named(TASKS), default="docs,code,kv")
    parser.add_argument("--lengths", type=named(LENGTHS), default=",".join(LENGTHS))
    parser.add_argument("--limit", type=whole(1, 10_000), default=20, help="requests a task and length")
    parser.add_argument("--tokens", type=whole(2), default=64, help="new tokens a request")
    parser.add_argument("--draft-tokens", type=whole(1), help="drafts a round; all that the drafter has, if not given")
    parser.add_argument("--seed", type=whole(0, 1 << 62), default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, required=True, help="where requests are kept as they are done")
    parser.add_argument("--out", type=Path, help="write the report here")
    return parser.parse_args()


def measure_and_print() -> None:
    options = parse()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.out is not None and not (options.out.parent.is_dir() and not options.out.is_dir()):
        raise UsageError("is no place for a file", where=f"--out {options.out}")
    report = run(options)
    rows = [row for path in sorted(options.work.glob("*.jsonl")) for row in rows_of(path)]
    report["cells"] = list(cells(rows))
    report["command"] = {k: v for k, v in vars(options).items() if k not in ("work", "out", "target", "drafter")}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report["cells"]))


def main() -> int:
    try:
        measure_and_print()
    except FoldspecError as error:
        return fail(str(error), error.exit_code)
    except OSError as error:
        return fail(str(error), ResourceError.exit_code)
    except KeyboardInterrupt:
        return fail("stopped; the same command goes on from here", 130)
    return 0


def fail(what: str, code: int) -> int:
    print(f"long_context_table: {' '.join(what.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
