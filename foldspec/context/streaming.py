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

from foldspec.context.base import ContextMethod, FixedRead, Read


class Streaming(ContextMethod):
    uses = frozenset({"sinks", "recents", "coverage"})
    not_fixed = ""
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

    def far(self, n: int) -> bool:
        return n > self.options.sinks + self.options.recents

    def fixed_reads(self, layer: int, n: torch.Tensor, far: bool) -> list[FixedRead]:
        sinks, recents = self.options.sinks, self.options.recents
        if not far or not self.covers(layer):
            return [self.fixed_near(layer, n)]
        left_out = (n - (sinks + recents)).clamp(min=0)
        near = self.fixed_near(layer, n, since=torch.where(left_out > 0, n - recents, 0))
        if not sinks:
            return [near]
        last = torch.where(left_out > 0, sinks, 0)[:, None].expand(-1, self.block)
        return [near, FixedRead(torch.zeros_like(last), last, "rotated", near.query_at - left_out[:, None])]
