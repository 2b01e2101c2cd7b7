"""``window``: FOLD's near read alone. Row ``r`` reads the entries with ``p - j < D``, ``D = W + B``."""

from __future__ import annotations

from foldspec.context.base import ContextMethod, Read


class Window(ContextMethod):
    def reads(self, layer: int, n: int) -> list[Read]:
        # a sliding layer has a window of its own and keeps it
        own = self.layers[layer].window is not None
        assert self.options.window is not None
        return [self.near(layer, n, None if own else self.options.window + self.block)]
