"""A target's keys and values, in pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foldspec.cache.pages import PageTables
from foldspec.cache.rows import Rows
from foldspec.kernels.multi_read_attention import Entries
from foldspec.kernels.rotate_append import Slots

__all__ = ["CacheSpec", "PagedCache", "write"]


@dataclass(frozen=True)
class CacheSpec:
    """The geometry of one pool: ``layers`` layers of ``kv_heads`` heads."""

    layers: int
    kv_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def bytes_per_entry(self) -> int:
        return self.layers * self.kv_heads * (self.key_width + self.value_width) * self.dtype.itemsize


class PagedCache:
    """Keys [layers, slots, kv heads, key width] and values of many requests, with one page table a request.

    A forward calls :meth:`begin` once; then, in every layer, it writes its rows to :meth:`slots` and reads
    :meth:`entries`.
    """

    def __init__(self, spec: CacheSpec, *, pages: int, page_size: int, device: torch.device | str) -> None:
        self.spec = spec
        self.tables = PageTables(pages, page_size)
        slots = pages * page_size
        # Not zeroed: on a CPU, pages never written then take no memory. Nothing unwritten is ever read.
        self._keys = torch.empty(spec.layers, slots, spec.kv_heads, spec.key_width, dtype=spec.dtype, device=device)
        self._values = torch.empty(spec.layers, slots, spec.kv_heads, spec.value_width, dtype=spec.dtype, device=device)
        self._layers = list(zip(self._keys, self._values, strict=True))
        self._begun: tuple[int, ...] = ()

    def open(self, request: int) -> None:
        self.tables.open(request)

    def close(self, request: int) -> None:
        """Free the request's pages; nothing to do for one that is not open."""
        if self.tables.is_open(request):
            self.tables.close(request)

    def reserve(self, request: int, entries: int) -> None:
        """Make sure that entries below ``entries`` have slots. Raises :class:`ResourceError`; then nothing changed."""
        self.tables.reserve(request, entries)

    def begin(self, rows: Rows) -> None:
        """Reserve the slots of these rows and count them in. Raises :class:`ResourceError`; then none is counted."""
        ends = [start + packed.stop - packed.start for _, start, packed in rows]
        for (request, start, _), end in zip(rows, ends, strict=True):
            assert start == self.tables.length(request), "rows must follow the entries that the cache holds"
            self.tables.reserve(request, end)
        for request, end in zip(rows.requests, ends, strict=True):
            self.tables.extend(request, end)
        self._begun = tuple(
            slot
            for (request, start, _), end in zip(rows, ends, strict=True)
            for first, count in self.tables.runs(request, start, end)
            for slot in range(first, first + count)
        )

    def slots(self, layer: int) -> Slots:
        """Where keys and values of the rows that :meth:`begin` reserved go, one slot a row."""
        return Slots(*self._layers[layer], self._begun)

    def entries(self, layer: int, request: int) -> tuple[Entries, Entries]:
        """Keys and values of all entries of the request, in order."""
        runs = self.tables.runs(request, 0, self.tables.length(request))
        keys, values = self._layers[layer]
        return Entries(keys, runs), Entries(values, runs)

    def truncate(self, request: int, length: int) -> None:
        """Keep exactly ``length`` entries."""
        self.tables.truncate(request, length)

    def fork(self, source: int, request: int) -> None:
        """Open ``request`` with the entries of ``source``; full pages are shared, the last one is copied."""
        for old, new, count in self.tables.fork(source, request):
            for pool in (self._keys, self._values):
                pool[:, new : new + count] = pool[:, old : old + count]


def write(pool: torch.Tensor, runs: tuple[tuple[int, int], ...], rows: torch.Tensor) -> None:
    """Copy rows [n, heads, width] to the slots that ``runs`` name."""
    done = 0
    for slot, count in runs:
        pool[slot : slot + count] = rows[done : done + count]
        done += count
