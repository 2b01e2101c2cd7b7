"""``rerope``: true distances within the window, one distance beyond it (ReRoPE, Su 2023).

    distance = p - j  if  p - j < D  else  D                                                  D = W + B
    every query times  max(1, ln(p + 1) / ln L)                         L: ``rerope_len``, p counts from 0
    one softmax over all entries

On a sliding layer, which sees ``p - j < Wn`` by itself, that window is the near read and all older entries are far.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from foldspec.cache.side import Layout
from foldspec.context.base import ContextMethod, FixedRead, Read


class ReRoPE(ContextMethod):
    uses = frozenset({"window", "layer_window", "rerope_len", "coverage", "layout"})
    not_fixed = ""

    def stores(self, layer: int) -> Layout:
        if not self.covers(layer):
            return Layout(rotated=True)
        return self.split(self._reach(layer))

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        scale = tuple(max(1.0, math.log(p + 1) / math.log(self.options.rerope_len)) for p in self.positions(n))
        if not self.covers(layer):
            return [replace(self.near(layer, n), scale=scale)]
        reach = self._reach(layer)
        near = replace(self.near(layer, n, reach), scale=scale)
        last = tuple(max(0, min(n, p - reach + 1)) for p in self.positions(n))
        if not any(last):
            return [near]
        at = (self.window(layer) + self.block,) * self.block
        return [near, Read((0,) * self.block, last, "unrotated", at, scale)]

    def far(self, n: int) -> bool:
        layers = range(len(self.layers))
        return any(self.covers(i) and n and n + self.block > self._reach(i) for i in layers)

    def fixed_reads(self, layer: int, n: torch.Tensor, far: bool) -> list[FixedRead]:
        p = self.fixed_positions(n)
        scale = ((p + 1).double().log() / math.log(self.options.rerope_len)).clamp(min=1.0)
        if not self.covers(layer):
            return [replace(self.fixed_near(layer, n), scale=scale)]
        reach = self._reach(layer)
        near = replace(self.fixed_near(layer, n, reach), scale=scale)
        if not far:
            return [near]
        last = (p - (reach - 1)).clamp(min=0).minimum(n[:, None])
        distance = self.window(layer) + self.block
        at = torch.full_like(p, distance)
        return [near, FixedRead(torch.zeros_like(p), last, "unrotated", at, scale, reach=distance + 1)]

    def _reach(self, layer: int) -> int:
        """The smallest distance that is far."""
        return self.layers[layer].window or self.window(layer) + self.block
