"""Recurrent states in the target's cache: whatever was run, taken back, forked and closed before, a request's next rows
come out as if its own kept rows had been run from nothing, to the last bit."""

from __future__ import annotations

import itertools

import pytest
import tiny
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foldspec.cache import recurrent
from foldspec.cache.paged import CacheSpec, PagedCache, TargetSpec
from foldspec.cache.recurrent import RecurrentSpec
from foldspec.cache.rows import Rows
from foldspec.errors import ResourceError
from foldspec.kernels.gated_delta import State
from foldspec.kernels.gated_delta.reference import gated_delta

TAPS, RECORDED, LONGEST, SIZE, PAGES = 3, 5, 9, 4, 40
STATES = RecurrentSpec(layers=2, key_heads=1, value_heads=2, key_width=3, value_width=2, taps=TAPS, dtype=torch.float32)
KEYS = CacheSpec(layers=1, kv_heads=1, key_width=2, value_width=2, dtype=torch.float32)
SPEC = TargetSpec((KEYS, STATES), (1, 0, 1))
RECURRENT = (0, 2)  # layers


def new_rows(count: int, seed: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta and columns of the convolution."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [(1, 3), (1, 3), (2, 2), (2,), (2,), (STATES.channels,)]
    x = [torch.randn(count, *size, generator=draw) for size in sizes]
    return (*x[:3], -x[3].abs(), x[4].sigmoid(), x[5])


def from_nothing(rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    n = len(rows[0])
    records = [torch.empty(n, *shape) for shape in ((1, 3), (2, 2), (2,))]
    return gated_delta(*rows[:5], State(torch.zeros(2, 3, 2), *records, kept=0))


def make_cache(requests: int = 4) -> PagedCache:
    cache = PagedCache(
        SPEC, pages=PAGES, page_size=SIZE, device="cpu", requests=requests, longest_pass=LONGEST, longest=400
    )
    tiny.poison(cache)
    return cache


class Lives(RuleBasedStateMachine):
    """``kept``: all rows of each request and recurrent layer. Forwards have up to 9 rows, of which 5 are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(recurrent, "RECORDED", RECORDED)
        self.cache = make_cache()
        self.kept: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        self.floor: dict[int, int] = {}
        self.ids, self.seeds = itertools.count(), itertools.count()

    def length(self, request: int) -> int:
        return len(self.kept[request][0][0])

    @rule()
    def open(self) -> None:
        request = next(self.ids)
        if len(self.kept) == 4:
            with pytest.raises(ResourceError, match="no recurrent state is free"):
                self.cache.open(request)
            assert not self.cache.tables.is_open(request)
            return
        self.cache.open(request)
        self.kept[request], self.floor[request] = [new_rows(0, 0) for _ in RECURRENT], 0

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        requests = data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True, min_size=1, max_size=3))
        counts = [data.draw(st.integers(1, LONGEST)) for _ in requests]
        if any(self.length(r) > 30 for r in requests):
            return
        self.cache.begin(Rows.of(requests, [self.length(r) for r in requests], counts))
        for at, layer in enumerate(RECURRENT):
            for request, count in zip(requests, counts, strict=True):
                new = new_rows(count, next(self.seeds))
                state, columns = self.cache.state(layer, request)
                before = torch.cat([torch.zeros(TAPS - 1, STATES.channels), self.kept[request][at][5]])
                assert torch.equal(
                    columns.extended(new[5], TAPS), torch.cat([before[len(before) - TAPS + 1 :], new[5]])
                )
                y = gated_delta(*new[:5], state)
                both = tuple(torch.cat([a, b]) for a, b in zip(self.kept[request][at], new, strict=True))
                assert torch.equal(y, from_nothing(both)[-count:])
                self.kept[request][at] = both
        for request, count in zip(requests, counts, strict=True):
            self.floor[request] = self.length(request) - min(count, RECORDED)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.kept)))
        if self.floor[request]:
            with pytest.raises(AssertionError, match="more rows taken back"):
                self.cache.truncate(request, self.floor[request] - 1)
        length = data.draw(st.integers(self.floor[request], self.length(request)))
        self.cache.truncate(request, length)
        self.kept[request] = [tuple(x[:length] for x in layer) for layer in self.kept[request]]

    @precondition(lambda self: 0 < len(self.kept) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, request = data.draw(st.sampled_from(sorted(self.kept))), next(self.ids)
        self.cache.fork(source, request)
        self.kept[request], self.floor[request] = list(self.kept[source]), self.floor[source]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.kept)))
        self.cache.close(request)
        del self.kept[request], self.floor[request]

    @invariant()
    def books_agree(self) -> None:
        self.cache.check()

    def teardown(self) -> None:
        for request in self.kept:
            self.cache.close(request)
            self.cache.close(request)  # once more is nothing
        assert self.cache.tables.allocator.free_pages == PAGES
        self.cache.check()
        for request in range(100, 104):  # all slots are free again
            self.cache.open(request)
        self.patch.undo()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_a_fork_that_finds_no_state_leaves_nothing_open() -> None:
    cache = make_cache(requests=1)
    cache.open(0)
    cache.begin(Rows.of([0], [0], [6]))
    with pytest.raises(ResourceError, match="no recurrent state is free"):
        cache.fork(0, 1)
    assert not cache.tables.is_open(1)
    cache.check()
    cache.close(0)
    assert cache.tables.allocator.free_pages == PAGES


def test_bytes_are_those_that_are_allocated() -> None:
    cache = make_cache(requests=3)
    pages = PAGES * SIZE * SPEC.bytes_per_entry
    assert sum(data.nbytes for data in cache.tensors) == pages + 3 * SPEC.bytes_per_request(LONGEST, 400)
    assert SPEC.bytes_read(7) == 7 * 16 + 2 * 4 * (2 * 3 * 2 + (TAPS - 1) * STATES.channels)
    assert SPEC.widths == ((2, 2),)


def test_half_precision_halves_the_columns_alone() -> None:
    half = RecurrentSpec(2, 1, 2, 3, 2, TAPS, torch.bfloat16)
    assert STATES.bytes_per_request(5) - half.bytes_per_request(5) == 2 * 2 * (TAPS - 1 + 5) * STATES.channels
