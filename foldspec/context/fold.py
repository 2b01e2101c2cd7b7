"""``fold``: the recent window at exact positions, everything older as a position-free far memory (FOLD, section 3.3).

    near_r = { j : p - j <  D },   true distances                         D = W + B
    far_r  = { j : p - j >= D },   all at the one distance D + r          (the shared virtual position n - D)

    out = (1 - w) o_near + w o_far,   w = Z_far / (Z_near + Z_far),   Z_far = (sum_far exp(alpha s)) ** (1 / alpha)

On a sliding layer the near read is the layer's own window ``Wn``, and the far set begins at ``max(D, Wn)`` or, with
``far_boundary=complement``, right where the window ends; its distance is ``max(D, Wn) + r`` either way.
"""

from __future__ import annotations

from foldspec.cache.side import Layout
from foldspec.context.base import ContextMethod, Read


class Fold(ContextMethod):
    def stores(self, layer: int) -> Layout:
        if not self._folds(layer):
            return Layout(rotated=True)
        # Un-rotated keys of everything, and rotated ones for the near read: its last entries and the block's own rows.
        return Layout(unrotated=True, ring=self._reach(layer) + self.block)

    def reads(self, layer: int, n: int) -> list[Read]:
        if not self._folds(layer):
            return [self.near(layer, n)]
        near = self.near(layer, n, None if self.layers[layer].window else self._distance(layer))
        boundary = self._boundary(layer)
        last = tuple(max(0, min(n, p - boundary + 1)) for p in self.positions(n))
        if not any(last):  # the context fits the window: the near read is all there is
            return [near]
        alpha = float(self.options.alpha or 1.0)
        at = tuple(self._distance(layer) + r for r in range(self.block))
        return [near, Read((0,) * self.block, last, "unrotated", at, scale=alpha, exponent=1 / alpha)]

    def _folds(self, layer: int) -> bool:
        return self.options.coverage == "all" or self.layers[layer].window is None

    def _distance(self, layer: int) -> int:
        """D, or the width of a sliding layer's own window if that reaches further."""
        assert self.options.window is not None
        return max(self.options.window + self.block, self.layers[layer].window or 0)

    def _boundary(self, layer: int) -> int:
        """The smallest distance that is far."""
        own = self.layers[layer].window
        return own if own is not None and self.options.far_boundary == "complement" else self._distance(layer)

    def _reach(self, layer: int) -> int:
        """The width of the near read."""
        return self.layers[layer].window or self._distance(layer)
