"""The layout in which the compiled product reads weights, in place of a checkpoint's [out, in] and in as much memory.

Every :data:`PANEL` rows of the matrix are one panel, stored [in, PANEL]; the last panel is as narrow as what is left.
A panel fills the bytes that its rows filled, so the tensor keeps its shape, and a slice of rows at whole panels is a
packed matrix again. What a row holds is no longer a row: :func:`rows` looks them up.
"""

from __future__ import annotations

import torch

__all__ = ["PANEL", "pack", "rows", "unpacked"]

PANEL = 16  # as csrc/linear.cpp has it
_STEP = 64 * PANEL  # rows packed at a time: a few megabytes beside the matrix itself


def pack(weight: torch.Tensor) -> None:
    """Pack a contiguous weight [out, in] in place."""
    count, width = weight.shape
    for first in range(0, count, _STEP):
        part = weight[first : first + _STEP]
        whole = len(part) // PANEL * PANEL
        for piece, height in ((part[:whole], PANEL), (part[whole:], len(part) - whole)):
            if len(piece):
                piece.copy_(piece.view(-1, height, width).transpose(1, 2).contiguous().view(len(piece), width))


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
