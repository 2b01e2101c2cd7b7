"""The layout in which the compiled product reads weights, in place of a checkpoint's [out, in] and in as much memory.

Every :data:`PANEL` rows of the matrix are one panel, stored [in, PANEL]; the last panel is as narrow as what is left.
A panel fills the bytes that its rows filled, so the tensor keeps its shape, and a slice of rows at whole panels is a
packed matrix again. The operator ``pack`` makes it. What a row holds is no longer a row: :func:`rows` looks them up.
"""

from __future__ import annotations

import torch

__all__ = ["PANEL", "rows", "unpacked"]

PANEL = 16  # as csrc/linear.cpp and csrc/pack.cpp have it


def rows(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows ``ids`` [n] of a packed weight [out, in], as [n, in]."""
    count, width = weight.shape
    panel = ids // PANEL
    height = (count - panel * PANEL).clamp(max=PANEL)  # of the panel: how far its values of one row lie apart
    begin = panel * PANEL * width + ids % PANEL
    return weight.view(-1)[begin[:, None] + height[:, None] * torch.arange(width, device=ids.device)]


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """A packed weight [out, in], or a slice at whole panels of one, as it was before."""
    count, width = weight.shape
    whole = count // PANEL * PANEL
    pieces = [(weight[:whole], PANEL), (weight[whole:], count - whole)]
    return torch.cat(
        [
            piece.view(-1, width, height).transpose(1, 2).reshape(len(piece), width)
            for piece, height in pieces
            if len(piece)
        ]
    )
