"""An engine with known times, for the tests of the bench: a clock that only it moves, and faults to plant.

All times are multiples of 2**-10 s, so that sums, differences and their ratios are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foldspec.bench.inputs import Cell, Input
from foldspec.bench.methods import AR
from foldspec.bench.protocol import Arm, Bench
from foldspec.bench.store import Store
from foldspec.bench.timing import sha256_of
from foldspec.errors import ResourceError
from foldspec.options import SamplingParams
from foldspec.records import Completion, Round

TICK = 2.0**-10
STOP = 7


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Prefix:
    token_ids: tuple[int, ...]
    seconds: float
    draft_seconds: float
    held: tuple[int, int]
    runs: int = 0
    logits: Any = None  # [1, vocabulary]

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, *_: object) -> None: ...


@dataclass
class Engine:
    """``round`` seconds a round, ``take(i)`` tokens committed in round ``i``. A round's first half is drafting."""

    clock: FakeClock
    round: float
    take: Callable[[int], int] = lambda i: 1
    n_out: int = 33
    prefill_seconds: float = 64 * TICK
    fault: str | None = None
    slow: Callable[[tuple[int, ...]], float] = lambda ids: 1.0  # how much slower on some prompts
    mark: Callable[[str], None] = lambda part: None
    calls: int = 0
    fails: Callable[[tuple[int, ...]], bool] = lambda ids: False
    first: float = 2 * TICK  # from the prefix to the first token
    marks: list[str] = field(default_factory=list)

    def prefill(self, prompt: Sequence[int]) -> Prefix:
        self.clock.pass_(self.prefill_seconds)
        held = len(prompt), len(prompt)
        return Prefix(tuple(prompt), self.prefill_seconds, 8 * TICK, held, logits=np.array([[0.5, 3.0, 2.75]]))

    def listen(self, mark: Callable[[str], None]) -> None:
        self.mark = mark

    def bytes_read(self, n: int) -> int:
        return 10**6

    def stream(self, prefix: Prefix, params: SamplingParams) -> Stream:
        self.calls += 1
        return Stream(self, prefix, params)


class Stream(Iterator[Any]):
    def __init__(self, engine: Engine, prefix: Prefix, params: SamplingParams) -> None:
        self.completion = Completion(prefix.token_ids)
        self._steps = self._run(engine, prefix, min(engine.n_out, params.max_tokens))

    def __next__(self) -> Any:
        return next(self._steps)

    def _run(self, engine: Engine, prefix: Prefix, n_out: int) -> Iterator[Any]:
        done, clock, fault = self.completion, engine.clock, engine.fault
        if engine.fails(prefix.token_ids):
            raise ResourceError("out of memory")
        start = clock()
        seconds = engine.round * engine.slow(prefix.token_ids)
        begin = len(prefix.token_ids)
        if fault == "unequal prefill":  # an earlier run's entries are still there, and make this one cheaper
            begin += prefix.runs * n_out
            seconds /= 1 + prefix.runs
            prefix.held = (begin, len(prefix.token_ids))
        prefix.runs += 1
        clock.pass_(engine.first)

        def since() -> float:
            return prefix.seconds + clock() - start

        if fault != "late clock":
            done.first_time = done.last_time = 0.0 if fault == "first token counted" else since()
        done.token_ids = (10,)
        done.finish_reason = "length" if n_out == 1 else ""
        yield "first"
        i = 0
        while len(done.token_ids) < n_out:
            engine.mark("host")
            clock.pass_(seconds / 2)
            engine.mark("draft")
            if fault == "late clock" and i == 0:
                done.first_time = since()
            clock.pass_(seconds / 2)
            engine.mark("verify")
            count = min(engine.take(i), n_out - len(done.token_ids))
            run = tuple(range(20 + len(done.token_ids), 20 + len(done.token_ids) + count))
            last = len(done.token_ids) + count == n_out
            if last and fault == "tokens after a stop":
                run = (*run[:-1], STOP, *range(20, 20 + 32))
            done.rounds.append(Round(begin + len(done.token_ids) - 1, run[:-1], count - 1, run))
            done.token_ids += run
            done.last_time = since()
            done.finish_reason = "stop" if STOP in run else "length"
            i += 1
            yield "piece"
            if last:
                return


def cells(count: int = 6, task: str = "sim", length: int = 16) -> list[Cell]:
    def item(i: int, name: str) -> Input:
        ids = tuple(100 * i + j for j in range(length))
        return Input(task, length, name, ids, sha256_of(ids))

    return [Cell(task, length, tuple(item(i, str(i)) for i in range(count)), item(99, "spare"), False, 0)]


def bench(plain: Engine, methods: dict[str, Engine], **settings: Any) -> Bench:
    arms = [Arm(AR, plain, drafts=False), *(Arm(name, engine, drafts=True) for name, engine in methods.items())]
    known = {"params": SamplingParams(max_tokens=33), "stop_ids": frozenset({STOP}), "max_context": 4096}
    return Bench(arms=arms, store=Store(), clock=plain.clock, **{**known, **settings})
