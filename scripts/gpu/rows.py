"""Rows of the check, one after another: each with time of its own, written down before the next one begins.

What is planned stands in the file from the beginning, so that it says at any moment what was done and what was not.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["BAD", "BUSY", "WALL", "Absent", "Record", "Row", "Timer", "Wrong", "run"]

# How a row may end:
#   done      its numbers are there            absent    something it needs is not on this machine
#   wrong     a kernel's numbers are not true  failed    an error ended it
#   late      its own time was over            stopped   a row that it needs was wrong, late or failed
#   left      no time for it; not begun        planned   not reached: the program was ended from outside
BAD = ("wrong", "failed", "late")
GRACE = 20.0  # seconds beyond the budget after which whatever hangs is ended

Numbers = dict[str, Any]


class Timer(NamedTuple):
    """Which time counts: a clock, the timer that goes by it, and that one's signal."""

    clock: Callable[[], float]
    which: int
    signal: signal.Signals


WALL = Timer(time.monotonic, signal.ITIMER_REAL, signal.SIGALRM)
BUSY = Timer(
    time.process_time, signal.ITIMER_PROF, signal.SIGPROF
)  # what this process computes: others may be busy too


class Absent(Exception):
    """What a row needs is not here; the message says what."""


class Wrong(Exception):
    """A kernel's numbers are not true; the message says where."""


class _Late(BaseException):  # whatever catches an Exception lets it through
    """A row's time is over."""


@dataclass(frozen=True)
class Row:
    """``run`` gives its numbers, as JSON has them, within ``seconds``; ``needs``: beginnings of names of earlier rows
    that must not have gone wrong, if they are run at all."""

    name: str
    part: int
    seconds: float
    run: Callable[[], Numbers]
    needs: tuple[str, ...] = ()


class Record:
    """The JSON file: ``about`` (the machine and how the program was called) and a line for each row."""

    def __init__(self, path: Path, about: Numbers, rows: Sequence[Row]) -> None:
        self.path, self.about = path, about
        self.lines: dict[str, Numbers] = {row.name: {"part": row.part, "status": "planned"} for row in rows}
        assert len(self.lines) == len(rows), "a name for each row"
        self.write()

    def write(self) -> None:
        """The old file stays whole until the new one is."""
        rows = [{"name": name, **line} for name, line in self.lines.items()]
        text = json.dumps({**self.about, "rows": rows}, indent=1, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, self.path)
        finally:
            unfinished.unlink(missing_ok=True)

    def end(self, row: Row, status: str, numbers: Numbers) -> None:
        self.lines[row.name] = {"part": row.part, "status": status, **_plain(numbers)}
        self.write()


def run(rows: Sequence[Row], record: Record, budget: float, tell: Callable[[str], None], timer: Timer = WALL) -> None:
    """Run what fits into ``budget`` seconds from now. A row is begun if all of its own time is left."""
    begin, current = timer.clock(), [""]

    def give_up() -> None:  # a call that never comes back to Python cannot be interrupted in any other way
        line = record.lines.get(current[0])
        if line is not None:
            line.update(status="late", why="hung: the program was ended")
        record.about["ended"] = f"{current[0]} hung"
        record.write()
        tell(f"{current[0]} hangs: the program is ended")
        os._exit(3)

    watch = threading.Timer((1 if timer is WALL else 10) * budget + GRACE, give_up)
    watch.daemon = True
    watch.start()
    try:
        for row in rows:
            current[0] = row.name
            left = budget - (timer.clock() - begin)
            blocker = next((name for name, line in record.lines.items() if _blocks(name, line, row)), None)
            if blocker is not None:
                status, numbers = "stopped", {"why": f"{blocker} is {record.lines[blocker]['status']}"}
            elif left < row.seconds:
                status, numbers = "left", {"why": f"{left:.0f} s left, it may take {row.seconds:.0f}"}
            else:
                status, numbers = _one(row, timer)
            record.end(row, status, numbers)
            tell(_line(row, status, record.lines[row.name]))
    finally:
        watch.cancel()
    record.about["seconds"] = round(timer.clock() - begin, 1)
    record.about["left"] = [name for name, line in record.lines.items() if line["status"] in ("left", "planned")]
    record.write()


def _blocks(name: str, line: Numbers, row: Row) -> bool:
    return line["status"] in BAD and any(name.startswith(needed) for needed in row.needs)


def _one(row: Row, timer: Timer) -> tuple[str, Numbers]:
    start, numbers, status = timer.clock(), Numbers(), "done"

    def over(number: int, frame: FrameType | None) -> None:
        raise _Late

    before = signal.signal(timer.signal, over)
    try:
        signal.setitimer(timer.which, row.seconds)
        try:
            numbers = row.run()
        finally:
            signal.setitimer(timer.which, 0)
    except _Late:
        status, numbers = "late", {"why": f"more than {row.seconds:g} s"}
    except Absent as reason:
        status, numbers = "absent", {"why": str(reason)}
    except Wrong as reason:
        status, numbers = "wrong", {"why": str(reason)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        first = (str(error).strip().splitlines() or [""])[0]
        why = f"{type(error).__name__}: {first[:300]} ({Path(where.filename).name}:{where.lineno})"
        status, numbers = "failed", {"why": why}
    finally:
        signal.signal(timer.signal, before)
    return status, {"seconds": round(timer.clock() - start, 2), **numbers}


def _plain(value: Any) -> Any:
    """As JSON can have it: no infinite numbers."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(row: Row, status: str, line: Numbers) -> str:
    shown = {key: value for key, value in line.items() if key not in ("part", "status") and not isinstance(value, dict)}
    words = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items())
    return f"{status:7} {row.name}: {', '.join(words)}"
