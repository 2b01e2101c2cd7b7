"""``fold``: the recent window at exact positions, everything older as a position-free far memory (FOLD, section 3.3).

    near_r = { j : p - j <  D },   true distances                         D = W + B
    far_r  = { j : p - j >= D },   all at the one distance D + r          (the shared virtual position n - D)

    o_far = softmax(alpha s) . v,   Z_far = (sum_far exp(alpha s)) ** (1 / alpha)
    out   = (1 - w) o_near + w o_far,   w = Z_far / (Z_near + Z_far)

On a sliding layer, which sees ``p - j < Wn`` by itself, the near read is that window; the other two numbers follow:

                        near reach    far begins at    far distance
    full layer          D             D                D + r
    sliding layer       Wn            max(D, Wn)       max(D, Wn) + r
      ... complement    Wn            Wn               max(D, Wn) + r
"""

from __future__ import annotations

from typing import Any

import torch

from foldspec.cache.side import Layout
from foldspec.context.base import ContextMethod, FixedRead, Read

SHARPEST = 1e30  # float32 holds the logits times this; a read is its best entry alone long before


class Fold(ContextMethod):
    uses = frozenset({"window", "layer_window", "alpha", "layer_alpha", "coverage", "far_boundary", "layout"})
    not_fixed = ""

    def stores(self, layer: int) -> Layout:
        if not self.covers(layer):
            return Layout(rotated=True)
        return self.split(self._distance(layer))

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        if not self.covers(layer):
            return [self.near(layer, n)]
        near = self.near(layer, n, self._distance(layer))
        boundary = self._boundary(layer)
        last = tuple(max(0, min(n, p - boundary + 1)) for p in self.positions(n))
        alpha = self.sharpness(layer, state)
        if not any(last) or alpha is None:  # the context fits the window, or is not to be read: the near read is all
            return [near]
        alpha = min(alpha, SHARPEST)
        at = tuple(self._distance(layer) + r for r in range(self.block))
        return [near, Read((0,) * self.block, last, "unrotated", at, scale=alpha, exponent=1 / alpha)]

    def far(self, n: int) -> bool:
        layers = range(len(self.layers))
        return any(self.covers(i) and n and n + self.block > self._boundary(i) for i in layers)

    def fixed_reads(self, layer: int, n: torch.Tensor, far: bool) -> list[FixedRead]:
        if not self.covers(layer):
            return [self.fixed_near(layer, n)]
        near, alpha = self.fixed_near(layer, n, self._distance(layer)), self.sharpness(layer, None)
        if not far or alpha is None:
            return [near]
        alpha, distance = min(alpha, SHARPEST), self._distance(layer)
        last = (near.query_at - (self._boundary(layer) - 1)).clamp(min=0).minimum(n[:, None])
        at = self.fixed_positions(torch.full_like(n, distance))
        first, end = torch.zeros_like(last), distance + self.block
        return [near, FixedRead(first, last, "unrotated", at, scale=alpha, exponent=1 / alpha, reach=end)]

    def sharpness(self, layer: int, state: Any) -> float | None:
        """Alpha of this layer's far read, the same from one commit to the next; None: there is none."""
        alpha = self.options.layer_alpha[layer] if self.options.layer_alpha else self.options.alpha
        assert alpha is not None
        return alpha

    def _distance(self, layer: int) -> int:
        return max(self.window(layer) + self.block, self.layers[layer].window or 0)

    def _boundary(self, layer: int) -> int:
        """The smallest distance that is far."""
        own = self.layers[layer].window
        return own if own is not None and self.options.far_boundary == "complement" else self._distance(layer)
