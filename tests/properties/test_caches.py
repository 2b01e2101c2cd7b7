"""The two caches hold, for every open request, exactly the entries that were committed: against plain lists of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import tiny
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from foldspec.cache import paged
from foldspec.cache.paged import CacheSpec, PagedCache, TargetSpec
from foldspec.cache.pages import Rings, Run
from foldspec.cache.rows import Rows
from foldspec.cache.side import DraftCache, Layout
from foldspec.errors import ResourceError

SPEC = CacheSpec(layers=2, kv_heads=2, key_width=3, value_width=2, dtype=torch.float32)
PAGES, SIZE, BLOCK = 12, 4, 3
WINDOW, LONGEST = 4, 6  # of a ring: entries that a row reads, and rows of a forward at most


def rows_of(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, SPEC.kv_heads, width, generator=torch.Generator().manual_seed(seed))


class PagedLives(RuleBasedStateMachine):
    """Forwards of several requests at once, rollbacks, forks and ends. Unwritten slots hold NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(SPEC, pages=PAGES, page_size=SIZE, device="cpu")
        tiny.poison(self.cache)
        self.kept: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}  # keys and values of each layer
        self.floor: dict[int, int] = {}
        self.ids, self.seeds = itertools.count(), itertools.count()

    def length(self, request: int) -> int:
        return len(self.kept[request][0][0])

    def readable(self, layer: int, request: int) -> int:
        """The first entry that must still be there."""
        return 0

    @precondition(lambda self: len(self.kept) < 4)
    @rule()
    def open(self) -> None:
        request = next(self.ids)
        self.cache.open(request)
        self.kept[request] = tuple([rows_of(0, w, 0) for _ in range(SPEC.layers)] for w in (3, 2))  # type: ignore[assignment]
        self.floor[request] = 0

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        requests = data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True, min_size=1, max_size=3))
        counts = [data.draw(st.integers(1, LONGEST)) for _ in requests]
        held = {r: -(-self.length(r) // SIZE) for r in self.kept}
        needed = sum(-(-(self.length(r) + c) // SIZE) - held[r] for r, c in zip(requests, counts, strict=True))
        if needed > self.cache.tables.allocator.free_pages:
            return
        rows = Rows.of(requests, [self.length(r) for r in requests], counts)
        self.cache.begin(rows)
        for layer in range(SPEC.layers):
            new = [rows_of(rows.total, width, next(self.seeds)) for width in (3, 2)]
            for pool, fresh in zip(self.cache.slots(layer), new, strict=False):
                pool[list(self.cache.slots(layer).slots)] = fresh  # type: ignore[index,union-attr]
            for request, _, packed in rows:
                for kept, fresh in zip(self.kept[request], new, strict=True):
                    kept[layer] = torch.cat([kept[layer], fresh[packed]])
        for request, count in zip(requests, counts, strict=True):
            self.floor[request] = self.length(request) - count

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.kept)))
        length = data.draw(st.integers(self.floor[request], self.length(request)))
        self.cache.truncate(request, length)
        self.kept[request] = tuple([x[:length] for x in kind] for kind in self.kept[request])  # type: ignore[assignment]

    @precondition(lambda self: self.kept and len(self.kept) < 4 and self.cache.tables.allocator.free_pages)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, request = data.draw(st.sampled_from(sorted(self.kept))), next(self.ids)
        self.cache.fork(source, request)
        self.kept[request] = tuple(list(kind) for kind in self.kept[source])  # type: ignore[assignment]
        self.floor[request] = self.floor[source] = self.length(source)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.kept)))
        self.cache.close(request)
        del self.kept[request], self.floor[request]

    @invariant()
    def every_request_reads_back(self) -> None:
        for request, (keys, values) in self.kept.items():
            for layer in range(SPEC.layers):
                first = self.readable(layer, request)
                found = self.cache.entries(layer, request, first)
                assert torch.equal(tiny.dense(found[0]), keys[layer][first:])
                assert torch.equal(tiny.dense(found[1]), values[layer][first:])
        self.cache.check()

    def teardown(self) -> None:
        for request in self.kept:
            self.cache.close(request)
            self.cache.close(request)  # once more is nothing
        self.cache.check()
        assert self.cache.tables.allocator.free_pages == PAGES


TestPagedLives = PagedLives.TestCase
TestPagedLives.settings = settings(max_examples=40, stateful_step_count=25)

