"""``shared_window``: all rows of the block read the same last ``draft_window`` entries, at true distances; a sliding
layer sees no more of them than by itself. (What serving engines offer as a draft window.)
"""

from __future__ import annotations

from typing import Any

import torch

from foldspec.context.base import ContextMethod, FixedRead, Read


class SharedWindow(ContextMethod):
    uses = frozenset({"draft_window"})
    not_fixed = ""

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        return [self.near(layer, n, since=max(0, n - self.options.draft_window))]

    def fixed_reads(self, layer: int, n: torch.Tensor, far: bool) -> list[FixedRead]:
        return [self.fixed_near(layer, n, since=(n - self.options.draft_window).clamp(min=0))]
