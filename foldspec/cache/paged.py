"""A target's cache: keys and values in pages, of layers that read a window in rings, and recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foldspec.cache.pages import PageTables, Rings, Run
from foldspec.cache.recurrent import Columns, RecurrentPool, RecurrentSpec, recorded_rows
from foldspec.cache.rows import FixedRows, Rows
from foldspec.errors import ResourceError, UsageError
from foldspec.kernels.gated_delta import State
from foldspec.kernels.multi_read_attention import Entries
from foldspec.kernels.multi_read_attention.device import DeviceRead
from foldspec.kernels.rotate_append import Slots
from foldspec.made_up import Numbers

__all__ = ["CacheSpec", "PagedCache", "TargetSpec", "write"]


@dataclass(frozen=True)
class CacheSpec:
    """The geometry of one pool: ``layers`` layers of ``kv_heads`` heads. With a ``window``, a row reads its own entry
    and at most the ``window - 1`` before it, so that older ones need not be kept."""

    layers: int
    kv_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    window: int | None = None

    @property
    def bytes_per_entry(self) -> int:
        return self.layers * self.kv_heads * (self.key_width + self.value_width) * self.dtype.itemsize


@dataclass(frozen=True)
class TargetSpec:
    """What a target keeps of a request. Layers of one geometry share a pool: layer ``i`` lies in ``pools[pool_of[i]]``,
    behind the layers before it that do."""

    pools: tuple[CacheSpec | RecurrentSpec, ...]
    pool_of: tuple[int, ...]

    @classmethod
    def uniform(cls, pool: CacheSpec) -> TargetSpec:
        """Every layer alike."""
        return cls((pool,), (0,) * pool.layers)

    @property
    def last_whole(self) -> int | None:
        """The last layer that reads all entries; None where there is none."""
        found = (
            i
            for i in reversed(range(len(self.pool_of)))
            if isinstance(pool := self.pools[self.pool_of[i]], CacheSpec) and pool.window is None
        )
        return next(found, None)

    @property
    def attention(self) -> tuple[CacheSpec, ...]:
        """The pools of keys and values."""
        return tuple(pool for pool in self.pools if isinstance(pool, CacheSpec))

    @property
    def recurrent(self) -> tuple[RecurrentSpec, ...]:
        """The pools of states."""
        return tuple(pool for pool in self.pools if isinstance(pool, RecurrentSpec))

    @property
    def not_fixed(self) -> str:
        """Why a cache for it takes no fixed rows; empty if it does."""
        if self.recurrent:
            return "the target has recurrent states"
        windows = any(pool.window is not None for pool in self.attention)
        return "the target has layers that keep a window in rings" if windows else ""

    @property
    def bytes_per_entry(self) -> int:
        """Of the pools that keep every entry, in pages."""
        return sum(pool.bytes_per_entry for pool in self.attention if pool.window is None)

    def bytes_per_request(self, longest_pass: int, longest: int) -> int:
        """Of the rest, rings and states: whatever the request holds. Arguments as for :class:`PagedCache`."""
        windows = [pool for pool in self.attention if pool.window is not None]
        rings = sum(ring_capacity(pool, longest_pass, longest) * pool.bytes_per_entry for pool in windows)
        return rings + sum(pool.bytes_per_request(recorded_rows(longest_pass)) for pool in self.recurrent)

    def bytes_read(self, entries: int) -> int:
        """Bytes that one row reads behind ``entries`` entries: keys, values and states."""
        keys = sum(min(entries, pool.window or entries) * pool.bytes_per_entry for pool in self.attention)
        return keys + sum(pool.bytes_read for pool in self.recurrent)

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Each (key width, value width) that attention meets."""
        return tuple(dict.fromkeys((pool.key_width, pool.value_width) for pool in self.attention))


def ring_capacity(pool: CacheSpec, longest_pass: int, longest: int) -> int:
    """A window, and what one pass writes behind it: all of that may be taken back, and the window must be there then.
    As long as a request, a ring holds everything."""
    assert pool.window is not None
    return min(pool.window - 1 + longest_pass, longest)


