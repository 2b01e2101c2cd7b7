"""Layers that read a window keep a ring: whatever is taken back, forked or preempted, the window is there. Against
dense attention by loops in float64, and plain decoding. (Against lists of rows: test_caches.py.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gemma
import numpy as np
import pytest
import tiny
import torch

from foldspec import Completion, Engine, SamplingParams
from foldspec.bench.offline import leading_drafts
from foldspec.cache.paged import CacheSpec, PagedCache, TargetSpec
from foldspec.cache.rows import Rows
from foldspec.kernels.rotate_append import Slots
from foldspec.models.layers import masked_attention

WINDOW, LONGEST = 4, 6

WINDOW, LONGEST = 4, 6

# ------------------------------------------------------------------------------------------- against dense attention

FULL = CacheSpec(1, 1, 12, 12, torch.float32)
SLIDING = CacheSpec(1, 2, 8, 8, torch.float32, window=WINDOW)
HEADS = 4


class Layers:
    """A full and a sliding layer of two geometries, and what a row should read of them, by loops in float64."""

    def __init__(self, kernels: str, longest_pass: int) -> None:
        self.kernels = tiny.kernels_of(kernels)
        self.cache = PagedCache(
            TargetSpec((SLIDING, FULL), (0, 1)),
            pages=16,
            page_size=4,
            device="cpu",
            requests=2,
            longest_pass=longest_pass,
        )
        tiny.poison(self.cache)
        self.cache.open(7)
        self.cache.open(8)
        self.kept: dict[int, list[list[torch.Tensor]]] = {7: [[], []], 8: [[], []]}
        self.draw = torch.Generator().manual_seed(0)

    def forward(self, *counts: int) -> None:
        """Rows of both requests; their outputs are checked."""
        rows = Rows.of((7, 8), [len(self.kept[r][0]) for r in (7, 8)], counts)
        self.cache.begin(rows)
        for layer, (spec, window) in enumerate(((SLIDING, WINDOW), (FULL, None))):
            drawn = torch.randn(rows.total, HEADS + 2 * spec.kv_heads, spec.key_width, generator=self.draw)
            q, k, v = drawn.split_with_sizes((HEADS, spec.kv_heads, spec.kv_heads), 1)
            into: Slots = self.cache.slots(layer)
            into.keys[list(into.slots)], into.values[list(into.slots)] = k, v
            found = masked_attention(q, self.cache, layer, rows, self.kernels, 0.7, window)
            for request, start, packed in rows:
                self.kept[request][layer] += list(torch.stack([k, v], 1)[packed])
                for r in range(packed.stop - packed.start):
                    wanted = self.dense(q[packed][r], self.kept[request][layer][: start + r + 1], window)
                    np.testing.assert_allclose(found[packed][r].double().numpy(), wanted, atol=2e-6)

    @staticmethod
    def dense(q: torch.Tensor, kept: list[torch.Tensor], window: int | None) -> np.ndarray[Any, Any]:
        out = []
        for head, query in enumerate(q.double().numpy()):
            seen = [entry.double().numpy() for entry in (kept if window is None else kept[-window:])]
            own = head * seen[0].shape[1] // HEADS
            mass = np.exp([0.7 * float(query @ k[own]) for k, _ in seen])
            out.append(sum(m * v[own] for m, (_, v) in zip(mass, seen, strict=True)) / mass.sum())
        return np.stack(out)

    def truncate(self, request: int, more: int) -> None:
        """Keep ``more`` of the last forward's rows, and none of them at all where the next ones come."""
        length = len(self.kept[request][0]) - more
        self.kept[request] = [kept[:length] for kept in self.kept[request]]
        self.cache.truncate(request, length)


@pytest.mark.parametrize(
    ("length", "kernels"),
    [*((n, "auto") for n in (0, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)), (WINDOW, "cpu"), (WINDOW, "reference")],
)
def test_attention_after_every_rejection(length: int, kernels: str) -> None:
    """Blocks of any size taken back to any length, twice, beside another request; rings as small as may be."""
    for rows in (1, WINDOW, LONGEST):
        for dropped in range(rows + 1):
            layers = Layers(kernels, LONGEST)
            for begin in range(0, length, LONGEST):
                layers.forward(min(LONGEST, length - begin), 1 + begin % 3)
            for other in (1, 4):
                layers.forward(rows, other)
                layers.truncate(7, dropped)
                layers.truncate(8, other - 1)
            layers.forward(LONGEST, 1)


