"""What a round costs, and how much of it is the host's: the round loop, the rule, requests and the books of the caches.

    python scripts/measure_host.py [--length 7900] [--repeat 20] [--out FILE.json]

First a round of a model and a drafter that compute nothing: prepared logits for 8 rows of SmolLM2's vocabulary and
prepared taps, but real pages, rows, rule, commits and truncates. Then rounds of the embedded pair from one prefill, in
turn with rotated order: plain decoding, ``full`` twice (the width of "no difference") and ``fold``. One thread;
milliseconds, minimum and median, by the wall clock and by the thread's CPU time; three rounds of warm-up are dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from foldspec import Engine
from foldspec.acceptance import make_rule
from foldspec.cache.paged import CacheSpec, PagedCache, TargetSpec
from foldspec.cache.rows import Rows
from foldspec.cache.side import DraftCache, Layout
from foldspec.drafters.base import NoDrafter
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardOutput, ForwardPlan, LanguageModel
from foldspec.models.config import ModelConfig
from foldspec.models.layers import Matrix
from foldspec.noise import Noise
from foldspec.records import PointMass, Proposal
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Rounds

DRAFTS, ACCEPTED, VOCABULARY, WIDTH, TAPS = 7, 3, 49152, 576, (1, 8, 14, 20, 27)
WARM = 3
SPEC = CacheSpec(layers=1, kv_heads=1, key_width=2, value_width=2, dtype=torch.float32)


class NullModel(LanguageModel):
    """Logits and taps that lie ready: the first :data:`ACCEPTED` drafts are the argmax of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.rand(DRAFTS + 1, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.logits[range(ACCEPTED), range(ACCEPTED)] = 2.0
        self.states = torch.zeros(DRAFTS + 1, WIDTH)

    def forward(self, ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> ForwardOutput:
        cache.begin(plan.rows)
        return ForwardOutput(self.logits[: len(ids)], (self.states[: len(ids)],) * len(plan.taps))

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> NullModel:
        raise NotImplementedError

    def cache_spec(self, dtype: torch.dtype) -> TargetSpec:
        return TargetSpec.uniform(SPEC)

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        raise NotImplementedError

    def head(self, x: torch.Tensor, matrix: Matrix | None = None, softcap: float | None = None) -> torch.Tensor:
        raise NotImplementedError

    @property
    def head_matrix(self) -> Matrix:
        raise NotImplementedError


class NullDrafter(NoDrafter):
    """The same drafts every time; the books of a cache are kept as by a drafter that computes."""

    taps, max_drafts = TAPS, DRAFTS

    def __init__(self, cache: DraftCache) -> None:
        self._cache = cache

    def truncate(self, request: int, length: int) -> None:
        self._cache.truncate(request, min(length, self._cache.length(request)))

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        for request, start, packed in rows:
            self._cache.reserve(request, start + packed.stop - packed.start)
            self._cache.extend(request, start + packed.stop - packed.start)

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        for request, start, _ in anchors:
            self._cache.reserve(request, start + DRAFTS)
        return [PointMass(tuple(range(DRAFTS))[:budget]) for budget in budgets]


def null_rounds(length: int) -> Callable[[], None]:
    pages = -(-(length + 4000) // 256)  # rounds enough for any --repeat below 40
    cache = PagedCache(SPEC, pages=pages, page_size=256, device="cpu")
    draft_cache = DraftCache(SPEC, pages=pages, page_size=256, max_requests=1, device="cpu")
    drafter = NullDrafter(draft_cache)
    cache.open(0)
    draft_cache.open(0, (Layout(rotated=True),))
    cache.begin(Rows.of([0], [0], [length]))
    drafter.absorb(Rows.of([0], [0], [length]), (), ())
    rounds = Rounds(NullModel(), cache, drafter, make_rule("exact"), device=torch.device("cpu"))
    request = Request(0, (0,) * length, 1 << 20)
    request.commit([0])

    def run() -> None:
        (one,) = rounds.round([request])
        assert len(one.committed) == ACCEPTED + 1

    return run


def measure(arms: dict[str, Callable[[], None]], repeat: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Minimum and median milliseconds of each arm by either clock, interleaved with rotated order."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(repeat + WARM):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wall, cpu = time.perf_counter(), time.thread_time()
            arms[name]()
            taken[name].append(((time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3))
    return {
        name: {
            clock: (min(t[i] for t in times[WARM:]), statistics.median(t[i] for t in times[WARM:]))
            for i, clock in enumerate(("wall ms", "cpu ms"))
        }
        for name, times in taken.items()
    }


def _round(rounds: Rounds, request: Request) -> None:
    rounds.round([request])


def real_rounds(engine: Engine, length: int, limit: int, stack: ExitStack) -> dict[str, Callable[[], None]]:
    """A round of each method from one stored prompt: text of this repository."""
    assert engine.tokenizer is not None
    root = Path(__file__).parents[1]
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(root.glob("foldspec/**/*.py")))
    prefix = stack.enter_context(engine.prefill(engine.tokenizer.encode_prompt(text)[:length]))
    plain: dict[str, Any] = {"draft_tokens": 0}
    methods = {"plain": plain, "full": {"context": "full"}, "full again": {"context": "full"}}
    arms: dict[str, Callable[[], None]] = {}
    for name, changes in (methods | {"fold": {"context": "fold"}}).items():
        one = engine.using(**changes)
        request = Request(engine._resources.new_id(), prefix.token_ids, limit)
        stack.enter_context(engine._resources.opened(request.id, one._drafter, prefix))
        one._rounds.first(request, prefix.logits)
        arms[name] = partial(_round, one._rounds, request)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=7900, help="tokens of context")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write a JSON report")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = [os.getloadavg()[0]]
    rows = measure({"null": null_rounds(options.length)}, 20 * options.repeat)
    limit = (options.repeat + WARM) * (DRAFTS + 2)
    with ExitStack() as stack:
        room = options.length + limit
        engine = stack.enter_context(Engine.load("smollm2-135m", device="cpu", threads=1, max_context=min(room, 8192)))
        rows |= measure(real_rounds(engine, options.length, limit, stack), options.repeat)
        env = engine.env()
    load.append(os.getloadavg()[0])
    for name, times in rows.items():
        wall, cpu = times["wall ms"], times["cpu ms"]
        print(f"{name:12} wall {wall[0]:7.3f} / {wall[1]:7.3f}   cpu {cpu[0]:7.3f} / {cpu[1]:7.3f}")
    ratios = {}
    for what, over, under in (
        ("host share of a fold round", "null", "fold"),
        ("fold round / full round", "fold", "full"),
        ("full round / full round", "full again", "full"),
        ("full round / plain round", "full", "plain"),
    ):
        ratios[what] = [a / b for a, b in zip(rows[over]["cpu ms"], rows[under]["cpu ms"], strict=True)]
        print(f"{what:28} {ratios[what][0]:.3f} / {ratios[what][1]:.3f}  (CPU time)")
    print(f"minimum / median of {options.repeat}; {options.length} tokens; load {load[0]:.1f} to {load[1]:.1f}")
    if options.out:
        report = {"env": env, "length": options.length, "load": load, "rounds": rows, "ratios": ratios}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
