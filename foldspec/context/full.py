"""``full``: the drafter as it was trained. Every row reads all that its layer sees, at true distances."""

from __future__ import annotations

from typing import Any

import torch

from foldspec.context.base import ContextMethod, FixedRead, Read


class Full(ContextMethod):
    not_fixed = ""

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        return [self.near(layer, n)]

    def fixed_reads(self, layer: int, n: torch.Tensor, far: bool) -> list[FixedRead]:
        return [self.fixed_near(layer, n)]
