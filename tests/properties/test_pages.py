"""Pages, tables and rings as bookkeeping: random lives of requests against a model that remembers every entry."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foldspec.cache.pages import PageAllocator, PageTables, Rings
from foldspec.errors import ResourceError

PAGES, SIZE = 9, 4


class Lives(RuleBasedStateMachine):
    """Requests open, grow, shrink, fork and close over one small pool.

    Every entry that is written gets a number of its own in ``memory``, at the slot that the tables name. A request's
    entries must then always read back as they were written, whatever the others do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables = PageTables(PAGES, SIZE)
        self.memory: list[int | None] = [None] * (PAGES * SIZE)
        self.written: dict[int, list[int]] = {}
        self.floor: dict[int, int] = {}  # truncate is legal down to the length before the last forward
        self.ids, self.numbers = itertools.count(), itertools.count()

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.written)))

    def slots(self, request: int, first: int, last: int) -> list[int]:
        return [slot + i for slot, count in self.tables.runs(request, first, last) for i in range(count)]

    def owners(self) -> list[int]:
        return [self.tables.allocator.owners(page) for page in range(PAGES)]

    @precondition(lambda self: len(self.written) < 5)
    @rule()
    def open(self) -> None:
        request = next(self.ids)
        self.tables.open(request)
        self.written[request], self.floor[request] = [], 0

    @precondition(lambda self: self.written)
    @rule(data=st.data(), count=st.integers(0, 11))
    def grow(self, data: st.DataObject, count: int) -> None:
        """One forward: reserve, write, count in. Without room nothing changes."""
        request = self.pick(data)
        entries = self.written[request]
        end = len(entries) + count
        before, free = self.owners(), self.tables.allocator.free_pages
        have = self.tables.runs(request, 0, len(entries))
        missing = -(-end // SIZE) - self.pages(request)
        if missing > free:
            with pytest.raises(ResourceError, match="cache pages needed"):
                self.tables.reserve(request, end)
            assert self.owners() == before and self.tables.runs(request, 0, len(entries)) == have
            return
        self.tables.reserve(request, end)
        for slot in self.slots(request, len(entries), end):
            self.memory[slot] = next(self.numbers)
        self.tables.extend(request, end)
        self.floor[request] = len(entries)
        entries += [self.memory[slot] for slot in self.slots(request, len(entries), end)]  # type: ignore[misc]

    @precondition(lambda self: self.written)
    @rule(data=st.data(), count=st.integers(1, 6))
    def scratch(self, data: st.DataObject, count: int) -> None:
        """A block behind the entries: written, never counted."""
        request = self.pick(data)
        length = len(self.written[request])
        try:
            self.tables.reserve(request, length + count)
        except ResourceError:
            return
        for slot in self.slots(request, length, length + count):
            self.memory[slot] = -1

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        request = self.pick(data)
        length = data.draw(st.integers(self.floor[request], len(self.written[request])))
        self.tables.truncate(request, length)
        del self.written[request][length:]
        assert self.pages(request) == -(-length // SIZE)  # what lies wholly beyond is given back

    @precondition(lambda self: self.written and len(self.written) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, request = self.pick(data), next(self.ids)
        before, length = self.owners(), len(self.written[source])
        if length % SIZE and not self.tables.allocator.free_pages:
            with pytest.raises(ResourceError):
                self.tables.fork(source, request)
            if self.tables.is_open(request):  # half open is allowed, so long as closing it undoes all of it
                self.tables.close(request)
            assert self.owners() == before
            return
        for old, new, count in self.tables.fork(source, request):
            self.memory[new : new + count] = self.memory[old : old + count]
        self.written[request] = list(self.written[source])
        self.floor[request] = self.floor[source] = length

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.tables.close(request)
        del self.written[request], self.floor[request]

    def pages(self, request: int) -> int:
        return len(self.tables._tables[request].pages)

    @invariant()
    def entries_read_back(self) -> None:
        for request, entries in self.written.items():
            assert self.tables.length(request) == len(entries)
            assert [self.memory[slot] for slot in self.slots(request, 0, len(entries))] == entries

    @invariant()
    def runs_are_maximal(self) -> None:
        for request, entries in self.written.items():
            for first, last in ((0, len(entries)), (len(entries) // 3, len(entries) // 2), (1, len(entries))):
                runs = self.tables.runs(request, first, last)
                assert sum(count for _, count in runs) == max(0, last - first) and all(count > 0 for _, count in runs)
                assert all(a + count != b for (a, count), (b, _) in itertools.pairwise(runs))
                whole = self.slots(request, 0, len(entries))
                assert self.slots(request, first, last) == whole[first:last]

    @invariant()
    def owners_are_counted(self) -> None:
        held = [page for request in self.written for page in self.tables._tables[request].pages]
        assert self.owners() == [held.count(page) for page in range(PAGES)]
        assert self.tables.allocator.free_pages == self.owners().count(0)

    @invariant()
    def only_full_pages_are_shared(self) -> None:
        for request, entries in self.written.items():
            pages = self.tables._tables[request].pages
            shared = [i for i, page in enumerate(pages) if self.tables.allocator.owners(page) > 1]
            assert all(i < self.floor[request] // SIZE and i < len(entries) // SIZE for i in shared)

    def teardown(self) -> None:
        for request in list(self.written):
            self.tables.close(request)
        assert self.tables.allocator.free_pages == PAGES


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40)


# ------------------------------------------------------------------------------------------------------------ allocator


@given(st.lists(st.integers(1, 3), max_size=6), st.data())
def test_pages_come_consecutively_wherever_a_gap_holds_them(sizes: list[int], data: st.DataObject) -> None:
    allocator = PageAllocator(12)
    taken = [allocator.allocate(size) for size in sizes if size <= allocator.free_pages]
    for pages in taken:
        if data.draw(st.booleans()):
            allocator.free(pages)
    free = [page for page in range(12) if not allocator.owners(page)]
    count = data.draw(st.integers(0, len(free)))
    after = data.draw(st.none() | st.integers(0, 11))
    fits = [p for p in range(13 - count) if all(q in free for q in range(p, p + count))]
    pages = allocator.allocate(count, after)
    assert len(set(pages)) == count and set(pages) <= set(free)
    assert all(allocator.owners(page) == 1 for page in pages)
    if count and fits:
        assert pages == list(range(pages[0], pages[0] + count))
        if after is not None and after + 1 in fits:
            assert pages[0] == after + 1  # growing goes on where the request ended
        else:
            assert pages[0] == fits[0]


def test_a_request_that_grows_alone_is_one_run() -> None:
    tables = PageTables(40, 4)
    tables.open(0)
    for length in range(1, 150, 7):
        tables.reserve(0, length)
        tables.extend(0, length)
        assert tables.runs(0, 0, length) == ((tables.runs(0, 0, 1)[0][0], length),)


def test_too_many_pages_are_refused_and_none_is_taken() -> None:
    allocator = PageAllocator(3)
    allocator.allocate(1)
    with pytest.raises(
        ResourceError, match="3 cache pages needed, 2 of 3 free; end other requests or raise --cache-tokens"
    ):
        allocator.allocate(3)
    assert allocator.free_pages == 2


@pytest.mark.parametrize("mistake", ["free twice", "share a free page"])
def test_mistakes_of_the_caller_are_caught(mistake: str) -> None:
    allocator = PageAllocator(2)
    (page,) = allocator.allocate(1)
    allocator.free([page])
    with pytest.raises(AssertionError):
        allocator.free([page]) if mistake == "free twice" else allocator.share([page])


def test_lengths_only_go_where_they_may() -> None:
    tables = PageTables(2, 4)
    tables.open(1)
    with pytest.raises(AssertionError):
        tables.open(1)
    tables.reserve(1, 4)
    with pytest.raises(AssertionError):
        tables.extend(1, 5)
    tables.extend(1, 4)
    with pytest.raises(AssertionError):
        tables.extend(1, 3)
    with pytest.raises(AssertionError):
        tables.truncate(1, 5)


# ---------------------------------------------------------------------------------------------------------------- rings


@given(st.integers(1, 9), st.lists(st.integers(0, 2), min_size=1, max_size=40), st.data())
def test_rings_hold_the_last_entries(capacity: int, growing: list[int], data: st.DataObject) -> None:
    """Three rings in one memory; each always gives back its last ``capacity`` entries, in at most two runs."""
    rings = Rings(3, capacity)
    for request in range(3):
        rings.open(request)
    memory: list[tuple[int, int] | None] = [None] * (3 * capacity)
    lengths = [0, 0, 0]
    for request in growing:
        count = data.draw(st.integers(0, capacity))
        start = lengths[request]
        slots = [s + i for s, c in rings.runs(request, start, start + count) for i in range(c)]
        assert len(slots) == count
        for j, slot in enumerate(slots):
            memory[slot] = (request, start + j)
        lengths[request] += count
        for other, length in enumerate(lengths):
            first = data.draw(st.integers(max(0, length - capacity), length))
            runs = rings.runs(other, first, length)
            assert len(runs) <= 2 and all(c > 0 for _, c in runs)
            assert not (len(runs) == 2 and sum(runs[0]) == runs[1][0])  # maximal
            held = [memory[s + i] for s, c in runs for i in range(c)]
            assert held == [(other, j) for j in range(first, length)]


def test_rings_run_out_and_come_back() -> None:
    rings = Rings(2, 5)
    rings.open(7)
    rings.open(8)
    with pytest.raises(ResourceError, match="no window ring is free"):
        rings.open(9)
    rings.close(7)
    rings.close(7)  # closing twice, or what never had a ring, is nothing
    rings.close(9)
    rings.open(9)
    with pytest.raises(ResourceError):
        rings.open(7)


def test_a_ring_refuses_what_it_no_longer_holds() -> None:
    rings = Rings(1, 5)
    rings.open(0)
    with pytest.raises(AssertionError):
        rings.runs(0, 0, 6)