# rotated and un-rotated, un-rotated with a ring, rotated alone; two layers each; what a prefix keeps; the paper's
LAYOUTS = [
    (Layout(rotated=True), Layout(rotated=True)),
    (Layout(unrotated=True, ring=5 + BLOCK), Layout(unrotated=True, ring=2 + BLOCK)),
    (Layout(unrotated=True, ring=5 + BLOCK), Layout(rotated=True)),
    (Layout(rotated=True, unrotated=True),) * 2,
    (Layout(rotated=True, unrotated=True, side_values=True),) * 2,
]
WHOLE, TWICE = LAYOUTS[-2:]


class DraftLives(RuleBasedStateMachine):
    """A drafter's cache between rounds: a block of scratch rows, then the entries that were committed."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = tiny.PoisonedDraftCache(SPEC, pages=PAGES, page_size=SIZE, max_requests=4, device="cpu")
        self.layouts: dict[int, tuple[Layout, ...]] = {}
        self.kept: dict[int, dict[str, list[torch.Tensor]]] = {}  # values, rotated, unrotated, side of each layer
        self.ids, self.seeds = itertools.count(), itertools.count()

    def length(self, request: int) -> int:
        return len(self.kept[request]["values"][0])

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.kept)))

    @precondition(lambda self: len(self.kept) < 4)
    @rule(layouts=st.sampled_from(LAYOUTS))
    def open(self, layouts: tuple[Layout, ...]) -> None:
        request = next(self.ids)
        self.cache.open(request, layouts)
        self.layouts[request] = layouts
        self.kept[request] = {
            "values": [rows_of(0, 2, 0) for _ in layouts],
            "rotated": [rows_of(0, 3, 0) for _ in layouts],
            "unrotated": [rows_of(0, 3, 0) for _ in layouts],
            "side": [rows_of(0, 2, 0) for _ in layouts],
        }

    def write(self, request: int, count: int) -> dict[str, list[torch.Tensor]]:
        """Write entries behind the committed ones in every copy that the request keeps."""
        start = self.length(request)
        new: dict[str, list[torch.Tensor]] = {name: [] for name in self.kept[request]}
        for layer, layout in enumerate(self.layouts[request]):
            # side values unlike the others, so that neither can stand for the other
            values, rotated, unrotated, side = (rows_of(count, width, next(self.seeds)) for width in (2, 3, 3, 2))
            self.cache.write_values(layer, request, start, values)
            if layout.rotated or layout.ring:
                self.cache.write_keys(layer, request, start, rotated, rotated=True)
            if layout.unrotated:
                self.cache.write_keys(layer, request, start, unrotated, rotated=False)
            if layout.side_values:
                self.cache.write_values(layer, request, start, side, side=True)
            for name, rows in zip(new, (values, rotated, unrotated, side), strict=True):
                new[name].append(rows)
        return new

    def reserve(self, request: int, count: int) -> bool:
        try:
            self.cache.reserve(request, self.length(request) + count)
        except ResourceError:
            return False
        return True

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def scratch(self, data: st.DataObject) -> None:
        """A block: readable behind the entries, counted by nobody."""
        request = self.pick(data)
        if not self.reserve(request, BLOCK):
            return
        length = self.length(request)
        new = self.write(request, BLOCK)
        assert self.cache.length(request) == length
        self.check(
            request, {k: [torch.cat([a, b]) for a, b in zip(v, new[k], strict=True)] for k, v in self.of(request)}
        )

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), count=st.integers(1, 9))
    def absorb(self, data: st.DataObject, count: int) -> None:
        request = self.pick(data)
        if not self.reserve(request, count):
            return
        new = self.write(request, count)
        self.cache.extend(request, self.length(request) + count)
        self.kept[request] = {
            k: [torch.cat([a, b]) for a, b in zip(v, new[k], strict=True)] for k, v in self.of(request)
        }

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """To what is committed: drops nothing but scratch pages."""
        request = self.pick(data)
        self.cache.truncate(request, self.length(request))
        assert self.cache.length(request) == self.length(request)
        assert len(self.cache.tables._tables[request].pages) == -(-self.length(request) // SIZE)

    @precondition(lambda self: any(x in (WHOLE, TWICE) for x in self.layouts.values()) and len(self.kept) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """From a request that keeps every copy, into any layout; side values come from none but their like."""
        source = data.draw(st.sampled_from(sorted(r for r, kept in self.layouts.items() if kept in (WHOLE, TWICE))))
        layouts = data.draw(st.sampled_from(LAYOUTS if self.layouts[source] == TWICE else LAYOUTS[:-1]))
        if not self.cache.tables.allocator.free_pages:
            return
        request = next(self.ids)
        self.cache.fork(source, request, layouts)
        self.layouts[request] = layouts
        self.kept[request] = {name: list(layers) for name, layers in self.kept[source].items()}

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.cache.close(request)
        del self.kept[request], self.layouts[request]

    def of(self, request: int) -> list[tuple[str, list[torch.Tensor]]]:
        return list(self.kept[request].items())

    def check(self, request: int, wanted: dict[str, list[torch.Tensor]]) -> None:
        last = len(wanted["values"][0])
        for layer, layout in enumerate(self.layouts[request]):
            for first in {0, last // 2, last}:
                found = self.cache.values(layer, request, first, last)
                assert torch.equal(tiny.dense(found), wanted["values"][layer][first:])
            if layout.rotated or layout.ring:
                first = max(0, last - layout.ring) if layout.ring else 0
                found = self.cache.keys(layer, request, first, last, rotated=True)
                assert torch.equal(tiny.dense(found), wanted["rotated"][layer][first:])
            if layout.unrotated:
                found = self.cache.keys(layer, request, 0, last, rotated=False)
                assert torch.equal(tiny.dense(found), wanted["unrotated"][layer])
            if layout.side_values:
                found = self.cache.values(layer, request, 0, last, side=True)
                assert torch.equal(tiny.dense(found), wanted["side"][layer])

    @invariant()
    def every_request_reads_back(self) -> None:
        """A ring that scratch rows ran over still has the entries of its window: all but the block's worth."""
        for request, kept in self.kept.items():
            last = self.length(request)
            for layer, layout in enumerate(self.layouts[request]):
                window = layout.ring - BLOCK if layout.ring else last
                first = max(0, last - window)
                assert torch.equal(tiny.dense(self.cache.values(layer, request, 0, last)), kept["values"][layer])
                if layout.rotated or layout.ring:
                    found = self.cache.keys(layer, request, first, last, rotated=True)
                    assert torch.equal(tiny.dense(found), kept["rotated"][layer][first:])
                if layout.unrotated:
                    found = self.cache.keys(layer, request, 0, last, rotated=False)
                    assert torch.equal(tiny.dense(found), kept["unrotated"][layer])
                if layout.side_values:
                    found = self.cache.values(layer, request, 0, last, side=True)
                    assert torch.equal(tiny.dense(found), kept["side"][layer])

    def teardown(self) -> None:
        for request in self.kept:
            self.cache.close(request)
            self.cache.close(request)
        assert self.cache.tables.allocator.free_pages == PAGES


