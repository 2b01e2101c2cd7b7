"""``cmr``: chunks of the context that the target attends to (cross-model retrieval; SpecExtend, Cha et al. 2026).

Entries lie in consecutive chunks of ``cmr_chunk``, the last perhaps short. All layers read one selection of chunks,
whose entries are renumbered ``0 .. m-1`` in their order; the block follows at ``m .. m+B-1``. One softmax, no window.

The first draft reads the last ``cmr_topk`` chunks. After rounds 0, P, 2P, ... (``cmr_period``) the selection is made of
the ``cmr_topk`` chunks to which the target's row of the last accepted token attended most: the mean over a chunk's
entries of its probabilities in the last full-attention layer, mean over heads; ties go to the lower index. Then, after
every round, the chunks that it began join; a chunk that is selected grows with its entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from foldspec.cache.side import Layout
from foldspec.context.base import Attended, ContextMethod, Opened, Read, joined


@dataclass
class _Selection:
    """``chunks`` in rising order, None before the first round was committed; ``rounds`` that were."""

    chunks: list[int] | None = None
    rounds: int = 0


class CMR(ContextMethod):
    uses = frozenset({"cmr_chunk", "cmr_topk", "cmr_period", "coverage"})
    not_fixed = "its chunks are chosen anew between rounds"

    def begin(self, request: Opened) -> _Selection:
        return _Selection()

    def needs(self) -> frozenset[str]:
        return frozenset({"verifier_query"})

    def stores(self, layer: int) -> Layout:
        if not self.covers(layer):
            return Layout(rotated=True)
        size = self.options.cmr_chunk
        begun = -(-self.options.cmr_period * self.block // size) + 1  # chunks that join from one refresh to the next
        return Layout(unrotated=True, selection=(self.options.cmr_topk + begun) * size + self.block)

    def reads(self, layer: int, state: _Selection, n: int, q: torch.Tensor | None) -> list[Read]:
        if not self.covers(layer):
            return [self.near(layer, n)]
        size = self.options.cmr_chunk
        chunks = self._last(n) if state.chunks is None else state.chunks
        index = joined((c * size, min(n, (c + 1) * size)) for c in chunks)
        count = sum(last - first for first, last in index)
        at = tuple(range(count, count + self.block))
        return [Read((0,) * self.block, (count,) * self.block, "rerotated", at, block=True, index=index)]

    def committed(self, state: _Selection, before: int, n: int, attended: Attended) -> None:
        size = self.options.cmr_chunk
        chunks = self._last(before) if state.chunks is None else state.chunks
        if state.rounds % self.options.cmr_period == 0:
            chunks = self._best(attended())
        state.chunks = sorted({*chunks, *range(-(-before // size), -(-n // size))})
        state.rounds += 1

    def target_keys(self, n: int) -> int:
        return n // self.options.cmr_period

    def _last(self, n: int) -> list[int]:
        """The last chunks of ``n`` entries."""
        return list(range(-(-n // self.options.cmr_chunk)))[-self.options.cmr_topk :]

    def _best(self, attention: torch.Tensor) -> list[int]:
        """The chunks with the largest mean of ``attention`` [entries]."""
        size = self.options.cmr_chunk
        short = -len(attention) % size
        sums = F.pad(attention, (0, short)).view(-1, size).sum(1)
        sums[-1] *= size / (size - short)  # a short chunk's mean is over its own entries
        order: list[int] = sums.sort(descending=True, stable=True).indices[: self.options.cmr_topk].tolist()
        return order
