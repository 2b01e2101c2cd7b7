"""One timed run of one method: what the engine says of it, and what the clock of the bench saw from outside."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foldspec.options import SamplingParams
from foldspec.records import Completion

__all__ = ["Clock", "Run", "Runner", "Snapshot", "measure", "sha256_of"]

Clock = Callable[[], float]


class Snapshot(Protocol):
    """A prompt that was prefilled once (``Engine.prefill``). ``held``: entries that target and drafter hold of it."""

    token_ids: tuple[int, ...]
    seconds: float
    draft_seconds: float

    @property
    def held(self) -> tuple[int, int]: ...


class Stream(Iterator[Any], Protocol):
    completion: Completion


class Runner(Protocol):
    """What the bench asks of an engine, and of the simulated ones of its tests."""

    def prefill(self, prompt: Any) -> Any: ...

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Any: ...


@dataclass(frozen=True)
class Run:
    """Times in seconds. ``first_time``, ``last_time`` and ``tpot`` are the engine's own; ``stamped`` is its first time
    as it was when the first token arrived; ``arrived`` and ``inside`` are the bench's: from the call to the first token
    and, without the pauses in between, from there to the last."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    commits: tuple[int, ...]
    began_at: int | None
    finish: str
    first_time: float | None
    last_time: float | None
    tpot: float | None
    stamped: float | None
    arrived: float | None
    inside: float
    held_before: tuple[int, int]
    held_after: tuple[int, int]

    @property
    def n_out(self) -> int:
        return len(self.token_ids)


def measure(runner: Runner, prefix: Snapshot, params: SamplingParams, clock: Clock = time.perf_counter) -> Run:
    """Generate from the prefix, token times taken twice. Whatever an earlier run left is collected first."""
    gc.collect()
    held = prefix.held
    begin = clock()
    generation = runner.stream(prefix, params)
    done: Completion = generation.completion
    arrived, stamped, inside = None, None, 0.0
    while True:
        start = clock()
        if next(generation, None) is None:
            break
        now = clock()
        if arrived is None:
            arrived, stamped = now - begin, done.first_time
        else:
            inside += now - start
    return Run(
        prompt_ids=done.prompt_ids,
        token_ids=done.token_ids,
        commits=tuple(len(r.committed) for r in done.rounds),
        began_at=done.rounds[0].anchor_pos if done.rounds else None,
        finish=done.finish_reason,
        first_time=done.first_time,
        last_time=done.last_time,
        tpot=done.tpot,
        stamped=stamped,
        arrived=arrived,
        inside=inside,
        held_before=held,
        held_after=prefix.held,
    )


def sha256_of(ids: Sequence[int] | Iterable[int]) -> str:
    """Of token ids, written as JSON without blanks."""
    return hashlib.sha256(json.dumps(list(ids), separators=(",", ":")).encode()).hexdigest()
