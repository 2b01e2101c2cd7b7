"""``streaming``: the first ``S`` entries, the attention sinks, and the last ``R`` (StreamingLLM, Xiao et al. 2024).

The kept entries are renumbered ``0 .. S+R-1``, and the block follows them. Only differences of positions count, so that
the recent entries and the block may as well stay where they are, and the sinks, rather than move forward by what was
left out, are met by queries that are moved back by it:

    distance to recent entry j:  p - j        distance to sink j:  p - (n - S - R) - j

One softmax over both. While ``n <= S + R`` nothing is left out and nothing moves.
"""

from __future__ import annotations

from typing import Any

import torch

from foldspec.context.base import ContextMethod, Read


class Streaming(ContextMethod):
    uses = frozenset({"sinks", "recents", "coverage"})
    coverage = "full"  # a sliding layer never reads further than it was trained to

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        sinks, recents = self.options.sinks, self.options.recents
        left_out = n - sinks - recents
        if left_out <= 0 or not self.covers(layer):
            return [self.near(layer, n)]
        near = self.near(layer, n, since=n - recents)
        if not sinks:
            return [near]
        rows = self.block
        return [near, Read((0,) * rows, (sinks,) * rows, "rotated", tuple(p - left_out for p in self.positions(n)))]
