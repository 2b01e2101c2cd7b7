"""``full``: the drafter as it was trained. Every row reads all that its layer sees, at true distances."""

from __future__ import annotations

from foldspec.context.base import ContextMethod, Read


class Full(ContextMethod):
    def reads(self, layer: int, n: int) -> list[Read]:
        return [self.near(layer, n)]
