"""How a bench measures (one machine, one request at a time).

For each request: one prefill; from it plain decoding, every method and plain decoding once more, back to back, in an
order that turns with the request's number; identical ids, limit, stop ids and seed, which is made of the ids (of it
come drafts that are drawn and a lossy rule's coins). Before the first request of a length
each method warms up, on an input outside the sample, until its last two runs differ by less than 5%. Parts of a round
are timed in further runs, and what calibrates the model comes from such: no other figure uses them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from foldspec.bench import guards, metrics
from foldspec.bench.inputs import Cell, Input
from foldspec.bench.methods import AR, AR_AGAIN, order
from foldspec.bench.store import Store
from foldspec.bench.timing import Clock, Run, Snapshot, measure, sha256_of
from foldspec.errors import ResourceError
from foldspec.options import SamplingParams
from foldspec.schedule.trace import PARTS, Stopwatch
from foldspec.tasks.base import Score

__all__ = ["Arm", "Bench", "WarmUp"]

SETTLED = 0.05
SEED_DIGITS = 13  # hexadecimal: 52 bits


@dataclass(frozen=True)
class Arm:
    """A method at work. ``drafts``: whether the drafter's part of prefill is its cost; ``made_up``: what is not real of
    it, so that its outputs are not looked at."""

    label: str
    engine: Any  # a timing.Runner; with --trace an Engine
    drafts: bool
    made_up: str = ""


@dataclass(frozen=True)
class WarmUp:
    """``change``: by how much the last run differed from the one before; None after one run."""

    method: str
    length: int
    runs: int
    change: float | None

    @property
    def settled(self) -> bool:
        return self.change is not None and self.change < SETTLED


@dataclass
class Bench:
    """``arms`` begin with plain decoding; its second run is added here. ``calibrate`` (prefix, params, limit) makes
    what is kept of a request besides, on the line of plain decoding. ``quality`` (prefix, runs, what calibrate made)
    says of each method what a sweep keeps besides. ``guarded=False`` is for tests that show what a fault would do."""

    arms: Sequence[Arm]
    params: SamplingParams
    store: Store
    stop_ids: frozenset[int]
    max_context: int
    order: str = "rotate"
    warmup: int = 4
    trace: bool = False
    calibrate: Callable[[Any, SamplingParams, int], dict[str, Any] | None] | None = None
    quality: Callable[[Any, Mapping[str, Run], Any], Mapping[str, dict[str, Any]]] | None = None
    guarded: bool = True
    clock: Clock = time.perf_counter
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    unbroken: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # an interrupt waits inside
    warmed: list[WarmUp] = field(default_factory=list)
    warm_hashes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        assert self.arms[0].label == AR, "the first arm is plain decoding"
        self._all = {arm.label: arm for arm in self.arms}
        self._all[AR_AGAIN] = replace(self.arms[0], label=AR_AGAIN)

    @property
    def labels(self) -> list[str]:
        return list(self._all)

    def run(self, cells: Sequence[Cell]) -> None:
        """Measure what the store does not have yet. An interrupt loses the request that runs, and nothing else."""
        total = sum(len(cell.inputs) for cell in cells)
        done = 0
        for cell in cells:
            for number, item in enumerate(cell.inputs):
                if not self.store.has(item.key):
                    if cell.length not in {warm.length for warm in self.warmed}:
                        self.warm_up(cell)
                    lines = self.request(item, number)
                    with self.unbroken():
                        self.store.append(lines)
                done += 1
                self.progress(f"{cell.task} {cell.length}: {item.id}", done, total)

    def warm_up(self, cell: Cell) -> None:
        """Run each method on the cell's spare input until it settles, ``warmup`` times at most."""
        self.warm_hashes.add(cell.spare.sha256)
        warmed = []
        with self.arms[0].engine.prefill(cell.spare.ids) as prefix:
            for count, arm in enumerate(self.arms):
                if self.warmup:
                    self.progress(f"warming up at {cell.length} tokens: {arm.label}", count + 1, len(self.arms))
                times: list[float] = []
                while len(times) < self.warmup:
                    run = measure(arm.engine, prefix, self._params(cell.spare), self.clock)
                    assert run.first_time is not None and run.last_time is not None
                    times.append(metrics.tpot(run.first_time, run.last_time, run.n_out) or 0.0)
                    warm = WarmUp(arm.label, cell.length, len(times), _change(times))
                    if warm.settled:
                        break
                if times:
                    warmed.append(warm)
        self.warmed += warmed

    def request(self, item: Input, number: int) -> list[dict[str, Any]]:
        """The lines of one request, one a method."""
        where = f"{item.task} {item.length} {item.id}"
        params = dataclasses.replace(self._params(item), seed=int(item.sha256[:SEED_DIGITS], 16))
        sequence = order(self.labels, number, self.order)
        limit = min(params.max_tokens, self.max_context - len(item.ids))
        runs: dict[str, Run] = {}
        failed: dict[str, str] = {}
        traces: dict[str, dict[str, float]] = {}
        scores: dict[str, Score | None] = {}  # methods that lose nothing say the same: it is judged once
        with self.arms[0].engine.prefill(item.ids) as prefix:
            for label in sequence:
                try:
                    runs[label] = measure(self._all[label].engine, prefix, params, self.clock)
                except ResourceError as error:
                    failed[label] = str(error)
                    continue
                if self.guarded:
                    stops = self.stop_ids if not self.params.ignore_eos else frozenset()
                    stops = stops | frozenset(self.params.stop_ids)
                    guards.check_run(runs[label], prefix, limit=limit, stop_ids=stops, where=f"{where}, {label}")
            if self.trace:
                for arm in self.arms:
                    if arm.label in runs:
                        traces[arm.label] = self.traced(arm, prefix, params)
            calibration = self.calibrate(prefix, params, limit) if self.calibrate else None
            quality = self.quality(prefix, runs, calibration) if self.quality else {}
            timing = prefix.draft_seconds
        if self.guarded:
            guards.check_group(runs, where)
        lines = []
        for place, label in enumerate(sequence):
            arm = self._all[label]
            head = {
                "task": item.task,
                "length": item.length,
                "id": item.id,
                "method": label,
                "made_up": arm.made_up,
                "order": place,
                "input_sha256": item.sha256,
                "n_in": len(item.ids),
            }
            if label in failed:
                lines.append(head | {"finish": "failed", "error": failed[label]})
                continue
            line = head | as_line(runs[label], draft_prefill=timing if arm.drafts else 0.0)
            line["clock_disturbed"] = self.guarded and guards.clock_disturbed(runs[label])
            real = not arm.made_up and not self._all[AR].made_up
            line |= self.difference(runs.get(AR), runs[label], item) if real else {"first_diff": None, "gap": None}
            text = runs[label].text
            if text not in scores:
                scores[text] = item.judge(text) if real and item.judge else None
            line |= _scored(scores[text])
            middle = len(item.ids) + runs[label].n_out // 2
            line["bytes_a_round"] = arm.engine.bytes_read(middle)
            line["parts_ms"] = traces.get(label)
            line["calibration"] = calibration if label == AR else None
            line |= quality.get(label, {})
            lines.append(line)
        return lines

    def _params(self, item: Input) -> SamplingParams:
        return self.params if item.max_new is None else dataclasses.replace(self.params, max_tokens=item.max_new)

    def difference(self, plain: Run | None, run: Run, item: Input) -> dict[str, Any]:
        """Where the output first differs from plain decoding's, and how close the target's two best logits are there:
        a difference without a near tie is a fault. Texts that are drawn may differ: they are not compared."""
        if plain is None or run.token_ids == plain.token_ids or self.params.temperature:
            return {"first_diff": None, "gap": None}
        pairs = enumerate(zip(run.token_ids, plain.token_ids, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(run.n_out, plain.n_out))
        if at == plain.n_out:
            return {"first_diff": at, "gap": None}
        with self.arms[0].engine.prefill((*item.ids, *plain.token_ids[:at])) as prefix:
            best = sorted(prefix.logits[0].tolist())
        return {"first_diff": at, "gap": best[-1] - best[-2]}

    def traced(self, arm: Arm, prefix: Snapshot, params: SamplingParams) -> dict[str, float]:
        """Milliseconds a round by part, from a run of its own."""
        watch = Stopwatch(self.clock)
        arm.engine.listen(watch)
        try:
            generation = arm.engine.stream(prefix, params)
            with contextlib.suppress(StopIteration):
                next(generation)
                watch.start()
            for _ in generation:
                watch("host")
        finally:
            arm.engine.listen(lambda part: None)
        rounds = max(1, len(generation.completion.rounds))
        return {part: 1e3 * watch.seconds[part] / rounds for part in PARTS}


def as_line(run: Run, *, draft_prefill: float) -> dict[str, Any]:
    """What is kept of a run, times in milliseconds."""
    assert run.first_time is not None and run.last_time is not None
    decode = run.last_time - run.first_time
    tpot = metrics.tpot(run.first_time, run.last_time, run.n_out)
    return {
        "n_out": run.n_out,
        "finish": run.finish,
        "rounds": len(run.commits),
        "commits": list(run.commits),
        "ttft_ms": 1e3 * run.first_time,
        "draft_prefill_ms": 1e3 * draft_prefill,
        "decode_ms": 1e3 * decode,
        "tpot_ms": None if tpot is None else 1e3 * tpot,
        "output_ids_sha256": sha256_of(run.token_ids),
    }


def _scored(score: Score | None) -> dict[str, Any]:
    """What is kept of a score; all None where nothing was judged."""
    if score is None:
        return {"score": None, "answered": None, "second_opinion": None}
    return {"score": score.value, "answered": score.answered, "second_opinion": score.second}


def _change(times: Sequence[float]) -> float | None:
    return None if len(times) < 2 else abs(times[-1] / times[-2] - 1) if times[-2] else None
