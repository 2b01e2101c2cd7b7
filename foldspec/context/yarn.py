"""``yarn``: all entries, at true positions, under a rotary table that is stretched to the request (Peng et al. 2023).

    factor = max(1, ceil((P + G + B) / 256) * 256 / R)        P + G: what the request may come to; R: ``yarn_ref``

The factor is fixed when the request begins, so that keys are rotated once; what is stored is no other factor's. At
factor 1 this is the drafter as it was trained. A rope type of the drafter's own is replaced, its base is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch

from foldspec.context.base import ContextMethod, DrafterLayer, Opened, Read, Rotation
from foldspec.options import MethodOptions


class YaRN(ContextMethod):
    uses = frozenset({"yarn_ref", "coverage"})
    not_fixed = "each request rotates keys by a table of its own"
    coverage = "full"  # a sliding layer never reads further than it was trained to

    def __init__(self, options: MethodOptions, layers: Sequence[DrafterLayer], block: int) -> None:
        super().__init__(options, layers, block)
        self._tables: WeakValueDictionary[float, Rotation] = WeakValueDictionary()

    def begin(self, request: Opened) -> Rotation:
        """The table; requests of one factor share it while one of them lives."""
        reference = self.options.yarn_ref
        assert request.longest is not None and reference is not None, "the factor depends on what a request may come to"
        factor = max(1.0, -(-(request.longest + self.block) // 256) * 256 / reference)
        table = self._tables.get(factor)
        if table is None:
            table = request.rope if factor == 1 else request.rope.stretched(factor, reference)
            self._tables[factor] = table
        return table

    def rope(self, layer: int, state: Rotation, own: Rotation) -> Rotation:
        return state if self.covers(layer) else own

    def reads(self, layer: int, state: Rotation, n: int, q: torch.Tensor | None) -> list[Read]:
        return [self.near(layer, n)]
