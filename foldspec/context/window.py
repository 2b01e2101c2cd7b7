"""``window``: FOLD's near read alone. Row ``r`` reads the entries with ``p - j < D``, ``D = W + B``; a sliding layer
keeps a window of its own that is narrower.
"""

from __future__ import annotations

from typing import Any

import torch

from foldspec.context.base import ContextMethod, FixedRead, Read


class Window(ContextMethod):
    uses = frozenset({"window", "layer_window"})
    not_fixed = ""

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        return [self.near(layer, n, self._reach(layer))]

    def fixed_reads(self, layer: int, n: torch.Tensor, far: bool) -> list[FixedRead]:
        return [self.fixed_near(layer, n, self._reach(layer))]

    def _reach(self, layer: int) -> int:
        return max(self.window(layer) + self.block, self.layers[layer].window or 0)
