"""Whole rounds with dummy weights: contexts are filled, never prefilled, and as many drafts stand as the FOLD paper
says. In order of importance: what the targets are about comes first.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foldspec import Engine, SamplingParams
from foldspec.bench.timing import measure
from foldspec.engine import Prefix
from foldspec.errors import FoldspecError
from foldspec.forcing import published
from gpu.rows import Numbers, Row
from gpu.setting import Setting
from gpu.timings import Ceiling, copy_ceiling

__all__ = ["rows"]

K = 1024
ROUNDS, REPEATS = 24, 3  # of a measurement
WARM = 4  # rounds before it, in which graphs are recorded
ROOM, DRY_ROOM = 512, 60  # tokens of output that a context leaves room for
DRY_TAU = 2.5  # of the pairs that no paper knows


class Cells(NamedTuple):
    """Methods of a pair, at lengths. ``methods``: name -> changes to the engine."""

    pair: str
    lengths: tuple[int, ...]
    methods: dict[str, dict[str, Any]]


def _context(*names: str) -> dict[str, dict[str, Any]]:
    return {name: {"context": name} for name in names}


AR: dict[str, dict[str, Any]] = {"ar": {"draft_tokens": 0}}
FOUR = AR | _context("full", "fold", "window")
PAPER = {"fold, paper's layout": {"context": "fold", "layout": "paper"}}
# in order of priority
PLAN = (
    Cells("llama-3.1-8b-dflash", (128 * K,), FOUR),
    Cells("llama-3.1-8b-dflash", (1 * K,), AR),
    Cells("llama-3.1-8b-dflash", (32 * K, 8 * K), FOUR),
    Cells("llama-3.1-8b-dflash", (128 * K,), PAPER),
    Cells("qwen3-8b-dflash", (32 * K, 8 * K), FOUR),
    Cells("qwen3.5-9b-dflash", (128 * K, 32 * K, 8 * K), AR | _context("full", "fold")),
    Cells("gemma-4-12b-dflash", (128 * K, 32 * K, 8 * K), AR | _context("full", "fold")),
    Cells("qwen3-8b-dspark", (32 * K,), _context("full", "fold")),
    Cells(
        "llama-3.1-8b-dflash",
        (32 * K,),
        _context("shared_window", "streaming", "yarn", "rerope", "infllm", "cmr"),
    ),
)
DRY_PLAN = (
    Cells("llama", (120,), FOUR),
    Cells("llama", (120,), PAPER),
    Cells("hybrid", (100,), AR | _context("full", "fold")),
)


class Loaded:
    """The pair that is loaded, and the context that is filled, one of each at a time."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._pair = ""
        self._engine: Engine | None = None
        self._prefix: Prefix | None = None

    def engine(self, pair: str, longest: int) -> Engine:
        if self._engine is None or self._pair != pair:
            self.close()
            dry: dict[str, Any] = {"kernels": "reference", "threads": 1, "graphs": "on", "page_size": 16}
            self._engine = Engine.load(
                pair,
                load_format="dummy",
                device=self.setting.device.type,
                max_context=longest,
                max_batch=1,
                **(dry if self.setting.dry else {}),
            )
            self._pair = pair
        return self._engine

    def prefix(self, length: int) -> Prefix:
        """A context of so many tokens, of any ids."""
        assert self._engine is not None
        if self._prefix is None or len(self._prefix.token_ids) != length:
            if self._prefix is not None:
                self._prefix.close()
                self._prefix = None
            self._prefix = self._engine.prefill([7] * length)
        return self._prefix

    def close(self) -> None:
        if self._prefix is not None:
            self._prefix.close()
        if self._engine is not None:
            self._engine.close()
        self._engine = self._prefix = None
        if not self.setting.dry:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def rows(setting: Setting, ceiling: Ceiling, stack: contextlib.ExitStack) -> list[Row]:
    """``stack`` holds what is loaded until the check is over. Dry, the pairs are tiny ones (``tests/shrunk.py``)."""
    plan: tuple[Cells, ...] = PLAN
    if setting.dry:
        plan = DRY_PLAN
        stack.enter_context(_tiny_pairs())
    loaded = Loaded(setting)
    stack.callback(loaded.close)
    found, before, load = [copy_ceiling(setting, ceiling, 2)], "", ""
    longest = {cells.pair: max(n for c in plan if c.pair == cells.pair for n in c.lengths) for cells in plan}
    for pair, lengths, methods in plan:
        if pair != before:
            again = any(row.name == f"load/{pair}" for row in found)
            before, load = pair, f"load/{pair}{' again' if again else ''}"
            warm = partial(_load, loaded, pair, longest[pair], lengths[-1], list(methods.values()))
            found.append(Row(load, 2, 100.0, warm))
        for length in lengths:
            for name, changes in methods.items():
                run = partial(cell, loaded, ceiling, pair, longest[pair], length, changes)
                found.append(Row(f"round/{pair} {length} {name}", 2, 25.0, run, (load, "right/")))
    return found


