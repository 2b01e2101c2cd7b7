"""What the target attended to: one row of its last forward, recomputed from the cached keys of one layer.

Fast attention keeps no probabilities. Those of a single row cost one pass over the keys of one layer.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from foldspec.cache.paged import PagedCache

__all__ = ["Verifier"]


class Verifier:
    """Reads a target's ``cache``, which keeps the last queries of its last full-attention layer from now on.
    ``request``: the one that was verified, whoever asks; all its queries are kept. Raises :class:`UsageError` for a
    target that has no such layer."""

    def __init__(self, cache: PagedCache, request: int | None = None) -> None:
        self._cache, self._request = cache, request
        cache.watch(request)

    @property
    def key_bytes(self) -> int:
        """Bytes of one entry's key in that layer."""
        return self._cache.watched_key_bytes

    def attended(self, request: int, position: int) -> torch.Tensor:
        """[position + 1] the softmax of the row at ``position`` over the entries up to its own: mean over query heads,
        in fp32 or better."""
        request = request if self._request is None else self._request
        layer, q, scale = self._cache.asked(request, position)
        keys, _ = self._cache.entries(layer, request)
        kv_heads = keys.data.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        q = q.view(kv_heads, -1, q.shape[-1]).to(wide)  # [kv heads, group, d]
        scores = []
        for end, (slot, count) in zip(accumulate(count for _, count in keys.runs), keys.runs, strict=True):
            count -= max(0, end - position - 1)  # entries after the row, if the cache still holds them
            if count > 0:
                scores.append(torch.einsum("hgd,nhd->hgn", q, keys.data[slot : slot + count].to(wide)))
        return (scale * torch.cat(scores, dim=-1)).softmax(-1).mean((0, 1))
