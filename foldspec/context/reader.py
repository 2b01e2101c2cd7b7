"""Stores a drafter's context and reads it for a block, by whatever reads the method returns.

This is where positions are applied: a drafter hands over un-rotated, already normed q and k. One code path serves every
method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from foldspec.cache.rows import Rows
from foldspec.cache.side import DraftCache, Layout
from foldspec.context.base import ContextMethod, Read
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import ReadArgs

__all__ = ["ContextReader", "Rotation"]

# Everything that any method may want to read: a prefix that is kept for later is stored so.
PREFIX_LAYOUT = Layout(rotated=True, unrotated=True)


class Rotation(Protocol):
    """A layer's rotary embedding: x [rows, heads, d] rotated to positions [rows]; ``alone`` if what it meets is not
    rotated. (Models have the class; this room does not import them.)"""

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, *, alone: bool = False) -> torch.Tensor: ...


class ContextReader:
    """A context method at work over a drafter's cache. ``scale`` is the layers' logit scale, 1/sqrt(d) as a rule."""

    def __init__(
        self, method: ContextMethod, cache: DraftCache, rope: Rotation, kernels: Kernels, scale: float
    ) -> None:
        self._method, self._cache, self._rope, self._kernels, self._scale = method, cache, rope, kernels, scale

    def open(self, request: int) -> None:
        self._cache.open(request, tuple(self._method.stores(i) for i in range(len(self._method.layers))))

    def open_prefix(self, request: int) -> None:
        """Open a request that only stores, in every copy, so that any method can :meth:`fork` from it."""
        self._cache.open(request, (PREFIX_LAYOUT,) * len(self._method.layers))

    def fork(self, prefix: int, request: int) -> None:
        """Open ``request`` with the entries of ``prefix``."""
        self._cache.fork(prefix, request, tuple(self._method.stores(i) for i in range(len(self._method.layers))))

    def close(self, request: int) -> None:
        self._cache.close(request)

    def reserve(self, request: int, entries: int) -> None:
        """Room for ``entries`` entries and a block after them. Raises :class:`ResourceError`."""
        self._cache.reserve(request, entries + self._method.block)

    def truncate(self, request: int, length: int) -> None:
        self._cache.truncate(request, length)

    def length(self, request: int) -> int:
        """Context entries stored for the request."""
        return self._cache.length(request)

    def bytes_read(self, n: int) -> int:
        """Bytes of keys and values that one block after ``n`` entries reads, over all layers."""
        spec, layers = self._cache.spec, range(len(self._method.layers))
        entries = sum(max(0, max(r.last) - min(r.first)) for layer in layers for r in self._method.reads(layer, n))
        return entries * spec.bytes_per_entry // spec.layers

    def absorb(self, rows: Rows, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Store the next committed entries: for each layer, keys (un-rotated) and values [total, kv heads, width]."""
        positions = rows.positions(keys[0].device)
        for request, start, packed in rows:
            assert start == self._cache.length(request), "entries are absorbed in order"
            self._cache.reserve(request, start + packed.stop - packed.start)
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            rotated: torch.Tensor | None = None
            for request, start, packed in rows:
                layout = self._cache.layout(request, layer)
                self._cache.write_values(layer, request, start, v[packed])
                if layout.unrotated:
                    self._cache.write_keys(layer, request, start, k[packed], rotated=False)
                if layout.rotated or layout.ring:
                    rotated = self._rope.rotate(k, positions) if rotated is None else rotated
                    self._cache.write_keys(layer, request, start, rotated[packed], rotated=True)
        for request, start, packed in rows:
            self._cache.extend(request, start + packed.stop - packed.start)

    def begin(self, rows: Rows) -> None:
        """Make room for the block rows behind each request's entries, once a round."""
        for request, start, packed in rows:
            assert start == self._cache.length(request), "a block begins right after the context"
            self._cache.reserve(request, start + packed.stop - packed.start)

    def attend(self, layer: int, rows: Rows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of one layer's block rows: q [total, heads, d], k and v [total, kv heads, d], all un-rotated; the
        result is [total, heads, d]."""
        at_positions: dict[tuple[int, ...], torch.Tensor] = {}  # reads and requests often share a query's positions

        def rotated(x: torch.Tensor, at: tuple[int, ...], *, alone: bool = False) -> torch.Tensor:
            if at not in at_positions:
                at_positions[at] = torch.tensor(at, device=x.device)
            return self._rope.rotate(x, at_positions[at], alone=alone)

        batch = []
        for request, n, packed in rows:
            # the block's rows go behind the context as scratch, so that a read of both is one stretch of entries
            self._cache.write_values(layer, request, n, v[packed])
            self._cache.write_keys(layer, request, n, rotated(k[packed], self._method.positions(n)), rotated=True)
            reads = []
            for read in self._reads(layer, n):
                query = rotated(q[packed], read.query_at, alone=read.keys == "unrotated")
                reads.append(self._arguments(layer, request, n, read, query))
            batch.append(reads)
        outputs = self._kernels.multi_read_attention(batch)
        return outputs[0].out if len(outputs) == 1 else torch.cat([o.out for o in outputs])

    def _reads(self, layer: int, n: int) -> list[Read]:
        """The method's reads. A mistake in them costs acceptance and never a token, so nothing later would tell."""
        reads, rows = self._method.reads(layer, n), self._method.block
        assert sum(read.block for read in reads) == 1, "exactly one read carries the block"
        for read in reads:
            assert len(read.first) == len(read.last) == len(read.query_at) == rows, "a read has a bound for each row"
            assert min(read.first) >= 0 and max(read.last) <= n, "a read stays inside the context"
            assert read.keys in ("rotated", "unrotated"), f"keys are rotated or unrotated, not {read.keys!r}"
        return reads

    def _arguments(self, layer: int, request: int, n: int, read: Read, q: torch.Tensor) -> ReadArgs:
        """Turn a read into what the operator takes: entries as runs of slots, bounds as columns of that sequence."""
        first, last = list(read.first), [max(f, l) for f, l in zip(read.first, read.last, strict=True)]
        if read.block:
            for r in range(self._method.block):
                block_first, block_last = self._method.layers[layer].block_span(r, self._method.block)
                # entries and block rows are one stretch: on a sliding layer narrower than the block, a row that skips
                # block rows is past all entries too
                assert last[r] == n and (block_first == 0 or first[r] == n), "the read must end where the block begins"
                first[r], last[r] = first[r] + block_first, n + block_last
        low, high = min(first), max(last)
        keys = self._cache.keys(layer, request, low, high, rotated=read.keys == "rotated")
        values = self._cache.values(layer, request, low, high)
        bounds = tuple(f - low for f in first), tuple(l - low for l in last)
        return ReadArgs(q, keys, values, *bounds, scale=self._scale * read.scale, exponent=read.exponent)