class _Pool:
    """The tensors of one geometry. Not zeroed: on a CPU, what is never written then takes no memory. Nothing unwritten
    is ever read."""

    def __init__(self, spec: CacheSpec, slots: int, rings: Rings | None, device: torch.device | str) -> None:
        shape = (spec.layers, slots, spec.kv_heads)
        self.keys = torch.empty(*shape, spec.key_width, dtype=spec.dtype, device=device)
        self.values = torch.empty(*shape, spec.value_width, dtype=spec.dtype, device=device)
        self.layers = list(zip(self.keys, self.values, strict=True))
        self.rings = rings
        self.begun: tuple[int, ...] | torch.Tensor = ()

    def copy(self, old: int, new: int, count: int) -> None:
        for data in (self.keys, self.values):
            data[:, new : new + count] = data[:, old : old + count]


class PagedCache:
    """Keys and values [layers, slots, kv heads, width] of many requests: with one page table a request, and for layers
    that read a window one ring a request; and the states of layers that are recurrent.

    ``spec``          one geometry for all layers, or a :class:`TargetSpec`
    ``requests``      most that may be open at once, where there are rings or states
    ``longest_pass``  most rows of one request in one forward, where there are rings or states
    ``longest``       most entries of one request (None: all slots)
    ``marks``         most states that :meth:`mark` may hold at once

    A forward calls :meth:`begin` once; then, in every layer, it writes its rows to :meth:`slots` and reads
    :meth:`entries`, or brings each request's :meth:`state` up to its rows.
    """

    def __init__(
        self,
        spec: CacheSpec | TargetSpec,
        *,
        pages: int,
        page_size: int,
        device: torch.device | str,
        requests: int = 1,
        longest_pass: int = 1,
        longest: int | None = None,
        marks: int = 0,
    ) -> None:
        self.spec = TargetSpec.uniform(spec) if isinstance(spec, CacheSpec) else spec
        self.tables = PageTables(pages, page_size)
        self._longest_pass = longest_pass
        self._watched: int | None = None
        self._begun = Rows((), (), ())
        self._last: dict[int, list[tuple[int, torch.Tensor]]] = {}  # request -> (first position, queries)
        self._asked: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._ask_scale = 1.0
        self._pools: list[_Pool] = []
        self._recurrent: list[RecurrentPool] = []
        homes: list[_Pool | RecurrentPool] = []
        for pool in self.spec.pools:
            if isinstance(pool, RecurrentSpec):
                self._recurrent.append(RecurrentPool(pool, requests + marks, recorded_rows(longest_pass), device))
                homes.append(self._recurrent[-1])
                continue
            slots, rings = pages * page_size, None
            if pool.window is not None:
                rings = Rings(requests, ring_capacity(pool, longest_pass, min(longest or slots, slots)))
                slots = requests * rings.capacity
            self._pools.append(_Pool(pool, slots, rings, device))
            homes.append(self._pools[-1])
        self._layers: dict[int, tuple[_Pool, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._states: dict[int, tuple[RecurrentPool, int]] = {}
        for layer, number in enumerate(self.spec.pool_of):
            home, place = homes[number], self.spec.pool_of[:layer].count(number)
            if isinstance(home, RecurrentPool):
                self._states[layer] = home, place
            else:
                self._layers[layer] = home, home.layers[place]

    @property
    def _rings(self) -> list[Rings]:
        return [pool.rings for pool in self._pools if pool.rings is not None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is allocated."""
        entries = [data for pool in self._pools for data in (pool.keys, pool.values)]
        return entries + [data for pool in self._recurrent for data in pool.tensors]

    def open(self, request: int) -> None:
        """Raises :class:`ResourceError` where no ring or state is free; then nothing is open."""
        self.tables.open(request)
        self._open_rest(request, None)

    def _open_rest(self, request: int, source: int | None) -> None:
        """Rings, empty, and states, those of ``source`` if there is one."""
        try:
            for rings in self._rings:
                rings.open(request)
            for pool in self._recurrent:
                if source is None:
                    pool.open(request)
                else:
                    pool.fork(source, request)
        except ResourceError:
            self.close(request)
            raise

    def close(self, request: int) -> None:
        """Free what the request holds; nothing to do for one that is not open."""
        self._asked.pop(request, None)
        if self.tables.is_open(request):
            self.tables.close(request)
        for rings in self._rings:
            rings.close(request)
        for states in self._recurrent:
            states.close(request)

    def check(self) -> None:
        """Debug mode: what must hold of pages, rings and states whoever is open."""
        self.tables.check()
        for rings in self._rings:
            rings.check()
        for states in self._recurrent:
            states.check()

    def reserve(self, request: int, entries: int) -> None:
        """Make sure that entries below ``entries`` have slots. Raises :class:`ResourceError`; then nothing changed."""
        self.tables.reserve(request, entries)

    def begin(self, rows: Rows) -> None:
        """Reserve the slots of these rows and count them in. Raises :class:`ResourceError`; then none is counted.

        Of :class:`FixedRows` both is the caller's: slots before the pass, and :meth:`end` and :meth:`keep` after it."""
        if isinstance(rows, FixedRows):
            for pool in self._pools:
                pool.begun = rows.slots
            return
        ends = [start + packed.stop - packed.start for _, start, packed in rows]
        for (request, start, _), end in zip(rows, ends, strict=True):
            assert start == self.tables.length(request), "rows must follow the entries that the cache holds"
            self.tables.reserve(request, end)
        for request, end in zip(rows.requests, ends, strict=True):
            self.tables.extend(request, end)
        self._begun = rows
        for pool in self._pools:
            assert pool.rings is None or max(rows.counts, default=0) <= self._longest_pass, "too long for the rings"
            pool.begun = tuple(
                slot
                for (request, start, _), end in zip(rows, ends, strict=True)
                for first, count in self._runs(pool, request, start, end)
                for slot in range(first, first + count)
            )
        for states in self._recurrent:
            for (request, start, _), end in zip(rows, ends, strict=True):
                states.begin(request, start, end - start)

    def end(self) -> None:
        """A pass over fixed rows is over: nothing of it is kept."""
        for pool in self._pools:
            pool.begun = ()

    def watch(self, request: int | None = None) -> None:
        """From now on keep the queries of the last forward in the last layer that reads all entries, for
        :meth:`asked`; of ``request``, those of all its forwards. Raises :class:`UsageError` if there is no such layer.
        """
        self._watched = self.spec.last_whole
        if self._watched is None:
            raise UsageError("this target has no layer that reads its whole context", do="use another --context")
        if request is not None:
            self._asked.setdefault(request, [])

    @property
    def watched_key_bytes(self) -> int:
        """Bytes of one entry's key in the watched layer."""
        assert self._watched is not None, "nobody watches"
        keys, _ = self._layers[self._watched][1]
        return keys[0].numel() * keys.element_size()

    def ask(self, layer: int, q: torch.Tensor, scale: float) -> None:
        """A layer's rotated queries [total, heads, d] of the rows that :meth:`begin` counted in, and their scale."""
        if layer == self._watched:
            self._last, self._ask_scale = {}, scale
            for request, start, packed in self._begun:
                self._last[request] = [(start, q[packed])]
                if request in self._asked:
                    self._asked[request] += self._last[request]

    def asked(self, request: int, position: int) -> tuple[int, torch.Tensor, float]:
        """The watched layer, the query [heads, d] at ``position``, which was kept, and its scale."""
        assert self._watched is not None, "nobody watches"
        for start, q in self._asked.get(request) or self._last[request]:
            if start <= position < start + len(q):
                return self._watched, q[position - start], self._ask_scale
        raise AssertionError("the last forward had no such row")

    def _runs(self, pool: _Pool, request: int, first: int, last: int) -> tuple[Run, ...]:
        return (pool.rings or self.tables).runs(request, first, last)

    def slots(self, layer: int) -> Slots:
        """Where keys and values of the rows that :meth:`begin` reserved go, one slot a row."""
        pool, data = self._layers[layer]
        return Slots(*data, pool.begun)

    def entries(self, layer: int, request: int, first: int = 0) -> tuple[Entries, Entries]:
        """Keys and values of the request's entries from ``first`` on, in order. A ring holds those that rows of the
        last forward read."""
        pool, (keys, values) = self._layers[layer]
        runs = self._runs(pool, request, first, self.tables.length(request))
        return Entries(keys, runs), Entries(values, runs)

    def fixed_read(self, layer: int, rows: FixedRows, q: torch.Tensor, scale: float) -> DeviceRead:
        """What rotated q [total, heads, d] of rows that :meth:`begin` was given reads in a layer that keeps all
        entries: each row its own and all before it."""
        keys, values = self._layers[layer][1]
        table = rows.places.tables
        q = q.unflatten(0, rows.at.shape)
        return DeviceRead(q, keys, values, table, table, *rows.causal, scale, page=rows.places.page_size)

    def state(self, layer: int, request: int) -> tuple[State, Columns]:
        """What a recurrent layer keeps of a request whose rows :meth:`begin` counted in: to be brought up to them."""
        states, place = self._states[layer]
        return states.state(place, request)

    def fill(self, request: int, entries: int, numbers: Numbers) -> None:
        """Give an open request so many entries in all, and states after them, that are made up from the last one on
        that it holds. Raises :class:`ResourceError`; then nothing changed."""
        start = self.tables.length(request)
        self.tables.reserve(request, entries)
        self.tables.extend(request, entries)
        for pool in self._pools:
            first = start if pool.rings is None else max(start, entries - pool.rings.capacity)
            runs = self._runs(pool, request, first, entries)
            for data in (*pool.keys, *pool.values):
                for slot, count in runs:  # inside, so that the same entries get the same numbers wherever pages lie
                    numbers.fill(data[slot : slot + count])
        for states in self._recurrent:
            states.fill(request, entries, numbers)

    def truncate(self, request: int, length: int) -> None:
        """Keep exactly ``length`` entries, no fewer than before the last forward; and where there are states, all but
        ``recurrent.RECORDED`` of the last forward's rows at least."""
        for states in self._recurrent:
            states.check_length(request, length)
        self.tables.truncate(request, length)

    def places(self, request: int) -> tuple[tuple[int, ...], dict[int, int]]:
        """Where an open request's entries lie: its pages, and no rings (see :attr:`TargetSpec.not_fixed`)."""
        return self.tables.pages(request), {}

    def keep(self, request: int, length: int) -> None:
        """Exactly ``length`` entries are there after a pass over fixed rows, whose slots were reserved."""
        self.tables.keep(request, length)

    def mark(self, request: int) -> None:
        """Keep what the request holds for :meth:`rewind`, however many forwards come between: a state cannot be cut at
        a row, and is copied. Raises :class:`ResourceError`."""
        for states in self._recurrent:
            states.mark(request)

    def rewind(self, request: int, length: int) -> None:
        """Go back to the mark, when the request held ``length`` entries."""
        for states in self._recurrent:
            states.rewind(request)
        self.tables.truncate(request, length)

    def fork(self, source: int, request: int) -> None:
        """Open ``request`` with the entries of ``source``; full pages are shared, the last one, rings and states are
        copied."""
        copies = self.tables.fork(source, request)
        self._open_rest(request, source)
        length = self.tables.length(request)
        for pool in self._pools:
            if pool.rings is not None:
                first = max(0, length - pool.rings.capacity)
                of_source, own = (pool.rings.runs(each, first, length) for each in (source, request))
                copies_here = _pairs(of_source, own)
            else:
                copies_here = copies
            for old, new, count in copies_here:
                pool.copy(old, new, count)


def _pairs(old: tuple[Run, ...], new: tuple[Run, ...]) -> list[tuple[int, int, int]]:
    """(old slot, new slot, count) of the same entries in two rings of one capacity, whose runs break alike."""
    return [(a, b, count) for (a, count), (b, _) in zip(old, new, strict=True)]


def write(pool: torch.Tensor, runs: tuple[tuple[int, int], ...], rows: torch.Tensor) -> None:
    """Copy rows [n, heads, width] to the slots that ``runs`` name."""
    done = 0
    for slot, count in runs:
        pool[slot : slot + count] = rows[done : done + count]
        done += count
