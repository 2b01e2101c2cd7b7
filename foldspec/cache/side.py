"""A drafter's context: the keys and values of every committed entry, in the copies that a context method asks for.

FOLD's far read needs un-rotated keys (its side cache). The window needs rotated ones, and only the last ``W + B`` of
them: a ring beside the un-rotated pages gives both reads without a second copy of the context. The paper's own layout
is that second copy, in full: a side cache of un-rotated keys and values beside the drafter's own cache (section B.4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from foldspec.cache.paged import CacheSpec, write
from foldspec.cache.pages import PageTables, Rings
from foldspec.cache.rows import FixedRows
from foldspec.kernels.multi_read_attention import Entries

__all__ = ["DraftCache", "Layout"]


@dataclass(frozen=True)
class Layout:
    """The key copies that one layer keeps for one request; values are always kept.

    ``ring`` > 0 keeps only the last ``ring`` rotated keys, in place of ``rotated``, which keeps them all; ``selection``
    > 0 has room for that many keys that are rotated anew, to positions of a reader's choice, and the block behind them.
    ``side_values``: the un-rotated keys have values of their own, as in FOLD's paper.
    """

    rotated: bool = False
    unrotated: bool = False
    ring: int = 0
    selection: int = 0
    side_values: bool = False

    @property
    def buffer(self) -> int:
        """Rotated keys that have a place of their own, in no page."""
        return self.ring or self.selection

    def within(self, longest: int) -> Layout:
        """A buffer as long as a request holds everything, so that a huge one costs no more than the context."""
        return replace(self, ring=min(self.ring, longest), selection=min(self.selection, longest))


class DraftCache:
    """Values, rotated keys, un-rotated keys, side values [layers, slots, kv heads, width] and rings, for many requests.

    An array exists once a request needs it, and from then on; of rings there is a pool for each capacity, at most
    ``longest`` (the most entries that a request may hold; None: all slots). Block rows are written behind the committed
    entries as scratch: readable in the same round, and never counted.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        pages: int,
        page_size: int,
        max_requests: int,
        device: torch.device | str,
        longest: int | None = None,
    ) -> None:
        self.spec, self._device, self._max_requests = spec, device, max_requests
        self.tables = PageTables(pages, page_size)
        self._slots = pages * page_size
        self._longest = min(longest or self._slots, self._slots)
        self._values = self._empty(self._slots, spec.value_width)
        self._keys: dict[str, torch.Tensor] = {}
        self._side_values: torch.Tensor | None = None
        self._rings: dict[int, tuple[Rings, torch.Tensor]] = {}
        self._layouts: dict[int, tuple[Layout, ...]] = {}

    def _empty(self, slots: int, width: int) -> torch.Tensor:
        shape = (self.spec.layers, slots, self.spec.kv_heads, width)
        return torch.empty(shape, dtype=self.spec.dtype, device=self._device)

    def open(self, request: int, layouts: tuple[Layout, ...]) -> None:
        """Open a request that keeps ``layouts[i]`` for layer ``i``."""
        self.tables.open(request)
        self._adopt(request, layouts)

    def _adopt(self, request: int, layouts: tuple[Layout, ...]) -> None:
        layouts = tuple(self.fitted(layout) for layout in layouts)
        self._layouts[request] = layouts
        for kind in ("rotated", "unrotated"):
            if kind not in self._keys and any(getattr(layout, kind) for layout in layouts):
                self._keys[kind] = self._empty(self._slots, self.spec.key_width)
        if self._side_values is None and any(layout.side_values for layout in layouts):
            self._side_values = self._empty(self._slots, self.spec.value_width)
        for capacity in {layout.buffer for layout in layouts if layout.buffer}:
            if capacity not in self._rings:
                ring = (
                    Rings(self._max_requests, capacity),
                    self._empty(self._max_requests * capacity, self.spec.key_width),
                )
                self._rings[capacity] = ring
            self._rings[capacity][0].open(request)

    def close(self, request: int) -> None:
        """Free what the request holds; nothing to do for one that is not open."""
        if not self.tables.is_open(request):
            return
        self.tables.close(request)
        for rings, _ in self._rings.values():
            rings.close(request)
        self._layouts.pop(request, None)

    @property
    def arrays(self) -> list[torch.Tensor]:
        """The arrays in pages that exist by now."""
        side = [] if self._side_values is None else [self._side_values]
        return [self._values, *self._keys.values(), *side]

    def check(self) -> None:
        """Debug mode: what must hold of pages, rings and layouts whoever is open."""
        self.tables.check()
        for rings, _ in self._rings.values():
            rings.check()
        assert all(self.tables.is_open(request) for request in self._layouts), "a layout outlives its request"

    def layout(self, request: int, layer: int) -> Layout:
        return self._layouts[request][layer]

    def length(self, request: int) -> int:
        return self.tables.length(request)

    def reserve(self, request: int, entries: int) -> None:
        """Make sure that entries below ``entries`` have slots. Raises :class:`ResourceError`."""
        self.tables.reserve(request, entries)

    def extend(self, request: int, length: int) -> None:
        """Count the entries below ``length`` as committed, once every layer has written them."""
        self.tables.extend(request, length)

    def truncate(self, request: int, length: int) -> None:
        """Keep exactly ``length`` entries. A ring can only go back by what it holds beyond its window, which covers a
        block; drafters store committed entries alone, so they never go back further."""
        self.tables.truncate(request, length)

    def write_values(self, layer: int, request: int, start: int, values: torch.Tensor, *, side: bool = False) -> None:
        """Store values [n, kv heads, width] of the entries from ``start`` on; ``side``: beside the un-rotated keys."""
        pool = self._value_pool(layer, request, side)
        write(pool, self.tables.runs(request, start, start + len(values)), values)

    def write_keys(self, layer: int, request: int, start: int, keys: torch.Tensor, *, rotated: bool) -> None:
        """Store keys [n, kv heads, width] of the entries from ``start`` on in the copy that is kept of their kind."""
        layout, end = self.layout(request, layer), start + len(keys)
        if rotated and layout.ring:
            first = max(start, end - layout.ring)
            rings, pool = self._rings[layout.ring]
            write(pool[layer], rings.runs(request, first, end), keys[first - start :])
        else:
            write(self._pool(layer, layout, rotated), self.tables.runs(request, start, end), keys)

    def keys(self, layer: int, request: int, first: int, last: int, *, rotated: bool) -> Entries:
        """Keys of the entries ``first .. last-1``, scratch rows included."""
        layout = self.layout(request, layer)
        if rotated and layout.ring:
            rings, pool = self._rings[layout.ring]
            return Entries(pool[layer], rings.runs(request, first, last))
        return Entries(self._pool(layer, layout, rotated), self.tables.runs(request, first, last))

    def write_selection(self, layer: int, request: int, start: int, keys: torch.Tensor) -> None:
        """Put keys [n, kv heads, width] at places ``start .. start+n-1`` of the selection."""
        rings, pool = self._rings[self.layout(request, layer).selection]
        write(pool[layer], rings.runs(request, start, start + len(keys)), keys)

    def selection(self, layer: int, request: int, first: int, last: int) -> Entries:
        """The keys at places ``first .. last-1`` of the selection."""
        rings, pool = self._rings[self.layout(request, layer).selection]
        return Entries(pool[layer], rings.runs(request, first, last))

    def _pool(self, layer: int, layout: Layout, rotated: bool) -> torch.Tensor:
        # another request may have made the array: what this one never wrote must not be read from it
        kind = "rotated" if rotated else "unrotated"
        assert getattr(layout, kind), f"layer {layer} keeps no {kind} keys: the method's stores() must ask for them"
        return self._keys[kind][layer]

    def values(self, layer: int, request: int, first: int, last: int, *, side: bool = False) -> Entries:
        """Values of the entries ``first .. last-1``, scratch rows included unless they are the ``side`` values."""
        return Entries(self._value_pool(layer, request, side), self.tables.runs(request, first, last))

    def _value_pool(self, layer: int, request: int, side: bool) -> torch.Tensor:
        assert not side or self.layout(request, layer).side_values, f"layer {layer} keeps no side values"
        pool = self._side_values if side else self._values
        assert pool is not None
        return pool[layer]

    # ------------------------------------------------------------------------------------------------- fixed rows

    def fitted(self, layout: Layout) -> Layout:
        """The layout as requests here keep it."""
        return layout.within(self._longest)

    def places(self, request: int) -> tuple[tuple[int, ...], dict[int, int]]:
        """The request's pages; and by capacity where its rings begin."""
        held = {layout.ring for layout in self._layouts[request] if layout.ring}
        return self.tables.pages(request), {ring: self._rings[ring][0].first_slot(request) for ring in held}

    def keep(self, request: int, length: int) -> None:
        """Exactly ``length`` entries are committed, all layers having written them in reserved slots."""
        self.tables.keep(request, length)

    def write_fixed_values(self, layer: int, rows: FixedRows, values: torch.Tensor, *, side: bool = False) -> None:
        """Store values [total, kv heads, width] of rows whose slots are reserved; ``side``: beside the un-rotated
        keys."""
        pool = self._side_values if side else self._values
        assert pool is not None, "no request keeps side values"
        pool[layer][rows.slots] = values

    def write_fixed_keys(
        self, layer: int, layout: Layout, rows: FixedRows, keys: torch.Tensor, *, rotated: bool
    ) -> None:
        """The same of keys, in the copy that ``layout`` has of their kind. (A ring holds a window and more than such
        rows, so that no two of them meet.)"""
        data, _, ring = self.fixed(layer, layout, rotated=rotated)
        data[rows.ring_slots(ring) if ring else rows.slots] = keys

    def fixed(self, layer: int, layout: Layout, *, rotated: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
        """A layer's keys of one kind and its values, [slots, kv heads, width]; the ring of the keys, or 0."""
        if rotated and layout.ring:
            return self._rings[layout.ring][1][layer], self._values[layer], layout.ring
        side = self._side_values if layout.side_values and not rotated else None
        return self._pool(layer, layout, rotated), (self._values if side is None else side)[layer], 0

    def fork(self, source: int, request: int, layouts: tuple[Layout, ...]) -> None:
        """Open ``request`` with the entries of ``source``, which must keep every copy that ``layouts`` reads.

        Pages are shared read-only but for the last; a ring is filled from the source's rotated keys.
        """
        copies = self.tables.fork(source, request)
        self._adopt(request, layouts)
        for old, new, count in copies:
            for pool in self.arrays:
                pool[:, new : new + count] = pool[:, old : old + count]
        n = self.tables.length(request)
        for layer, layout in enumerate(layouts):
            if layout.ring:
                first = max(0, n - layout.ring)
                kept = self.keys(layer, source, first, n, rotated=True)
                for slot, count in kept.runs:
                    self.write_keys(layer, request, first, kept.data[slot : slot + count], rotated=True)
                    first += count