TestDraftLives = DraftLives.TestCase
TestDraftLives.settings = settings(max_examples=60, stateful_step_count=30)


def test_rows_must_follow_what_the_cache_holds() -> None:
    cache = PagedCache(SPEC, pages=4, page_size=SIZE, device="cpu")
    cache.open(0)
    with pytest.raises(AssertionError):
        cache.begin(Rows.of([0], [1], [2]))


def test_a_full_pool_is_an_error_that_says_so() -> None:
    cache = PagedCache(SPEC, pages=2, page_size=SIZE, device="cpu")
    cache.open(0)
    with pytest.raises(ResourceError, match="3 cache pages needed, 2 of 2 free"):
        cache.begin(Rows.of([0], [0], [9]))
    assert cache.tables.length(0) == 0 and cache.tables.allocator.free_pages == 2


def test_arrays_exist_once_a_layout_needs_them() -> None:
    """``full`` pays for no un-rotated copy, ``fold`` for no second rotated one, and nobody but the paper's layout for
    values twice."""
    cache = DraftCache(SPEC, pages=2, page_size=SIZE, max_requests=3, device="cpu")
    assert cache._keys == {} and cache._rings == {}
    cache.open(0, (Layout(rotated=True),) * 2)
    assert set(cache._keys) == {"rotated"}
    cache.open(1, (Layout(unrotated=True, ring=6),) * 2)
    assert set(cache._keys) == {"rotated", "unrotated"} and set(cache._rings) == {6}
    assert cache._rings[6][1].shape == (2, 3 * 6, 2, 3) and len(cache.arrays) == 3
    cache.open(2, (Layout(rotated=True, unrotated=True, side_values=True),) * 2)
    assert len(cache.arrays) == 4 and cache.arrays[-1].shape == cache.arrays[0].shape
    with pytest.raises(AssertionError, match="keeps no side values"):
        cache.values(0, 1, 0, 0, side=True)


