"""Stores a drafter's context and reads it for a block, by whatever reads the method returns.

This is where positions are applied: a drafter hands over un-rotated, already normed q and k. One code path serves every
method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from foldspec.cache.rows import FixedRows, Rows
from foldspec.cache.side import DraftCache, Layout
from foldspec.context.base import ContextMethod, Opened, Read, Rotation, Span, joined
from foldspec.context.fixed_reader import FixedReader
from foldspec.context.verifier import Verifier
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import Entries, ReadArgs

__all__ = ["ContextReader", "Rotation"]

# Everything that any method may want to read: a prefix that is kept for later is stored so.
PREFIX_LAYOUT = Layout(rotated=True, unrotated=True)
COPIED = 4096  # entries that a copy takes at a time


@dataclass
class _Held:
    """What the reader keeps of a request: the method's state, a rotation for each layer, whether a block was read since
    the last commit, and the entries that each layer's selection holds."""

    state: Any
    ropes: tuple[Rotation, ...]
    drafting: bool = False
    selected: dict[int, tuple[Span, ...]] = field(default_factory=dict)


class ContextReader:
    """A context method at work over a drafter's cache. ``scale`` is the layers' logit scale, 1/sqrt(d) as a rule;
    ``verifier`` is there for methods that need one, ``other_bytes`` (n -> what a round reads beside the drafter's
    context) for those that weigh what a read costs."""

    def __init__(
        self,
        method: ContextMethod,
        cache: DraftCache,
        rope: Rotation,
        kernels: Kernels,
        scale: float,
        verifier: Verifier | None = None,
        other_bytes: Callable[[int], int] | None = None,
    ) -> None:
        self._method, self._cache, self._rope, self._kernels, self._scale = method, cache, rope, kernels, scale
        self._verifier, self._other_bytes = verifier, other_bytes
        self._held: dict[int, _Held] = {}
        self._layers = range(len(method.layers))
        self._fixed = FixedReader(method, cache, rope, kernels, scale)

    # ------------------------------------------------------------------------------------------- a request's life

    def open(self, request: int, longest: int | None = None) -> None:
        """Begin with a request that may come to ``longest`` tokens, or go on with one that was suspended."""
        self._begin(request, longest)
        self._cache.open(request, self._layouts)

    def open_prefix(self, request: int) -> None:
        """Open a request that only stores, in every copy, so that any method can :meth:`fork` from it."""
        self._held[request] = _Held(None, (self._rope,) * len(self._layers))
        self._cache.open(request, (PREFIX_LAYOUT,) * len(self._layers))

    def fork(self, prefix: int, request: int, longest: int | None = None) -> None:
        """As :meth:`open`, with the entries of ``prefix``: shared, unless this request rotates keys in its own way or
        keeps values twice."""
        held, layouts = self._begin(request, longest), self._layouts
        if all(rope is self._rope for rope in held.ropes) and not any(layout.side_values for layout in layouts):
            self._cache.fork(prefix, request, layouts)
            return
        self._cache.open(request, layouts)
        for start in range(0, self._cache.length(prefix), COPIED):
            end = min(start + COPIED, self._cache.length(prefix))
            keys = [_dense(self._cache.keys(i, prefix, start, end, rotated=False)) for i in self._layers]
            values = [_dense(self._cache.values(i, prefix, start, end)) for i in self._layers]
            self.absorb(Rows.of([request], [start], [end - start]), keys, values)

    def suspend(self, request: int) -> None:
        """Free what the request holds in the cache; what the method knows of it stays until it is opened again."""
        self._cache.close(request)
        if request in self._held:
            self._held[request].drafting = False
            self._held[request].selected.clear()

    def close(self, request: int) -> None:
        self._cache.close(request)
        self._held.pop(request, None)

    def _begin(self, request: int, longest: int | None) -> _Held:
        if request not in self._held:
            keys = partial(self._stored, request)
            state = self._method.begin(Opened(longest, self._rope, self._scale, keys, self._share))
            ropes = tuple(self._method.rope(i, state, self._rope) for i in self._layers)
            self._held[request] = _Held(state, ropes)
        return self._held[request]

    @property
    def _layouts(self) -> tuple[Layout, ...]:
        return tuple(self._method.stores(i) for i in self._layers)

    def _stored(self, request: int, layer: int, first: int, last: int, rotated: bool) -> torch.Tensor:
        return _dense(self._cache.keys(layer, request, first, last, rotated=rotated))

    def reserve(self, request: int, entries: int) -> None:
        """Room for ``entries`` entries and a block after them. Raises :class:`ResourceError`."""
        self._cache.reserve(request, entries + self._method.block)

    def truncate(self, request: int, length: int) -> None:
        self._cache.truncate(request, length)

    def length(self, request: int) -> int:
        """Context entries stored for the request."""
        return self._cache.length(request)

    def places(self, request: int) -> tuple[tuple[int, ...], dict[int, int]]:
        """Where the request lies in the cache, as :meth:`DraftCache.places` says it."""
        return self._cache.places(request)

    def keep(self, request: int, length: int) -> None:
        """Exactly ``length`` entries are committed, after fixed rows were absorbed."""
        self._cache.keep(request, length)

    def far(self, n: int) -> bool:
        """See :meth:`ContextMethod.far`."""
        return self._method.far(n)

    def _share(self, n: int, entries: int) -> float:
        pair = self._cache.spec.bytes_per_entry / self._cache.spec.layers
        return 0.0 if self._other_bytes is None else entries * pair / self._other_bytes(n)

    def bytes_read(self, n: int) -> int:
        """Bytes of keys and values that one block after ``n`` entries reads, over all layers, and what the method asks
        of the target beside it."""
        spec = self._cache.spec
        pair, key = spec.bytes_per_entry // spec.layers, spec.kv_heads * spec.key_width * spec.dtype.itemsize
        state = self._method.begin(Opened(n, self._rope, self._scale, self._nothing))
        asked = self._method.target_keys(n)
        total = asked * self._verifier.key_bytes if asked and self._verifier is not None else 0
        for layer in self._layers:
            reads = self._method.reads(layer, state, n, None)
            total += sum(max(0, max(r.last) - min(r.first)) for r in reads) * pair
            total += self._method.more_keys(layer, n) * key
        return total

    @staticmethod
    def _nothing(layer: int, first: int, last: int, rotated: bool) -> torch.Tensor:
        raise AssertionError("the size of a read depends on no key")

    # -------------------------------------------------------------------------------------------------- committed

    def absorb(self, rows: Rows, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Store the next committed entries: for each layer, keys (un-rotated) and values [total, kv heads, width]."""
        if isinstance(rows, FixedRows):
            self._fixed.absorb(rows, keys, values)
            return
        positions = rows.positions(keys[0].device)
        for request, start, packed in rows:
            assert start == self._cache.length(request), "entries are absorbed in order"
            self._cache.reserve(request, start + packed.stop - packed.start)
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            rotated: dict[Rotation, torch.Tensor] = {}  # requests share a rotation as a rule
            for request, start, packed in rows:
                layout, rope = self._cache.layout(request, layer), self._held[request].ropes[layer]
                self._cache.write_values(layer, request, start, v[packed])
                if layout.unrotated:
                    self._cache.write_keys(layer, request, start, k[packed], rotated=False)
                if layout.side_values:
                    self._cache.write_values(layer, request, start, v[packed], side=True)
                if layout.rotated or layout.ring:
                    if rope not in rotated:
                        rotated[rope] = rope.rotate(k, positions)
                    self._cache.write_keys(layer, request, start, rotated[rope][packed], rotated=True)
        for request, start, packed in rows:
            self._cache.extend(request, start + packed.stop - packed.start)
            self._committed(request, start)

    def _committed(self, request: int, before: int) -> None:
        """Tell the method of a round. What comes without a block before it is a prompt, or is prefilled again."""
        held, n = self._held[request], self._cache.length(request)
        if held.drafting:
            held.drafting = False
            self._method.committed(held.state, before, n, partial(self._attended, request, n - 1))

    def _attended(self, request: int, position: int) -> torch.Tensor:
        assert self._verifier is not None, "a method says that it needs the verifier's query"
        return self._verifier.attended(request, position)

    # ------------------------------------------------------------------------------------------------------ a block

    def begin(self, rows: Rows) -> None:
        """Make room for the block rows behind each request's entries, once a round; of fixed rows it is made before."""
        if isinstance(rows, FixedRows):
            return
        for request, start, packed in rows:
            assert start == self._cache.length(request), "a block begins right after the context"
            self._cache.reserve(request, start + packed.stop - packed.start)
            self._held[request].drafting = True

    def attend(self, layer: int, rows: Rows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of one layer's block rows: q [total, heads, d], k and v [total, kv heads, d], all un-rotated; the
        result is [total, heads, d]."""
        if isinstance(rows, FixedRows):
            return self._fixed.attend(layer, rows, q, k, v)
        at_positions: dict[tuple[int, ...], torch.Tensor] = {}  # reads and requests often share a query's positions

        def rotated(rope: Rotation, x: torch.Tensor, at: tuple[int, ...], *, alone: bool = False) -> torch.Tensor:
            if at not in at_positions:
                at_positions[at] = torch.tensor(at, device=x.device)
            return rope.rotate(x, at_positions[at], alone=alone)

        batch = []
        for request, n, packed in rows:
            held = self._held[request]
            rope, own = held.ropes[layer], q[packed]
            reads = self._reads(layer, held.state, n, own)
            # the block's rows go behind the context as scratch, so that a read of both is one stretch of entries
            carrier = next(read for read in reads if read.block)
            keys = rotated(rope, k[packed], carrier.query_at)
            self._cache.write_values(layer, request, n, v[packed])
            if carrier.keys == "rerotated":
                self._select(layer, request, carrier, keys)
            else:
                self._cache.write_keys(layer, request, n, keys, rotated=True)
            batch.append(
                [
                    self._arguments(layer, request, n, r, rotated(rope, own, r.query_at, alone=r.keys == "unrotated"))
                    for r in reads
                ]
            )
        outputs = self._kernels.multi_read_attention(batch)
        for (request, n, packed), output in zip(rows, outputs, strict=True):
            self._method.observe(layer, self._held[request].state, n, q[packed], output)
        return outputs[0].out if len(outputs) == 1 else torch.cat([o.out for o in outputs])

    def _reads(self, layer: int, state: Any, n: int, q: torch.Tensor) -> list[Read]:
        """The method's reads. A mistake in them costs acceptance and never a token, so nothing later would tell."""
        reads, rows = self._method.reads(layer, state, n, q), self._method.block
        assert sum(read.block for read in reads) == 1, "exactly one read carries the block"
        for read in reads:
            entries = n if read.index is None else _length(read.index)
            assert len(read.first) == len(read.last) == len(read.query_at) == rows, "a read has a bound for each row"
            assert min(read.first) >= 0 and max(read.last) <= entries, "a read stays inside the context"
            assert read.keys in ("rotated", "unrotated", "rerotated"), f"keys cannot be {read.keys!r}"
            assert not read.block or read.keys != "unrotated", "the block's own keys are rotated"
            if read.index is not None:
                assert read.index == joined(read.index) and (not read.index or read.index[-1][1] <= n), "an odd index"
            assert (read.keys == "rerotated") <= (read.block and read.index is not None), "a selection has its block"
        return reads

    def _select(self, layer: int, request: int, read: Read, block: torch.Tensor) -> None:
        """Bring the selection's keys up to a read: what it shares with the last one from the start on stays."""
        held, index = self._held[request], read.index or ()
        kept = _shared(held.selected.get(layer, ()), index)
        count = _length(index)
        if kept < count:
            rest = [_dense(self._cache.keys(layer, request, *span, rotated=False)) for span in _cut(index, kept, count)]
            positions = torch.arange(kept, count, device=block.device)
            anew = held.ropes[layer].rotate(torch.cat(rest), positions)
            self._cache.write_selection(layer, request, kept, anew)
        held.selected[layer] = index
        self._cache.write_selection(layer, request, count, block)

    def _arguments(self, layer: int, request: int, n: int, read: Read, q: torch.Tensor) -> ReadArgs:
        """Turn a read into what the operator takes: entries as runs of slots, bounds as columns of that sequence."""
        index = ((0, n),) if read.index is None else read.index
        count = _length(index)
        first, last = list(read.first), [max(f, l) for f, l in zip(read.first, read.last, strict=True)]
        if read.block:
            facts = self._method.layers[layer]
            if read.keys == "rerotated":  # positions of a selection's own: a native window says nothing of them
                facts = replace(facts, window=None)
            for r in range(self._method.block):
                block_first, block_last = facts.block_span(r, self._method.block)
                # entries and block rows are one stretch: on a sliding layer narrower than the block, a row that skips
                # block rows is past all entries too
                assert last[r] == count and (block_first == 0 or first[r] == count), "the read must end at the block"
                first[r], last[r] = first[r] + block_first, count + block_last
        low, high = min(first), max(last)
        spans = _cut(joined([*index, (n, n + self._method.block)]), low, high)
        side = read.keys == "unrotated" and self._cache.layout(request, layer).side_values
        values = _entries([self._cache.values(layer, request, *span, side=side) for span in spans])
        if read.keys == "rerotated":
            keys = self._cache.selection(layer, request, low, high)
        else:
            rotated = read.keys == "rotated"
            keys = _entries([self._cache.keys(layer, request, *span, rotated=rotated) for span in spans])
        scale = 1.0
        if isinstance(read.scale, tuple):
            q = q * torch.tensor(read.scale, dtype=q.dtype, device=q.device)[:, None, None]
        else:
            scale = read.scale
        bounds = tuple(f - low for f in first), tuple(l - low for l in last)
        return ReadArgs(q, keys, values, *bounds, scale=self._scale * scale, exponent=read.exponent)


def _length(spans: Sequence[Span]) -> int:
    return sum(last - first for first, last in spans)


def _cut(spans: Sequence[Span], low: int, high: int) -> list[Span]:
    """The places ``low .. high-1`` of the entries that the spans name, as spans; an empty one if there are none."""
    found, start = [], 0
    for first, last in spans:
        a, b = max(first, first + low - start), min(last, first + high - start)
        if a < b:
            found.append((a, b))
        start += last - first
    return found or [(0, 0)]


def _shared(old: Sequence[Span], new: Sequence[Span]) -> int:
    """How many entries two selections have in common from the start on."""
    count = 0
    for (a, b), (c, d) in zip(old, new, strict=False):
        if a != c:
            break
        count += min(b, d) - a
        if b != d:
            break
    return count


def _entries(parts: Sequence[Entries]) -> Entries:
    """Pieces of one array, one after another."""
    runs: list[tuple[int, int]] = []
    for slot, count in (run for part in parts for run in part.runs):
        if runs and sum(runs[-1]) == slot:
            runs[-1] = runs[-1][0], runs[-1][1] + count
        else:
            runs.append((slot, count))
    return Entries(parts[0].data, tuple(runs))


def _dense(entries: Entries) -> torch.Tensor:
    """[entries, kv heads, width], a view where they lie together."""
    views = [entries.data[slot : slot + count] for slot, count in entries.runs]
    return views[0] if len(views) == 1 else torch.cat(views or [entries.data[:0]])
