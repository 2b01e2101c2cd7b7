"""What must hold of a measurement before it counts.

A run that breaks a rule of the definitions stops the bench: the engine or the bench is wrong, and so is every number.
What one request alone spoils (too short an output, a method that did not run, a kernel compiled or a round recorded
within a run, a clock that was disturbed) leaves that request out for all methods, and is counted. A test plants each
fault and shows that it would have moved the figure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from foldspec.bench import metrics
from foldspec.bench.methods import AR, AR_AGAIN
from foldspec.bench.timing import Run, Snapshot
from foldspec.errors import MeasurementError

__all__ = ["VOID", "check_group", "check_run", "check_sample", "clock_disturbed", "why_void"]

VOID = ("short_output", "missing", "compiled", "clock")
SLICE = 20e-3  # seconds
SLACK = 1e-3  # seconds: no clock differs by more where two are read a few instructions apart on an idle machine


def check_run(run: Run, prefix: Snapshot, *, limit: int, stop_ids: Collection[int], where: str) -> None:
    """Raises :class:`MeasurementError` for a run that counts what it must not, or started from something else."""

    def refuse(what: str) -> None:
        raise MeasurementError(what, where=where, do="this is a fault in foldspec: no number was kept of this request")

    # tokens
    metrics.check_commits(run.n_out, run.commits, where)
    stops = [i for i, token in enumerate(run.token_ids) if token in stop_ids]
    if stops and stops[0] != run.n_out - 1:
        refuse(f"{run.n_out - 1 - stops[0]} tokens after a stop id were counted")
    if run.n_out > limit:
        refuse(f"{run.n_out} tokens came out, the limit is {limit}")
    if run.finish not in ("stop", "length") or (run.finish == "stop") != bool(stops):
        refuse(f"the request ended by {run.finish!r}, with {len(stops)} stop ids in its output")
    # the snapshot
    length = len(prefix.token_ids)
    if run.prompt_ids != prefix.token_ids:
        refuse("prefill reused unequally: the run had another prompt")
    if run.held_before != run.held_after or any(held not in (0, length) for held in run.held_before):
        refuse(f"prefill reused unequally: {length} tokens, but held {run.held_before} before, {run.held_after} after")
    if run.began_at not in (None, length):
        refuse(f"prefill reused unequally: the first round began at {run.began_at}, the prompt has {length} tokens")
    # the clock
    if run.first_time is None or run.last_time is None or run.arrived is None:
        refuse("no time was taken of the first or last token")
        return
    if run.stamped != run.first_time:
        refuse(f"late clock: the first token had arrived, but its time was set later ({run.stamped}, {run.first_time})")
    since_prefill = run.first_time - prefix.seconds
    if not -1e-9 <= since_prefill <= run.arrived + SLACK:
        refuse(f"the first token's time is not that of its commit: {since_prefill:.6f} s of {run.arrived:.6f} s")
    tpot = metrics.tpot(run.first_time, run.last_time, run.n_out)
    by_rounds = None if not run.commits else (run.last_time - run.first_time) / sum(run.commits)
    for other in (run.tpot, by_rounds):
        if (tpot is None) != (other is None) or (
            tpot is not None and other is not None and not math.isclose(tpot, other, rel_tol=1e-9)
        ):
            refuse(f"TPOT is {tpot} by its definition and {other} by the rounds or the engine: is the first in it?")


def clock_disturbed(run: Run) -> bool:
    """Whether the engine's decode time and the one seen from outside, which contains it and little else, disagree by
    more than text, Python and one time slice that the system gave to somebody else account for."""
    if run.first_time is None or run.last_time is None:
        return True
    decode, allowed = run.last_time - run.first_time, 0.02 * run.inside + SLICE
    return abs(run.inside - decode) > allowed


def check_group(runs: Mapping[str, Run], where: str) -> None:
    """Raises :class:`MeasurementError` if plain decoding was not plain, or did not repeat itself."""
    for label in (AR, AR_AGAIN):
        if label in runs and any(count != 1 for count in runs[label].commits):
            raise MeasurementError("plain decoding committed more than one token a step", where=f"{where}, {label}")
    if AR in runs and AR_AGAIN in runs and runs[AR].token_ids != runs[AR_AGAIN].token_ids:
        raise MeasurementError("plain decoding gave two different outputs", where=where)


def check_sample(
    lines: Sequence[Mapping[str, Any]], inputs: Mapping[tuple[str, int, str], str], warm_up: Collection[str]
) -> None:
    """Before anything is summed up: every line belongs to a planned input (``(task, length, id)`` -> hash), none is a
    warm-up's, none comes twice, all methods of a request ran the same ids. Raises :class:`MeasurementError`."""
    seen: set[tuple[Any, ...]] = set()
    for line in lines:
        key = line["task"], line["length"], line["id"]
        where = f"{line['task']} {line['length']} {line['id']}, {line['method']}"
        if line["input_sha256"] in warm_up:
            raise MeasurementError("a warm-up run is among the measurements", where=where)
        if inputs.get(key) != line["input_sha256"]:
            raise MeasurementError("a run that is not in the sample is among the measurements", where=where)
        if (*key, line["method"]) in seen:
            raise MeasurementError("a run was counted twice (is one a warm-up?)", where=where)
        seen.add((*key, line["method"]))


def why_void(lines: Mapping[str, Mapping[str, Any]], arms: Sequence[str]) -> str | None:
    """Why the runs of one request (method -> line) cannot be paired: one of :data:`VOID`."""
    if any(arm not in lines or lines[arm]["finish"] == "failed" for arm in arms):
        return "missing"
    if any(lines[arm]["n_out"] < 2 for arm in arms):
        return "short_output"
    if any(lines[arm].get("compiled") for arm in arms):
        return "compiled"
    if any(lines[arm]["clock_disturbed"] for arm in arms):
        return "clock"
    return None
