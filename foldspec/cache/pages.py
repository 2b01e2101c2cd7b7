"""Which pages a request's entries live in. Plain Python: no tensors, so that it can be tested as bookkeeping.

A *slot* is ``page * page_size + offset``, the row of a pool's tensors where an entry lives. Pages are handed out
consecutively where that is possible, so that a long context is a few runs of consecutive slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foldspec.errors import ResourceError

__all__ = ["PageAllocator", "PageTables", "Rings", "Run"]

Run = tuple[int, int]  # (first slot, count)


class PageAllocator:
    """Hands out pages ``0 .. pages-1``; a page can have several owners and is free when it has none."""

    def __init__(self, pages: int) -> None:
        self._owners = [0] * pages

    @property
    def free_pages(self) -> int:
        return self._owners.count(0)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` pages: those right after ``after`` if they are free, else the first gap that holds them all,
        else whatever is left. Raises :class:`ResourceError` if there are too few; then nothing is taken."""
        if count > self.free_pages:
            raise ResourceError(
                f"{count} cache pages needed, {self.free_pages} of {len(self._owners)} free",
                do="end other requests or raise --cache-tokens",
            )
        start = 0 if after is None else after + 1
        if any(self._owners[start : start + count]) or start + count > len(self._owners):
            start = self._gap(count)
        if start < 0:
            taken = [p for p, owners in enumerate(self._owners) if not owners][:count]
        else:
            taken = list(range(start, start + count))
        for page in taken:
            self._owners[page] = 1
        return taken

    def _gap(self, count: int) -> int:
        """First page of the first run of ``count`` free pages, or -1."""
        run = 0
        for page, owners in enumerate(self._owners):
            run = 0 if owners else run + 1
            if run == count:
                return page - count + 1
        return -1

    def share(self, pages: list[int]) -> None:
        """Add an owner to each page."""
        for page in pages:
            assert self._owners[page], "a free page cannot be shared"
            self._owners[page] += 1

    def free(self, pages: list[int]) -> None:
        """Take one owner from each page."""
        for page in pages:
            assert self._owners[page], "a page was freed twice"
            self._owners[page] -= 1

    def owners(self, page: int) -> int:
        """How many requests hold the page."""
        return self._owners[page]

    @property
    def pages(self) -> int:
        """Pages in all, free or not."""
        return len(self._owners)


@dataclass
class _Table:
    pages: list[int] = field(default_factory=list)
    length: int = 0


