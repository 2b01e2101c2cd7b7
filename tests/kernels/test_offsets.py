"""Offsets beyond 32 bits, in every kernel and in the caches: what lies far apart in memory gives the numbers of what
lies together. The far views are of memory that takes addresses alone, until a page of it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import native
import pytest
import tiny
import torch
from far import FAR, apart, empty
from interpreting import INTERPRETED
from native import INSTRUCTIONS

from foldspec.cache.paged import PagedCache, TargetSpec
from foldspec.cache.rows import Rows
from foldspec.cache.side import DraftCache
from foldspec.context import METHODS
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.linear.panels import rows
from foldspec.kernels.multi_read_attention import Entries, ReadArgs
from foldspec.kernels.rotate_append import Slots
from foldspec.noise import Noise

RUNS = [*INSTRUCTIONS, "reference"]
READERS = [*INSTRUCTIONS, "cpu", "reference"] if not INTERPRETED else ["triton"]  # that in test_triton.py


def run_of(name: str) -> Kernels:
    return native.kernels(name) if name in INSTRUCTIONS else tiny.kernels_of(name)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bit for bit in the compiled kernels; torch may add up in another order when memory lies otherwise."""
    tolerance = 0.0 if name in INSTRUCTIONS else 2e-5
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


# -------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("name", RUNS)
def test_rows_far_apart(name: str) -> None:
    """The operators between the caches: gate and up, the norm, the product with its addend."""
    run = run_of(name)
    x, plus, weight = drawn(3, 40), drawn(3, 19, seed=1), drawn(19, 20, seed=2)
    far = apart(x)
    assert far[2].data_ptr() - far[0].data_ptr() == 2 * FAR * 4
    gate, up = x.split(20, 1)
    assert torch.equal(run.silu_mul(*far.split(20, 1)), run.silu_mul(gate, up))
    assert torch.equal(run.rms_norm(far, x[0], 1e-5), run.rms_norm(x, x[0], 1e-5))
    packed = name != "reference"
    if packed:
        run.pack(weight.clone(), weight)
    found = run.linear(far[:, :20], weight, None, apart(plus), packed=packed)
    same(name, found, run.linear(gate, weight, None, plus, packed=packed))


@pytest.mark.parametrize("name", RUNS)
def test_rows_are_rotated_from_far_apart_and_stored_far_out(name: str) -> None:
    run, heads, width = run_of(name), (3, 2, 2), 32
    x, angles = drawn(3, sum(heads) * width), drawn(2, 3, 1, width // 2, seed=1)

    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, into: Slots) -> torch.Tensor:
        q, k, v = (part.unflatten(1, (-1, width)) for part in x.split_with_sizes([n * width for n in heads], 1))
        return run.rotate_append(q, k, v, (cos, sin), into)

    near = [torch.zeros(3, 2, width) for _ in range(2)]
    wanted = rotated(x, angles[0], angles[1], Slots(near[0], near[1], (0, 1, 2)))
    last = 2 * FAR // (2 * width)
    pools, slots = [empty(last + 1, 2, width) for _ in range(2)], (last, last // 2 + 1, 7)
    assert torch.equal(rotated(apart(x), apart(angles[0]), apart(angles[1]), Slots(pools[0], pools[1], slots)), wanted)
    for pool, kept in zip(pools, near, strict=True):
        assert torch.equal(torch.stack([pool[slot] for slot in slots]), kept)


COUNT, KV, WIDTH = 150, 2, 24  # entries over three blocks of the compiled kernel


def pool(kind: str) -> tuple[torch.Tensor, int]:
    """A pool [slots, KV, WIDTH] of addresses only, and the slot of its first entry."""
    if kind == "slots far apart":
        return empty(FAR * COUNT).as_strided((COUNT, KV, WIDTH), (FAR, WIDTH, 1)), 0
    if kind == "heads far apart":
        return empty(2 * FAR).as_strided((COUNT, KV, WIDTH), (WIDTH, FAR, 1)), 0
    slots = 2 * FAR // (KV * WIDTH) + COUNT
    return empty(slots, KV, WIDTH), slots - COUNT


@pytest.mark.parametrize("kind", ["slots far apart", "heads far apart", "slots far out"])
@pytest.mark.parametrize("name", READERS)
def test_entries_far_apart_and_far_out(name: str, kind: str) -> None:
    """Two reads, as FOLD has them, of which one begins in the middle."""
    run, (keys, first), (values, _) = run_of(name), pool(kind), pool(kind)
    near_keys, near_values, q = drawn(COUNT, KV, WIDTH), drawn(COUNT, KV, WIDTH, seed=1), drawn(3, 6, WIDTH, seed=2)
    keys[first : first + COUNT], values[first : first + COUNT] = near_keys, near_values

    def reads(k: torch.Tensor, v: torch.Tensor, at: int) -> list[ReadArgs]:
        entries = [Entries(x, ((at, 70), (at + 70, COUNT - 70))) for x in (k, v)]
        whole = ReadArgs(q, entries[0], entries[1], (0, 0, 1), (COUNT - 2, COUNT - 1, COUNT), 0.2)
        return [whole, ReadArgs(q, entries[0], entries[1], (0, 0, 0), (60, 61, 62), 0.4, 0.5)]

    found, wanted = (
        run.multi_read_attention([r])[0] for r in (reads(keys, values, first), reads(near_keys, near_values, 0))
    )
    same(name, found.out, wanted.out)
    same(name, found.lse, wanted.lse)


@pytest.mark.parametrize("name", [*INSTRUCTIONS, "cpu"])
def test_columns_beyond_32_bits(name: str) -> None:
    """The last entries of a sequence of more than 2 ** 32. (The definition copies whole sequences.)"""
    run, q, begin = run_of(name), drawn(2, 4, 8), 2**32
    space = empty(begin + 1000)  # every entry begins one float after the one before it
    space[begin:].copy_(drawn(1000))
    far = space.as_strided((begin + 900, 2, 8), (1, 8, 1))
    near = far[begin:].contiguous()
    seen = (100, 101), (898, 900)
    outputs = []
    for data, at in ((far, begin), (near, 0)):
        entries = Entries(data, ((0, len(data)),))
        first, last = (tuple(at + n for n in bounds) for bounds in seen)
        outputs.append(run.multi_read_attention([[ReadArgs(q, entries, entries, first, last, 0.3)]])[0])
    torch.testing.assert_close(outputs[0].out, outputs[1].out)
    torch.testing.assert_close(outputs[0].lse, outputs[1].lse)


# bands of columns that begin far out; panels so wide that a tile of them is
SHAPES = {"bands": (1024, 2**21 + 2**18), "panels": (64, 70_000_000)}
EVERYDAY = [("bands", name) for name in INSTRUCTIONS[:-1]]


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        pytest.param(*each, marks=() if each in EVERYDAY else pytest.mark.slow)
        for each in itertools.product(SHAPES, INSTRUCTIONS)
    ],
)
def test_a_matrix_of_more_than_32_bits(name: str, shape: str) -> None:
    """A product over weights that are zero but for the first and the last, and looking up a packed row."""
    run, (out, width) = run_of(name), SHAPES[shape]
    weight, x = empty(out, width, dtype=torch.bfloat16, scanned=True), empty(1, width, scanned=True)
    assert (out - 64 if shape == "bands" else 32) * width > 2**31  # where the last of them begins
    flat = weight.view(-1)
    flat[0], flat[-1], x[0, 0], x[0, -1] = 2.0, 3.0, 1.0, 5.0
    y = run.linear(x, weight, packed=True)
    assert y[0].tolist() == [2.0, *[0.0] * (out - 2), 15.0]
    found = rows(weight, torch.tensor([out - 1]))
    assert found[0, -1] == 3.0 and int(found.count_nonzero()) == 1


