"""``infllm``: the window, and those blocks of the older context that match the queries (InfLLM, Xiao et al. 2024).

    near:  p - j < D, at true distances                                                       D = W + B
    far:   the first ``infllm_init`` entries, the ``infllm_topk`` blocks of ``infllm_block`` entries that match best,
           and what is in no block yet; whatever of it is outside a row's window, at the one distance D - 1

One softmax over both. Blocks follow the first entries, and are formed once they are far for every row. A block stands
for itself, in each query head, by the mean un-rotated key of the ``infllm_repr`` entries that received most attention
while they were in a window (the probability, summed over rows and rounds; ties go to the lower index), or of all its
entries where none was in one. The match: the mean query, rotated to D - 1, times that key, summed over heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from foldspec.cache.side import Layout
from foldspec.context.base import Attended, ContextMethod, Opened, Read, below, joined
from foldspec.kernels.multi_read_attention import Output


@dataclass
class _Layer:
    """``means`` [places, heads, d] stand for the first ``blocks`` blocks; ``received`` [heads, ...] is the attention
    that the entries from ``since`` on, the first that was ever in a window, received; ``pending``, from an entry on,
    what the round that runs adds to it."""

    means: torch.Tensor
    blocks: int = 0
    since: int | None = None
    received: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    pending: tuple[int, torch.Tensor] | None = None


@dataclass
class _Memory:
    request: Opened
    layers: dict[int, _Layer] = field(default_factory=dict)


class InfLLM(ContextMethod):
    uses = frozenset(
        {"window", "layer_window", "coverage", "layout", "infllm_block", "infllm_init", "infllm_topk", "infllm_repr"}
    )
    not_fixed = "it selects blocks by the queries, and counts what they received"
    coverage = "full"  # a sliding layer never reads further than it was trained to

    def begin(self, request: Opened) -> _Memory:
        return _Memory(request)

    def stores(self, layer: int) -> Layout:
        if not self.covers(layer):
            return Layout(rotated=True)
        return self.split(self._reach(layer))

    def reads(self, layer: int, state: _Memory, n: int, q: torch.Tensor | None) -> list[Read]:
        if not self.covers(layer):
            return [self.near(layer, n)]
        reach, blocks = self._reach(layer), self._blocks(layer, n)
        near = self.near(layer, n, reach)
        chosen = list(range(blocks))[-self.options.infllm_topk :]
        if q is not None and len(chosen) < blocks:
            chosen = self._choose(self._grown(layer, state, blocks, q), state.request, reach, q)
        ends = [max(0, min(n, p - reach + 1)) for p in self.positions(n)]
        spans = [(0, self.options.infllm_init), *((self._first(b), self._first(b + 1)) for b in chosen)]
        index = joined((a, min(b, ends[-1])) for a, b in [*spans, (self._first(blocks), n)])
        last = tuple(below(index, end) for end in ends)
        if not any(last):
            return [near]
        rows = self.block
        return [near, Read((0,) * rows, last, "unrotated", (reach - 1,) * rows, index=index)]

    def observe(self, layer: int, state: _Memory, n: int, q: torch.Tensor, output: Output) -> None:
        """What each entry received from the rows that have it in their window."""
        if not self.covers(layer) or not self.options.infllm_repr:
            return
        request, reach, wide = state.request, self._reach(layer), torch.promote_types(q.dtype, torch.float32)
        entries = torch.arange(max(0, n - reach + 1), n, device=q.device)
        at = torch.arange(n, n + self.block, device=q.device)
        keys = request.keys(layer, n - len(entries), n, True).to(wide)
        rotated = request.scale * request.rope.rotate(q, at).to(wide)
        rotated = rotated.view(self.block, keys.shape[1], -1, q.shape[-1])  # [B, kv heads, group, d]
        scores = torch.einsum("rhgd,nhd->hgrn", rotated, keys).flatten(0, 1)
        mass = output.lse.logsumexp(0).T[..., None]  # of both reads: [heads, B, 1]
        shares = (scores - mass).exp().masked_fill(at[:, None] - entries >= reach, 0.0)
        self._layer(layer, state, q).pending = n - len(entries), shares.sum(1)

    def committed(self, state: _Memory, before: int, n: int, attended: Attended) -> None:
        for memory in state.layers.values():
            if memory.pending is not None:
                low, shares = memory.pending
                if memory.since is None:
                    memory.since = low
                    memory.received = shares.new_zeros(len(shares), _longest(state.request) - low)
                low -= memory.since
                memory.received[:, low : low + shares.shape[1]] += shares
                memory.pending = None

    def state_bytes(self, layer: int, longest: int, heads: int, width: int) -> int:
        if not self.covers(layer):
            return 0
        received = longest if self.options.infllm_repr else 0
        return 4 * heads * (self._blocks(layer, longest) * width + received)

    def more_keys(self, layer: int, n: int) -> int:
        return min(n, self._reach(layer) - 1) if self.covers(layer) and self.options.infllm_repr else 0

    def _reach(self, layer: int) -> int:
        return self.window(layer) + self.block

    def _blocks(self, layer: int, n: int) -> int:
        """Blocks whose entries are all far for every row."""
        return max(0, (n - self._reach(layer) + 1 - self.options.infllm_init) // self.options.infllm_block)

    def _first(self, block: int) -> int:
        """The first entry of a block."""
        return self.options.infllm_init + block * self.options.infllm_block

    def _choose(self, memory: _Layer, request: Opened, reach: int, q: torch.Tensor) -> list[int]:
        """The blocks that match best, in rising order."""
        at = torch.tensor([reach - 1], device=q.device)
        mean = request.rope.rotate(q.mean(0, keepdim=True), at, alone=True)[0]
        scores = torch.einsum("hd,bhd->b", mean.to(memory.means.dtype), memory.means[: memory.blocks])
        order: list[int] = scores.sort(descending=True, stable=True).indices[: self.options.infllm_topk].tolist()
        return sorted(order)

    def _layer(self, layer: int, state: _Memory, q: torch.Tensor) -> _Layer:
        if layer not in state.layers:
            places = self._blocks(layer, _longest(state.request))
            wide = torch.promote_types(q.dtype, torch.float32)
            state.layers[layer] = _Layer(q.new_empty(places, *q.shape[1:], dtype=wide))
        return state.layers[layer]

    def _grown(self, layer: int, state: _Memory, blocks: int, q: torch.Tensor) -> _Layer:
        """A layer's memory with means of the first ``blocks`` blocks; what those received is final."""
        memory, size, heads = self._layer(layer, state, q), self.options.infllm_block, q.shape[1]
        unseen = blocks  # blocks before the first entry that was ever in a window
        if memory.since is not None:
            unseen = min(blocks, max(0, memory.since - self.options.infllm_init) // size)
        while memory.blocks < blocks:
            begin, end = memory.blocks, max(unseen, memory.blocks + 1)
            keys = state.request.keys(layer, self._first(begin), self._first(end), False)
            keys = keys.view(end - begin, size, *keys.shape[1:]).to(memory.means.dtype)
            if end > unseen:
                keys = self._most_seen(memory, self._first(begin), keys[0].repeat_interleave(heads // keys.shape[2], 1))
            means = keys.mean(1)
            memory.means[begin:end] = means.repeat_interleave(heads // means.shape[1], 1)
            memory.blocks = end
        return memory

    def _most_seen(self, memory: _Layer, first: int, keys: torch.Tensor) -> torch.Tensor:
        """Of a block's keys [entries, heads, d], those of the entries that received most: [1, most, heads, d]."""
        assert memory.since is not None
        shares = memory.received.new_zeros(keys.shape[1], len(keys))
        low = max(first, memory.since)
        shares[:, low - first :] = memory.received[:, low - memory.since : first + len(keys) - memory.since]
        best = shares.sort(dim=1, descending=True, stable=True).indices[:, : self.options.infllm_repr]
        return keys.gather(0, best.T[..., None].expand(-1, -1, keys.shape[2]))[None]


def _longest(request: Opened) -> int:
    assert request.longest is not None, "the memory has a place for all that a request may come to"
    return request.longest
