"""Live tau and speedup by request: what ``foldspec bench`` keeps in a folder, made by it or by the same code here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from foldspec.bench import metrics
from foldspec.bench.inputs import Cell
from foldspec.bench.lines import check_line
from foldspec.bench.methods import AR_AGAIN
from foldspec.bench.session import Session
from foldspec.bench.settings import BenchSettings
from foldspec.bench.summary import pairs
from foldspec.cli_shared import ctrl_c_waits
from foldspec.engine import Engine
from foldspec.errors import UsageError
from reproduce import options
from reproduce.report import without_paths
from reproduce.requests import Request, Taken

METHODS = "full,window,shared_window,fold,streaming,yarn,rerope,infllm,cmr"


def measure(engine: Engine, chosen: argparse.Namespace, work: Path, task: str) -> None:
    """What ``foldspec bench PAIR --methods .. --tasks TASK .. --out WORK/live-TASK`` does; a folder that it made is
    taken as it is, or gone on with. Raises :class:`UsageError` for one of other settings."""
    settings = BenchSettings(
        methods=METHODS,
        tasks=task,
        lengths=chosen.live_lengths or chosen.lengths,
        limit=chosen.limit,
        max_new=chosen.max_new,
        seed=chosen.seed,
    )
    cells, cut = options.cells(engine, chosen, task, settings.lengths)
    keep(engine, settings, cells, work / f"live-{task}", cut)


def keep(
    engine: Engine, settings: BenchSettings, cells: Sequence[Cell], folder: Path, notices: Sequence[str] = ()
) -> None:
    """Measure into a bench folder what it lacks of these cells."""
    again = folder.is_dir() and any(folder.iterdir())

    def progress(stage: str, done: int, total: int) -> None:
        print(f"live {stage}, {done} of {total}", file=sys.stderr, flush=True)

    session = Session(
        engine, settings, cells, out=folder, resume=again, notices=notices, progress=progress, unbroken=ctrl_c_waits
    )
    try:
        if again and result(folder).get("complete") and all(session.store.has(i.key) for c in cells for i in c.inputs):
            return
        session.run()
        session.result(["reproduce", *sys.argv[1:]])
    finally:
        session.close()


def read(folders: Iterable[Path], tasks: Iterable[str]) -> Taken:
    """The requests of these tasks in bench folders, without the methods that were found not to say what plain decoding
    says: none of their figures counts. Raises :class:`UsageError` where there is none, or where folders
    are of several settings or machines."""
    taken, wanted = Taken("live"), list(tasks)
    for folder in folders:
        plan, bench = _json(folder / "plan.json"), result(folder)
        settings = plan.get("settings")
        if not isinstance(settings, dict) or not _words(settings.get("methods")):
            raise UsageError("says not what was measured", where=str(folder / "plan.json"))
        if not _words(command := bench.get("command", [])):
            raise UsageError("has no command", where=str(folder / "bench.json"))
        about = {key: bench.get(key) for key in ("complete", "created", "env")} | {"settings": settings}
        about["command"] = without_paths(command)
        taken.add(folder, {key: plan.get(key) for key in ("methods", "weights", "machine")}, about)
        taken.red.update(red := _red(bench, folder))
        cells, left_out = pairs(_lines(folder / "requests.jsonl"), [*settings["methods"], AR_AGAIN])
        taken.left_out.update({key: n for key, n in left_out.items() if key[0] in wanted})
        for (task, length), groups in cells.items():
            for whole in groups if task in wanted else ():
                group = {name: line for name, line in whole.items() if name not in red}
                tau = {name: metrics.tau(line["commits"]) or 0.0 for name, line in group.items()}
                rounds = {name: line["rounds"] for name, line in group.items()}
                tpot = {name: line["tpot_ms"] for name, line in group.items()}
                differs = frozenset(name for name, line in group.items() if line["first_diff"] is not None)
                one = next(iter(group.values()))
                taken.requests.append(Request(task, length, one["id"], one["n_in"], tau, rounds, tpot, differs))
    taken.requests.sort(key=lambda each: wanted.index(each.task))
    if not taken.requests:
        raise UsageError(f"hold no requests of {', '.join(wanted)}", where=", ".join(map(str, folders)) or "--bench")
    return taken


def _red(bench: dict[str, Any], folder: Path) -> dict[str, str]:
    """Methods that did not say what plain decoding says, and why."""
    found = bench.get("parity") or {}
    if not isinstance(found, dict) or not all(isinstance(one, dict) and "state" in one for one in found.values()):
        raise UsageError("has no verdicts on parity that can be read", where=str(folder / "bench.json"))
    return {name: str(one.get("why")) for name, one in found.items() if one["state"] == "red"}


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError("is not there: this is no folder of a bench", where=str(path)) from None
    except (ValueError, TypeError, RecursionError):
        raise UsageError("is not JSON", where=str(path)) from None


def result(folder: Path) -> dict[str, Any]:
    """``bench.json``; empty before the bench is done."""
    path = folder / "bench.json"
    return _json(path) if path.exists() else {}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: a bench may be writing there."""
    lines = []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            lines.append(json.loads(text))
        except (ValueError, RecursionError):
            raise UsageError("is not JSON", where=f"{path}, line {number}") from None
        check_line(lines[-1], f"{path}, line {number}")
    return lines
