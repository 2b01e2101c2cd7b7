"""Layers that read a window keep a ring: whatever is taken back, forked or preempted, the window is there. Against
dense attention by loops in float64, and plain decoding. (Against lists of rows: test_caches.py.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch

from foldspec.cache.paged import CacheSpec, PagedCache, TargetSpec
from foldspec.cache.rows import Rows
from foldspec.kernels.rotate_append import Slots
from foldspec.models.layers import causal_attention

WINDOW, LONGEST = 4, 6

WINDOW, LONGEST = 4, 6

# ------------------------------------------------------------------------------------------- against dense attention

FULL = CacheSpec(1, 1, 12, 12, torch.float32)
SLIDING = CacheSpec(1, 2, 8, 8, torch.float32, window=WINDOW)
HEADS = 4


class Layers:
    """A full and a sliding layer of two geometries, and what a row should read of them, by loops in float64."""

    def __init__(self, kernels: str, longest_pass: int) -> None:
        self.kernels = tiny.kernels_of(kernels)
        self.cache = PagedCache(
            TargetSpec((SLIDING, FULL), (0, 1)),
            pages=16,
            page_size=4,
            device="cpu",
            requests=2,
            longest_pass=longest_pass,
        )
        tiny.poison(self.cache)
        self.cache.open(7)
        self.cache.open(8)
        self.kept: dict[int, list[list[torch.Tensor]]] = {7: [[], []], 8: [[], []]}
        self.draw = torch.Generator().manual_seed(0)

    def forward(self, *counts: int) -> None:
        """Rows of both requests; their outputs are checked."""
        rows = Rows.of((7, 8), [len(self.kept[r][0]) for r in (7, 8)], counts)
        self.cache.begin(rows)
        for layer, (spec, window) in enumerate(((SLIDING, WINDOW), (FULL, None))):
            drawn = torch.randn(rows.total, HEADS + 2 * spec.kv_heads, spec.key_width, generator=self.draw)
            q, k, v = drawn.split_with_sizes((HEADS, spec.kv_heads, spec.kv_heads), 1)
            into: Slots = self.cache.slots(layer)
            into.keys[list(into.slots)], into.values[list(into.slots)] = k, v
            found = causal_attention(q, self.cache, layer, rows, self.kernels, 0.7, window)
            for request, start, packed in rows:
                self.kept[request][layer] += list(torch.stack([k, v], 1)[packed])
                for r in range(packed.stop - packed.start):
                    wanted = self.dense(q[packed][r], self.kept[request][layer][: start + r + 1], window)
                    np.testing.assert_allclose(found[packed][r].double().numpy(), wanted, atol=2e-6)

    @staticmethod
    def dense(q: torch.Tensor, kept: list[torch.Tensor], window: int | None) -> np.ndarray[Any, Any]:
        out = []
        for head, query in enumerate(q.double().numpy()):
            seen = [entry.double().numpy() for entry in (kept if window is None else kept[-window:])]
            own = head * seen[0].shape[1] // HEADS
            mass = np.exp([0.7 * float(query @ k[own]) for k, _ in seen])
            out.append(sum(m * v[own] for m, (_, v) in zip(mass, seen, strict=True)) / mass.sum())
        return np.stack(out)

    def truncate(self, request: int, more: int) -> None:
        """Keep ``more`` of the last forward's rows, and none of them at all where the next ones come."""
        length = len(self.kept[request][0]) - more
        self.kept[request] = [kept[:length] for kept in self.kept[request]]
        self.cache.truncate(request, length)


@pytest.mark.parametrize(
    ("length", "kernels"),
    [*((n, "auto") for n in (0, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)), (WINDOW, "reference")],
)
def test_attention_after_every_rejection(length: int, kernels: str) -> None:
    """Blocks of any size taken back to any length, twice, beside another request; rings as small as may be."""
    for rows in (1, WINDOW, LONGEST):
        for dropped in range(rows + 1):
            layers = Layers(kernels, LONGEST)
            for begin in range(0, length, LONGEST):
                layers.forward(min(LONGEST, length - begin), 1 + begin % 3)
            for other in (1, 4):
                layers.forward(rows, other)
                layers.truncate(7, dropped)
                layers.truncate(8, other - 1)
            layers.forward(LONGEST, 1)