@contextlib.contextmanager
def _tiny_pairs() -> Iterator[None]:
    import tempfile

    import pytest
    import shrunk

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        shrunk.install(Path(folder), patch)
        yield


def _load(loaded: Loaded, pair: str, longest: int, length: int, methods: list[dict[str, Any]]) -> Numbers:
    """Also has each method run for some rounds, so that whatever is compiled is compiled by now."""
    engine = loaded.engine(pair, longest)
    for changes in methods:
        _warm(loaded, pair, longest, length, changes)
    return {"weights_bytes": engine.resources.plan.weights, "kernels": _chosen(engine)}


def _chosen(engine: Engine) -> dict[str, str]:
    return {operator: choice["runs"] for operator, choice in engine.env()["kernels"].items()}


def cell(loaded: Loaded, ceiling: Ceiling, pair: str, longest: int, length: int, changes: dict[str, Any]) -> Numbers:
    """Milliseconds of a round, the smallest and the median of some runs, after a context of ``length`` tokens with the
    output that it leaves room for. ``bytes``: of weights, keys and values that a round reads, each counted once."""
    force, tau = _forced(pair, changes)
    engine, prefix = _warm(loaded, pair, longest, length, changes)
    params = _tokens(WARM if loaded.setting.dry else ROUNDS, tau)
    runs = [measure(engine, prefix, params) for _ in range(1 if loaded.setting.dry else REPEATS)]
    taken = [run.inside / len(run.commits) for run in runs]
    read, best = engine.bytes_read(len(prefix.token_ids)), min(taken)
    floor = ceiling.floor(read)
    return {
        "ms": 1e3 * best,
        "ms_median": 1e3 * statistics.median(taken),
        "tau": statistics.mean(count for run in runs for count in run.commits),
        "forced": force,
        "context": len(prefix.token_ids),
        "bytes": read,
        "floor_ms": None if floor is None else 1e3 * floor,
        "share": None if floor is None else floor / best,
        "memory": engine.resources.method_memory(engine.method),
        "peak_bytes": 0 if loaded.setting.dry else torch.cuda.max_memory_allocated(),
        "graphs": "recorded" if engine.graphs["runs"] else engine.graphs["why_not"],
        "kernels": _chosen(engine),
    }


def _tokens(rounds: int, tau: float) -> SamplingParams:
    return SamplingParams(max_tokens=int(rounds * tau) + 2, ignore_eos=True)


def _warm(loaded: Loaded, pair: str, longest: int, length: int, changes: dict[str, Any]) -> tuple[Engine, Prefix]:
    """An engine that has run a few rounds after a context: rounds are recorded."""
    force, tau = _forced(pair, changes)
    engine = loaded.engine(pair, longest).using(**changes, force_accept=force)
    prefix = loaded.prefix(length - (DRY_ROOM if loaded.setting.dry else ROOM))
    engine.generate(prefix, _tokens(WARM, tau))
    return engine, prefix


def _forced(pair: str, changes: dict[str, Any]) -> tuple[str | None, float]:
    """How acceptance is forced, and tau: the paper's, or where it gives none that of FOLD on this pair."""
    if changes.get("draft_tokens") == 0:
        return None, 1.0
    for context in (changes["context"], "fold"):
        with contextlib.suppress(FoldspecError):
            tau = published(pair, context).mean
            assert tau is not None
            return f"tau={tau:g}", tau
    return f"tau={DRY_TAU:g}", DRY_TAU
