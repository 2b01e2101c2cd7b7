"""The reads of a context method for rows whose places are on the device: as ``reader.py`` has them, with no look from
the host and shapes that no length changes, so that a round can be recorded once and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from foldspec.cache.rows import FixedRows
from foldspec.cache.side import DraftCache
from foldspec.context.base import ContextMethod, FixedRead, Rotation
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention.device import DeviceRead

__all__ = ["FixedReader"]


class FixedReader:
    """A context method without a state of its own at work over a drafter's cache. Arguments as :class:`ContextReader`
    takes them."""

    def __init__(
        self, method: ContextMethod, cache: DraftCache, rope: Rotation, kernels: Kernels, scale: float
    ) -> None:
        self._method, self._cache, self._rope, self._kernels, self._scale = method, cache, rope, kernels, scale
        self._layouts = [cache.fitted(method.stores(i)) for i in range(len(method.layers))]

    def absorb(self, rows: FixedRows, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Store keys (un-rotated) and values [total, kv heads, width] of each layer. How many of a request's rows count
        is said later: what lies behind them is written again before anyone reads it."""
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            layout = self._layouts[layer]
            self._cache.write_fixed_values(layer, rows, v)
            if layout.side_values:
                self._cache.write_fixed_values(layer, rows, v, side=True)
            if layout.unrotated:
                self._cache.write_fixed_keys(layer, layout, rows, k, rotated=False)
            if layout.rotated or layout.ring:
                turned = self._rope.rotate(k, rows.positions(), end=rows.end)
                self._cache.write_fixed_keys(layer, layout, rows, turned, rotated=True)

    def attend(self, layer: int, rows: FixedRows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of one layer's block rows: q [total, heads, d], k and v [total, kv heads, d], all un-rotated; the
        result is [total, heads, d]."""
        reads, layout = self._reads(layer, rows), self._layouts[layer]
        self._cache.write_fixed_values(layer, rows, v)
        # the block's own keys: every method that has fixed reads leaves the block where it is
        self._cache.write_fixed_keys(
            layer, layout, rows, self._rope.rotate(k, rows.positions(), end=rows.end), rotated=True
        )
        return self._kernels.device_attention([self._argument(layer, rows, read, q) for read in reads]).out.flatten(
            0, 1
        )

    def _reads(self, layer: int, rows: FixedRows) -> list[FixedRead]:
        kind = self._method.kind(layer)
        if kind not in rows.shared:
            facts, block = self._method.layers[layer], self._method.block
            rows.shared[kind] = [
                self._bounded(read, [facts.block_span(r, block) for r in range(block)])
                for read in self._method.fixed_reads(layer, rows.first, rows.far)
            ]
        return rows.shared[kind]

    @staticmethod
    def _bounded(read: FixedRead, spans: Sequence[tuple[int, int]]) -> FixedRead:
        """Bounds as the operator takes them, the block's rows behind the entries."""
        first, last = read.first, read.last
        if read.block:
            # a row that skips block rows is past all entries too (see ContextReader)
            begins, ends = zip(*spans, strict=True)
            if any(begins):
                first = torch.stack([first[:, r] + begin for r, begin in enumerate(begins)], 1)
            if len(set(ends)) == 1:
                last = last + ends[0]
            else:
                last = torch.stack([last[:, r] + end for r, end in enumerate(ends)], 1)
        return replace(read, first=first.int().contiguous(), last=last.int().contiguous())

    def _argument(self, layer: int, rows: FixedRows, read: FixedRead, q: torch.Tensor) -> DeviceRead:
        end = rows.end if read.reach is None else read.reach
        q = self._rope.rotate(q, read.query_at.flatten(), alone=read.keys == "unrotated", end=end)
        scale = self._scale
        if isinstance(read.scale, torch.Tensor):
            q = q * read.scale.flatten()[:, None, None].to(q.dtype)
        else:
            scale *= read.scale
        keys, values, ring = self._cache.fixed(layer, self._layouts[layer], rotated=read.keys == "rotated")
        table = rows.places.tables
        return DeviceRead(
            q.unflatten(0, rows.at.shape),
            keys,
            values,
            rows.places.rings[ring] if ring else table,
            table,
            read.first,
            read.last,
            scale,
            read.exponent,
            page=rows.places.page_size,
            ring=ring,
        )