class PageTables:
    """The page table and the committed length of every open request of one pool."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(pages)
        self._tables: dict[int, _Table] = {}

    def open(self, request: int) -> None:
        assert request not in self._tables, "the request is open already"
        self._tables[request] = _Table()

    def close(self, request: int) -> None:
        self.allocator.free(self._tables.pop(request).pages)

    def is_open(self, request: int) -> bool:
        return request in self._tables

    def pages(self, request: int) -> tuple[int, ...]:
        """The pages of a request, in the order of its entries: the reserved ones too."""
        return tuple(self._tables[request].pages)

    def length(self, request: int) -> int:
        return self._tables[request].length

    def reserve(self, request: int, entries: int) -> None:
        """Make sure that slots for the entries ``0 .. entries-1`` exist, to be written from the length on. Raises
        :class:`ResourceError`; then nothing has changed."""
        table = self._tables[request]
        behind = table.pages[table.length // self.page_size :]
        assert all(self.allocator.owners(page) == 1 for page in behind), "a shared page is read-only"
        missing = -(-entries // self.page_size) - len(table.pages)
        if missing > 0:
            table.pages += self.allocator.allocate(missing, after=table.pages[-1] if table.pages else None)

    def extend(self, request: int, length: int) -> None:
        """Say that the entries below ``length`` are written."""
        table = self._tables[request]
        assert table.length <= length <= len(table.pages) * self.page_size, "entries beyond the reserved slots"
        table.length = length

    def truncate(self, request: int, length: int) -> None:
        """Keep exactly ``length`` entries; pages wholly beyond them are given back."""
        table = self._tables[request]
        assert 0 <= length <= table.length, "truncate never adds entries"
        kept = -(-length // self.page_size)
        self.allocator.free(table.pages[kept:])
        del table.pages[kept:]
        table.length = length

    def keep(self, request: int, length: int) -> None:
        """Exactly ``length`` entries are there, those beyond the last length written in reserved slots."""
        self.extend(request, max(length, self.length(request)))
        self.truncate(request, length)

    def fork(self, source: int, request: int) -> list[tuple[int, int, int]]:
        """Open ``request`` with the entries of ``source``. Full pages are shared and from now on read-only; the slots
        to copy for the page that both go on writing come back as (source slot, new slot, count)."""
        self.open(request)
        old, new = self._tables[source], self._tables[request]
        full, rest = divmod(old.length, self.page_size)
        self.allocator.share(old.pages[:full])
        new.pages, new.length = old.pages[:full], full * self.page_size
        self.reserve(request, old.length)
        new.length = old.length
        if not rest:
            return []
        return [(old.pages[full] * self.page_size, new.pages[full] * self.page_size, rest)]

    @property
    def entries(self) -> int:
        """Entries that all pages together hold."""
        return self.allocator.pages * self.page_size

    def check(self) -> None:
        """Debug mode: every page has as many owners as tables name it, and no table says more than its pages hold."""
        named = [0] * self.allocator.pages
        for request, table in self._tables.items():
            assert 0 <= table.length <= len(table.pages) * self.page_size, f"request {request} is longer than its pages"
            assert len(set(table.pages)) == len(table.pages), f"request {request} has a page twice"
            for page in table.pages:
                named[page] += 1
        owners = [self.allocator.owners(page) for page in range(self.allocator.pages)]
        assert named == owners, "pages are owned by no table, or named by tables that do not own them"

    def runs(self, request: int, first: int, last: int) -> tuple[Run, ...]:
        """The entries ``first .. last-1`` as maximal runs of consecutive slots."""
        pages, size = self._tables[request].pages, self.page_size
        runs: list[Run] = []
        position = first
        while position < last:
            page, offset = divmod(position, size)
            slot, count = pages[page] * size + offset, min(size - offset, last - position)
            if runs and runs[-1][0] + runs[-1][1] == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((slot, count))
            position += count
        return tuple(runs)


class Rings:
    """Rings of ``capacity`` slots: a request's entry ``j`` lives at slot ``j % capacity`` of its ring, so that the last
    ``capacity`` entries are always there, in at most two runs."""

    def __init__(self, rings: int, capacity: int) -> None:
        self.capacity, self._rings = capacity, rings
        self._free = list(range(rings))
        self._ring: dict[int, int] = {}

    def check(self) -> None:
        """Debug mode: every ring is free or has one owner."""
        assert sorted([*self._free, *self._ring.values()]) == list(range(self._rings)), (
            "a window ring is lost or shared"
        )

    def open(self, request: int) -> None:
        if not self._free:
            raise ResourceError("no window ring is free", do="end other requests or raise --max-batch")
        self._ring[request] = self._free.pop(0)

    def close(self, request: int) -> None:
        if request in self._ring:
            self._free.append(self._ring.pop(request))

    def first_slot(self, request: int) -> int:
        """Where the request's ring begins."""
        return self._ring[request] * self.capacity

    def runs(self, request: int, first: int, last: int) -> tuple[Run, ...]:
        """The entries ``first .. last-1``, at most ``capacity`` of them, as runs of consecutive slots."""
        assert last - first <= self.capacity, "the ring no longer holds these entries"
        if first >= last:
            return ()
        base, a, b = self.first_slot(request), first % self.capacity, (last - 1) % self.capacity
        if a <= b:
            return ((base + a, last - first),)
        return ((base + a, self.capacity - a), (base, b + 1))
