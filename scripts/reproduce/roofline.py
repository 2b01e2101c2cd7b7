"""How long a bench takes on a GPU that is not here: an estimate, from the registry's shapes alone.

    prefill   (2 N P + attention) / (MFU x peak)          N weights that a token reads, P tokens of prompt
    step      (2 N + cache read at P) / (SHARE x bandwidth)        bytes in bf16, each read once a step
    request   prefill + outputs x step x (2 + sum over methods of 1 / speedup)

since a bench prefills a request once and decodes it plainly twice, and once with each method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foldspec.checkpoints.shapes import layer_kinds
from foldspec.loading import FoundPair

__all__ = ["ASSUMED", "GPUS", "Gpu", "Roofline"]

SHARE = 0.65  # of the nominal bandwidth that a step of decoding reaches
MFU = 0.5  # of the nominal bf16 rate that a prefill reaches
WARM = 4  # warm-up runs of a method and length at most
KINDS = {"full_attention", "sliding_attention"}  # of layers whose cost grows with what they attend to


@dataclass(frozen=True)
class Gpu:
    """``bandwidth`` bytes/s, ``peak`` dense bf16 FLOP/s, ``memory`` bytes: nominal, of its data sheet."""

    name: str
    bandwidth: float
    peak: float
    memory: float


GPUS = {
    "a100": Gpu("A100-80GB", 2.04e12, 312e12, 80e9),
    "h100": Gpu("H100-80GB SXM", 3.35e12, 989e12, 80e9),
    "h200": Gpu("H200-141GB", 4.8e12, 989e12, 141e9),
}
ASSUMED = (
    f"plain decoding reads weights and cache once a token at {SHARE:.0%} of the nominal bandwidth; "
    f"prefill runs at {MFU:.0%} of the nominal bf16 rate; outputs are as long as their limit; "
    f"plain decoding runs twice a request, each method once, after one prefill for all; {WARM} warm-up runs of each "
    "at every length; loading and the drafter's own prefill count nothing"
)


class Roofline:
    """Of one target on one GPU; everything in seconds."""

    def __init__(self, found: FoundPair, gpu: Gpu) -> None:
        self.gpu = gpu
        first = next(iter(found.model.parameters()))
        self._weights = found.model.bytes_read // first.element_size()  # that a forward reads
        self._cache = found.model.cache_spec(torch.bfloat16)
        values = found.target.config.values
        self._config: dict[str, Any] = values.get("text_config") or values

    def prefill(self, tokens: int) -> float:
        return (2 * self._weights * tokens + self._attention(tokens)) / (MFU * self.gpu.peak)

    def step(self, tokens: int) -> float:
        """Of plain decoding, behind ``tokens`` of context."""
        return (2 * self._weights + self._cache.bytes_read(tokens)) / (SHARE * self.gpu.bandwidth)

    def requests(self, count: int, tokens: int, output: int, speedups: Sequence[float]) -> float:
        """``count`` requests of ``tokens`` and the warm-up of their length; ``speedups`` of the methods."""
        runs = 2 + sum(1 / each for each in speedups)
        decoding = output * self.step(tokens)
        warming = (self.prefill(tokens) + WARM * (runs - 1) * decoding) if count else 0.0
        return count * (self.prefill(tokens) + runs * decoding) + warming

    def _attention(self, tokens: int) -> float:
        """FLOPs of scores and of what they mix, of each layer over what it may see."""
        c, total = self._config, 0.0
        for kind in layer_kinds(c):
            if kind not in KINDS:
                continue
            full = kind == "full_attention"
            heads = c["num_attention_heads"]
            width = (full and c.get("global_head_dim")) or c.get("head_dim") or c["hidden_size"] // heads
            seen = tokens / 2 if full else min(tokens / 2, c["sliding_window"])
            total += 4 * heads * width * tokens * seen
        return total
