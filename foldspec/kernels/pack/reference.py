"""Definition of packing: each panel of rows [PANEL, in] becomes [in, PANEL], the last one as narrow as what is left."""

from __future__ import annotations

import torch

from foldspec.kernels.linear.panels import PANEL
from foldspec.kernels.pack import Facts


def supports(facts: Facts) -> str | None:
    return None


def pack(rows: torch.Tensor, to: torch.Tensor) -> None:
    for panel, place in zip(rows.split(PANEL), to.split(PANEL), strict=True):
        place.view(rows.shape[1], len(panel)).copy_(panel.T)