def test_a_fork_has_all_copies_of_the_last_page() -> None:
    """Which is not shared, as the pages before it are."""
    cache = tiny.PoisonedDraftCache(SPEC, pages=4, page_size=SIZE, max_requests=2, device="cpu")
    cache.open(0, TWICE)
    cache.reserve(0, SIZE + 1)
    kept = [rows_of(SIZE + 1, width, seed) for seed, width in enumerate((2, 2, 3, 3))]
    for layer in range(SPEC.layers):
        for flag in (False, True):
            cache.write_values(layer, 0, 0, kept[flag], side=flag)
            cache.write_keys(layer, 0, 0, kept[2 + flag], rotated=flag)
    cache.extend(0, SIZE + 1)
    cache.fork(0, 1, TWICE)
    assert cache.values(0, 1, SIZE, SIZE + 1).runs != cache.values(0, 0, SIZE, SIZE + 1).runs
    for layer, flag in itertools.product(range(SPEC.layers), (False, True)):
        assert torch.equal(tiny.dense(cache.values(layer, 1, 0, SIZE + 1, side=flag)), kept[flag])
        assert torch.equal(tiny.dense(cache.keys(layer, 1, 0, SIZE + 1, rotated=flag)), kept[2 + flag])


def test_bytes_an_entry() -> None:
    """Golden: a side cache of 5 layers of 8 x 128 in bf16 takes 2.5 GiB at 131,072 entries."""
    spec = CacheSpec(layers=5, kv_heads=8, key_width=128, value_width=128, dtype=torch.bfloat16)
    assert spec.bytes_per_entry * 131072 == 2.5 * 2**30


# ---------------------------------------------------------------------------------------------------------------- rings


class RingLives(PagedLives):
    """The same lives where the second layer keeps a ring of a window and the longest forward."""

    def __init__(self) -> None:
        super().__init__()
        full = CacheSpec(1, SPEC.kv_heads, SPEC.key_width, SPEC.value_width, SPEC.dtype)
        ring = CacheSpec(1, SPEC.kv_heads, SPEC.key_width, SPEC.value_width, SPEC.dtype, window=WINDOW)
        spec = TargetSpec((full, ring), (0, 1))
        self.cache = PagedCache(spec, pages=PAGES, page_size=SIZE, device="cpu", requests=4, longest_pass=LONGEST)
        tiny.poison(self.cache)

    def readable(self, layer: int, request: int) -> int:
        """What a row reads that comes in the place of the last forward's first."""
        return 0 if layer == 0 else max(0, self.floor[request] - (WINDOW - 1))


TestRingLives = RingLives.TestCase
TestRingLives.settings = settings(max_examples=40, stateful_step_count=25)


def short(patch: pytest.MonkeyPatch) -> None:
    """A ring that is one entry too small."""
    capacity = paged.ring_capacity
    patch.setattr(paged, "ring_capacity", lambda *arguments: capacity(*arguments) - 1)


def unasserted(patch: pytest.MonkeyPatch) -> None:
    """And nobody says so."""
    short(patch)

    def runs(self: Rings, request: int, first: int, last: int) -> tuple[Run, ...]:
        base = self._ring[request] * self.capacity
        return tuple((base + entry % self.capacity, 1) for entry in range(first, last))

    patch.setattr(Rings, "runs", runs)


def one_ring(patch: pytest.MonkeyPatch) -> None:
    """Every request has the first ring."""
    patch.setattr(Rings, "open", lambda self, request: self._ring.__setitem__(request, 0))
    patch.setattr(Rings, "close", lambda self, request: None)
    patch.setattr(Rings, "check", lambda self: None)


# the first failure is enough
UNSHRUNK = settings(max_examples=60, stateful_step_count=25, phases=[Phase.generate], report_multiple_bugs=False)
MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "one entry short": short,
    "one entry short, unsaid": unasserted,
    "one ring for all": one_ring,
    "a fork without the ring": lambda patch: patch.setattr(paged, "_pairs", lambda old, new: []),
    "a ring that is lost": lambda patch: patch.setattr(
        Rings, "close", lambda self, request: self._ring.pop(request, 0)
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_rings_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(RingLives, settings=UNSHRUNK)


def test_a_ring_is_never_longer_than_a_request() -> None:
    ring = CacheSpec(1, 2, 8, 8, torch.float32, window=1024)
    for longest, pages, wanted in ((16, 100, 16), (2000, 100, 1024 - 1 + 9), (None, 3, 48)):
        cache = PagedCache(ring, pages=pages, page_size=16, device="cpu", requests=2, longest_pass=9, longest=longest)
        assert [data.shape[1] for data in cache.tensors] == [2 * wanted] * 2
