"""``full``: the drafter as it was trained. Every row reads all that its layer sees, at true distances."""

from __future__ import annotations

from typing import Any

import torch

from foldspec.context.base import ContextMethod, Read


class Full(ContextMethod):
    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        return [self.near(layer, n)]
