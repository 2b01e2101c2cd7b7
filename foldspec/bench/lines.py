"""A line of ``requests.jsonl`` as it is read back: a file that a bench goes on with may have been edited since."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from foldspec.bench import metrics
from foldspec.errors import MeasurementError
from foldspec.schedule.trace import PARTS

__all__ = ["check_line"]


MOST = 1e15  # of anything that is counted here, in ms or bytes: sums of what is beyond may not be finite


def _number(value: Any, low: float = 0) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= MOST


def _whole(value: Any, low: int = 0) -> bool:
    return isinstance(value, int) and _number(value, low)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _parts(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == set(PARTS) and all(map(_number, value.values()))


def _judged(value: Any) -> bool:
    """The drafts of a round, as ``calibrate.py`` keeps them."""
    if not isinstance(value, dict) or value.keys() != {*_COUNTS, *_PER_DRAFT, "whole"}:
        return False
    lists = [value[name] for name in _PER_DRAFT]
    return (
        isinstance(value["whole"], bool)
        and all(_whole(value[name]) for name in _COUNTS)
        and value["accepted"] <= value["drafted"]
        and all(isinstance(each, list) and len(each) == len(lists[0]) for each in lists)
        and all(x is None or (_number(x) and x <= 1 + 1e-9) for each in lists for x in each)
    )


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_number, value))


def _times(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_number, value))


def _calibration(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(run, dict)
        and isinstance(run.get("rounds"), list)
        and all(map(_judged, run["rounds"]))
        and isinstance(run.get("ms", []), list)
        and all(map(_times, run.get("ms", [])))
        for run in value.values()
    )


_COUNTS, _PER_DRAFT = ("drafted", "accepted", "steps"), ("tv", "chance", "spent")
LATER = ("answered", "second_opinion", "sm_mhz", "core_mhz", "celsius", "throttle", "compiled")
_HEAD: dict[str, Callable[[Any], bool]] = {
    "task": _text,
    "length": lambda x: _whole(x, 1),
    "id": _text,
    "method": _text,
    "order": _whole,
    "input_sha256": _text,
    "n_in": lambda x: _whole(x, 1),
    "finish": lambda x: x in ("stop", "length", "failed"),
}
_BODY: dict[str, Callable[[Any], bool]] = {
    "n_out": lambda x: _whole(x, 1),
    "rounds": _whole,
    "commits": lambda x: isinstance(x, list) and all(_whole(count, 1) for count in x),
    "ttft_ms": _number,
    "draft_prefill_ms": _number,
    "decode_ms": _number,
    "tpot_ms": lambda x: x is None or _positive(x),
    "output_ids_sha256": _text,
    "clock_disturbed": lambda x: isinstance(x, bool),
    "sm_mhz": lambda x: x is None or _pair(x),
    "core_mhz": lambda x: x is None or _pair(x),
    "celsius": lambda x: x is None or _pair(x),
    "throttle": lambda x: x is None or (isinstance(x, list) and all(map(_text, x))),
    "compiled": lambda x: x is None or isinstance(x, bool),
    "first_diff": lambda x: x is None or _whole(x),
    "gap": lambda x: x is None or _number(x),
    "score": lambda x: x is None or (_number(x) and x <= 1),
    "answered": lambda x: x is None or isinstance(x, bool),
    "second_opinion": lambda x: x is None or (_number(x) and x <= 1),
    "bytes_a_round": _positive,
    "parts_ms": lambda x: x is None or _parts(x),
    "calibration": lambda x: x is None or _calibration(x),
}
_SOMETIMES: dict[str, Callable[[Any], bool]] = {  # of a sweep, of a bench that several devices measured, of older ones
    "made_up": _text,
    "device": _whole,
    "logprob": lambda x: x is None or _number(x, -MOST),
    "spent": lambda x: x is None or (_number(x) and x <= 1 + 1e-9),
}


def check_line(line: Any, where: str) -> None:
    """Fill in what lines of older benches lack (``LATER``). Raises :class:`MeasurementError` for what is no line of one
    run, or whose figures deny one another."""

    def refuse(what: str) -> None:
        raise MeasurementError(what, where=where)

    if not isinstance(line, dict):
        refuse("is not the line of a run")
    body = {"error": _text} if line.get("finish") == "failed" else _BODY
    for name in LATER:
        if body is _BODY:
            line.setdefault(name, None)
    also = {name: right for name, right in _SOMETIMES.items() if name in line}
    for name, right in {**_HEAD, **body, **also}.items():
        if name not in line or not right(line[name]):
            refuse(f"{name} is {f'{line[name]!r:.40}' if name in line else 'missing'}")
    if line["finish"] == "failed":
        return
    metrics.check_commits(line["n_out"], line["commits"], where)
    if line["rounds"] != len(line["commits"]):
        refuse(f"{len(line['commits'])} commits, but {line['rounds']} rounds")
    tpot = metrics.tpot(0, line["decode_ms"], line["n_out"])
    if tpot != line["tpot_ms"] and not (tpot and line["tpot_ms"] and math.isclose(tpot, line["tpot_ms"], rel_tol=1e-9)):
        refuse(f"tpot_ms is {line['tpot_ms']}, but by its definition {tpot}")