# ---------------------------------------------------------------------------------------------- against plain decoding


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of windows of four entries, and a drafter of which few drafts are right."""
    folder = tmp_path_factory.mktemp("rings")
    gemma.write_target(folder / "target")
    tiny.write_drafter(folder / "drafter", tiny.ZLAB)
    return folder


def load(pair: Path, **options: Any) -> Engine:
    settings = {"page_size": 16, "prefill_chunk": 9, "max_context": 96, "window": 8, "debug": True, **options}
    return Engine.load(target=str(pair / "target"), drafter=str(pair / "drafter"), device="cpu", **settings)


def same(found: Completion, wanted: Completion) -> None:
    assert found.error is None and found.token_ids == wanted.token_ids and found.rounds == wanted.rounds


PROMPTS = [tiny.prompt(n, 128, seed=n) for n in (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 2, 40, 17, 1)]
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(pair: Path) -> list[Completion]:
    """Every prompt by itself, in one chunk: the ids of plain decoding."""
    with load(pair, max_batch=1, prefill_chunk=96) as engine:
        plain = engine.using(draft_tokens=0).generate(PROMPTS, PARAMS)
        found = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
    assert [done.token_ids for done in found] == [done.token_ids for done in plain]
    assert any(r.accepted for done in found for r in done.rounds)
    return found


@pytest.mark.parametrize("chunk", [WINDOW - 1, 9])
def test_requests_together_and_preempted(pair: Path, alone: list[Completion], chunk: int) -> None:
    """Each in a ring that another had before; pages for about three of them, so that they take them from each other."""
    with load(pair, max_batch=4, cache_tokens=112, prefill_chunk=chunk) as engine:
        for data in engine.resources.cache.tensors:
            data.fill_(torch.nan)
        for done, wanted in zip(engine.generate(PROMPTS, PARAMS), alone, strict=True):
            same(done, wanted)
        assert engine.scheduler.preempted > 0
        free = [sorted(rings._free) for rings in engine.resources.cache._rings]
        assert free == [list(range(5))]


def test_a_prefix_is_forked_again_and_again(pair: Path, alone: list[Completion]) -> None:
    """Into two requests at once, while it is closed."""
    with load(pair, max_batch=2, prefill_chunk=WINDOW - 1) as engine:
        for prompt, wanted in zip(PROMPTS[:4], alone, strict=False):
            prefix = engine.prefill(prompt)
            for done in engine.generate([prefix, prefix], PARAMS):
                same(done, wanted)
            streams = [engine.stream(prefix, PARAMS) for _ in range(2)]
            for stream in streams:
                next(stream)
            prefix.close()
            for stream in streams:
                list(stream)
                same(stream.completion, wanted)


def test_a_drafter_that_proposes_more_than_the_pairs_own(pair: Path, alone: list[Completion]) -> None:
    """Prompt lookup's blocks of eight rows, in rings that were planned for chunks of two and blocks of five."""
    repeated = [7, 8, 9, 10, 11, 12, 13, 14] * 5
    with load(pair, prefill_chunk=2) as engine:
        plain, lookup = (engine.using(**change) for change in ({"draft_tokens": 0}, {"drafter": "lookup"}))
        found = lookup.generate([repeated, *PROMPTS], PARAMS)
        assert [done.token_ids for done in found[1:]] == [done.token_ids for done in alone]
        assert found[0].token_ids == plain.generate(repeated, PARAMS).token_ids
        assert max(len(r.drafted) for done in found for r in done.rounds) == 7


def test_offline_acceptance_reads_the_text_in_passes_that_rings_take(pair: Path, alone: list[Completion]) -> None:
    """What live rounds accepted is found again, in chunks shorter than the window and longer than the text."""
    found = []
    for chunk in (WINDOW - 1, 96):
        with load(pair, prefill_chunk=chunk) as engine, engine.prefill(PROMPTS[3]) as prefix:
            found += leading_drafts(engine, prefix, alone[3].token_ids, [engine.method])
    assert found[0] == found[1] and len(found[0]) == 26
    rounds = {r.anchor_pos - len(PROMPTS[3]): r.accepted for r in alone[3].rounds}
    assert all(found[0][anchor] == accepted for anchor, accepted in rounds.items() if anchor < len(found[0]))


@pytest.mark.parametrize(
    ("options", "ring"),
    [
        ({}, WINDOW - 1 + 9),  # a chunk
        ({"prefill_chunk": 2}, WINDOW - 1 + 8),  # prompt lookup's block, which is longer than the drafter's
        ({"max_context": 5, "max_batch": 2}, 5 + 5),  # what a request and a block may hold
    ],
    ids=str,
)
def test_what_is_planned_is_what_is_allocated(pair: Path, options: dict[str, Any], ring: int) -> None:
    with load(pair, **options) as engine:
        plan, cache, drafts = engine.resources.plan, engine.resources.cache, engine.resources._draft_cache
        engine.generate([5, 6, 7], SamplingParams(max_tokens=2))
        pages, rings = 0, 0
        for pool, spec in zip(cache._pools, cache.spec.pools, strict=True):
            size = pool.keys.nbytes + pool.values.nbytes
            pages, rings = (pages + size, rings) if spec.window is None else (pages, rings + size)
        assert drafts is not None and plan.target_cache == pages > 0
        assert plan.rings == rings + sum(pool.nbytes for _, pool in drafts._rings.values()) and rings > 0
        assert rings == (engine.resources.options.max_batch + 1) * ring * 2 * 2 * (8 + 8) * 4
        assert plan.weights == sum(
            p.nbytes
            for module in (engine.resources.found.model, engine.resources.found.network)
            for p in module.parameters()  # type: ignore[union-attr]
        )
