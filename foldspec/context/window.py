"""``window``: FOLD's near read alone. Row ``r`` reads the entries with ``p - j < D``, ``D = W + B``; a sliding layer
keeps a window of its own that is narrower.
"""

from __future__ import annotations

from foldspec.context.base import ContextMethod, Read


class Window(ContextMethod):
    uses = frozenset({"window"})

    def reads(self, layer: int, n: int) -> list[Read]:
        assert self.options.window is not None
        return [self.near(layer, n, max(self.options.window + self.block, self.layers[layer].window or 0))]
