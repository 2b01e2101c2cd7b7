"""Rounds on fixed buffers beside the ordinary loop, for tests: engines over the trained pairs of the goldens, whose
pages (16) and window (24) make every boundary near."""

from __future__ import annotations

import functools
import random
from typing import Any

import tiny

from foldspec import Completion, Engine
from foldspec.schedule.graphs import Graphs

WINDOW = 24
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"draft_tokens": 0},
    "full": {"context": "full"},
    "window": {"context": "window", "window": WINDOW},
    "fold": {"context": "fold", "window": WINDOW, "alpha": 2.0},
    "fold, two copies": {"context": "fold", "window": WINDOW, "alpha": 2.0, "layout": "paper"},
    "rerope": {"context": "rerope", "window": WINDOW, "rerope_len": 32},
    "streaming": {"context": "streaming", "sinks": 2, "recents": WINDOW},
    "shared_window": {"context": "shared_window", "draft_window": WINDOW},
}


def load(pair: str, graphs: str, **options: Any) -> Engine:
    settings = {"page_size": 16, "prefill_chunk": 64, "max_context": 128, "max_batch": 4, "graphs": graphs} | options
    folder = tiny.PAIRS / pair
    return Engine.load(target=str(folder / "target"), drafter=str(folder / "drafter"), **settings)


@functools.cache
def loaded(pair: str, graphs: str) -> Engine:
    """One whose weights and pools serve many tests, by :meth:`Engine.using`."""
    return load(pair, graphs)


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 100) for _ in range(length)] for length in lengths]


def graphs_of(engine: Engine) -> Graphs:
    found = engine._rounds.graphs
    assert found is not None, engine.graphs
    return found


def story(done: Completion) -> tuple[Any, ...]:
    """All that may not differ."""
    rounds = [(r.anchor_pos, r.drafted, r.accepted, r.committed, r.outside, r.steps) for r in done.rounds]
    return done.token_ids, done.finish_reason, done.stopped_by, rounds, str(done.error).partition(", ")[2]
