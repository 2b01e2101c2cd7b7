"""``window``: FOLD's near read alone. Row ``r`` reads the entries with ``p - j < D``, ``D = W + B``; a sliding layer
keeps a window of its own that is narrower.
"""

from __future__ import annotations

from typing import Any

import torch

from foldspec.context.base import ContextMethod, Read


class Window(ContextMethod):
    uses = frozenset({"window", "layer_window"})

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        return [self.near(layer, n, max(self.window(layer) + self.block, self.layers[layer].window or 0))]