# --------------------------------------------------------------------------------------------------------------- caches

PAGE = 2**27  # entries: 2 ** 31 elements and more


class FarDraftCache(DraftCache):
    def _empty(self, slots: int, width: int) -> torch.Tensor:
        return empty(self.spec.layers, slots, self.spec.kv_heads, width)


def far_cache(spec: TargetSpec) -> PagedCache:
    """Three pages, of which another request has the first."""
    cache = PagedCache(spec, pages=3, page_size=16, device="cpu")
    cache.tables = type(cache.tables)(3, PAGE)
    (pool,), (own,) = spec.attention, cache._pools
    own.keys, own.values = (
        empty(pool.layers, 3 * PAGE, pool.kv_heads, width) for width in (pool.key_width, pool.value_width)
    )
    own.layers = list(zip(own.keys, own.values, strict=True))
    cache._layers = {i: (own, layer) for i, layer in enumerate(own.layers)}
    cache.open(9)
    cache.reserve(9, 1)
    return cache


@pytest.mark.parametrize("name", ["auto", "cpu", "reference"])
def test_a_target_whose_cache_is_far_out(name: str, tmp_path: Path) -> None:
    """Prefill, a block, and a fork that goes on alone, in pages that begin beyond 2 ** 31 elements."""
    model = tiny.load_target(tiny.write_target(tmp_path), name)
    logits = []
    for cache in (far_cache(model.cache_spec(torch.float32)), tiny.paged_cache(model)):
        cache.open(0)
        parts = [tiny.forward(model, cache, [tiny.prompt(37)], [0]).logits]
        cache.fork(0, 1)
        parts += [tiny.forward(model, cache, [[5, 6, 7]], [request]).logits for request in (1, 0)]
        logits.append(torch.cat(parts))
    same(name, *logits)


@pytest.mark.parametrize("context", METHODS)
def test_a_drafter_whose_context_is_far_out(context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages, its un-rotated copy, and (where the window is as wide as a page) its ring."""
    model = tiny.load_target(tiny.write_target(tmp_path / "target"))
    network = tiny.load_drafter(tiny.write_drafter(tmp_path / "drafter", tiny.ZLAB))
    taps = [drawn(40, 32, seed=seed) for seed in range(len(network.facts.taps))]
    seen: list[torch.Tensor] = []

    def watched(logits: torch.Tensor) -> list[int]:
        seen.append(logits)
        return logits.argmax(-1).tolist()

    monkeypatch.setattr("foldspec.drafters.dflash.greedy", watched)
    spec: dict[str, Any] = {"spec": network.cache_spec(torch.float32), "device": "cpu"}
    makers: list[Callable[[], DraftCache]] = [
        lambda: FarDraftCache(**spec, pages=2, page_size=PAGE, max_requests=2),
        lambda: DraftCache(**spec, pages=8, page_size=16, max_requests=2),
    ]
    window = PAGE if context in ("full", "window") else 8
    options = {"window": window, "alpha": 2.0, "yarn_ref": 64, "sinks": 2, "recents": 6}
    options |= {"draft_window": 8, "infllm_init": 4, "infllm_block": 4, "infllm_topk": 2, "cmr_chunk": 4, "cmr_topk": 3}
    for make in makers:
        cache = make()
        drafter = tiny.bind(network, model, cache, context=context, **options)
        drafter.open(9, 100)
        cache.reserve(9, 1)  # the first page
        drafter.open(0, 100)
        with torch.inference_mode():
            drafter.absorb(Rows.of([0], [0], [40]), [], taps)
            drafter.propose(Rows.of([0], [40], [1]), [3], [99], [Noise(0)])
    far, near = seen
    assert far.isfinite().all() and torch.equal(far, near)
