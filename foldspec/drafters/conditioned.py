"""Networks that draft from the target's features: what every one of them has, whatever its block does.

Keys and values of committed tokens come from tapped layers of the target and are stored once, un-rotated as they are; a
context method decides what of that a block reads, and where its rows are rotated to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from foldspec.cache.paged import CacheSpec
from foldspec.cache.side import DraftCache
from foldspec.context import make_method
from foldspec.context.base import DrafterLayer
from foldspec.context.reader import ContextReader
from foldspec.context.verifier import Verifier
from foldspec.drafters.base import Drafter, DrafterNetwork, Footprint, Host, Room
from foldspec.models.base import LanguageModel
from foldspec.models.rope import Rope
from foldspec.options import MethodOptions
from foldspec.sampling import ARGMAX, DraftSampling

__all__ = ["ConditionedNetwork"]


class ConditionedNetwork(DrafterNetwork):
    """``layer_facts``  what a context method may know of each layer
    ``rope``    the layers' rotary embedding; ``scale`` multiplies their logits
    ``heads``   query heads of a layer
    """

    block: int
    layer_facts: tuple[DrafterLayer, ...]
    rope: Rope
    scale: float
    heads: int

    @abstractmethod
    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """The geometry of its context."""

    @abstractmethod
    def features(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Context features [n, width], of which every layer makes its keys and values, of tapped rows [n, width] each:
        the paper's c."""

    @abstractmethod
    def weight_bytes(self, target: LanguageModel) -> int:
        """Bytes of weights that drafting one block reads, those of the target included that it drafts with."""

    @abstractmethod
    def drafter(self, target: LanguageModel, reader: ContextReader, sampling: DraftSampling = ARGMAX) -> Drafter:
        """The drafter that reads its context through ``reader``."""

    def described(self) -> dict[str, Any]:
        return {"block": self.block, "taps": list(self.facts.taps)}

    def rows(self, method: MethodOptions) -> int:
        return self.block

    def footprint(self, method: MethodOptions, dtype: torch.dtype, room: Room) -> Footprint:
        spec, context = self.cache_spec(dtype), make_method(method, self.layer_facts, self.block)
        layouts = [context.stores(i) for i in range(len(self.layer_facts))]
        key = spec.layers * spec.kv_heads * spec.key_width * dtype.itemsize
        copies = any(x.rotated for x in layouts) + any(x.unrotated for x in layouts)
        buffers = {layout.within(room.longest).buffer for layout in layouts}
        longest = room.longest - self.block
        state = sum(context.state_bytes(i, longest, self.heads, spec.key_width) for i in range(len(layouts)))
        return Footprint(
            spec.bytes_per_entry + (copies - 1) * key, key * room.requests * sum(buffers), state * room.requests
        )

    def caches(self, dtype: torch.dtype, room: Room, pages: int, device: torch.device) -> DraftCache:
        return DraftCache(
            self.cache_spec(dtype),
            pages=pages,
            page_size=room.page_size,
            max_requests=room.requests,
            longest=room.longest,
            device=device,
        )

    def bind(self, host: Host, caches: DraftCache, method: MethodOptions, sampling: DraftSampling) -> Drafter:
        context = make_method(method, self.layer_facts, self.block)
        verifier = Verifier(host.cache, host.verified) if "verifier_query" in context.needs() else None
        weights, cache = host.model.bytes_read + self.weight_bytes(host.model), host.cache.spec
        reader = ContextReader(
            context,
            caches,
            self.rope,
            host.kernels,
            self.scale,
            verifier,
            other_bytes=lambda n: weights + cache.bytes_read(n),
        )
        return self.drafter(host.model, reader, sampling)
