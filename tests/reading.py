"""A context method at work over a cache of its own, for tests that look at its attention: through the pieces that a
drafter uses, with caches that hold NaN wherever nothing was written, and pages of 16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import brute
import tiny
import torch

from foldspec.cache.paged import CacheSpec
from foldspec.cache.rows import Rows
from foldspec.context import make_method
from foldspec.context.base import DrafterLayer
from foldspec.context.reader import ContextReader, Rotation
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import Output, ReadArgs
from foldspec.models.rope import Rope
from foldspec.options import MethodOptions

FULL_LAYER = (DrafterLayer(),)


class WatchedKernels(Kernels):
    """Remembers the last call."""

    def multi_read_attention(self, batch: Sequence[Sequence[ReadArgs]]) -> list[Output]:
        self.batch, self.outputs = batch, super().multi_read_attention(batch)
        return self.outputs


class Reading:
    """A context method over a cache of its own, fed with un-rotated q, k and v."""

    def __init__(
        self,
        kernel: str,
        *,
        block: int,
        heads: int,
        width: int,
        rope: Rotation | None = None,
        layers: Sequence[DrafterLayer] = FULL_LAYER,
        dtype: torch.dtype = torch.float64,
        requests: int = 3,
        longest: int = 768,
        page: int = 16,
        **options: Any,
    ) -> None:
        self.method = make_method(MethodOptions(**options), layers, block)
        spec = CacheSpec(len(layers), heads, width, width, dtype)
        self.cache = tiny.PoisonedDraftCache(spec, pages=48, page_size=page, max_requests=requests, device="cpu")
        self.kernels = WatchedKernels(kernel, tiny.library())
        self.rope = rope or Rope(torch.from_numpy(brute.frequencies(width)).to(dtype), theta=10000.0)
        self.reader = ContextReader(self.method, self.cache, self.rope, self.kernels, width**-0.5)
        for request in range(requests):
            self.reader.open(request, longest)

    def absorb(self, k: torch.Tensor, v: torch.Tensor, request: int = 0) -> None:
        """The next entries; every layer gets the same ones."""
        rows = Rows.of([request], [self.reader.length(request)], [len(k)])
        layers = len(self.method.layers)
        self.reader.absorb(rows, [k] * layers, [v] * layers)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int = 0, request: int = 0
    ) -> torch.Tensor:
        rows = Rows.of([request], [self.reader.length(request)], [self.method.block])
        self.reader.begin(rows)
        return self.reader.attend(layer, rows, q, k, v)

    def whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **where: int) -> torch.Tensor:
        """Context and block at once: k and v [n + B, ...]. The context comes in three pieces, as from a prefill."""
        n = len(k) - self.method.block
        for a, b in ((0, n // 2), (n // 2, n - n // 5), (n - n // 5, n)):
            if a < b:
                self.absorb(k[a:b], v[a:b])
        return self.attend(q, k[n:], v[n:], **where)


def draw(n: int, block: int, heads: int = 2, kv: int = 1, width: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """q, k and v, un-rotated, in float64."""
    source = torch.Generator().manual_seed(seed)
    shapes = (block, heads, width), (n + block, kv, width), (n + block, kv, width)
    return [torch.randn(*shape, generator=source, dtype=torch.float64) for shape in shapes]
