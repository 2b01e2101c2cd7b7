"""Definition of rotate_append: pairs ``(i, i + r/2)`` of the first r numbers of every head turn by the row's angles,

    a' = a cos - b sin,   b' = b cos + a sin,

and row ``r`` of keys and values goes to slot ``slots[r]``.
"""

from __future__ import annotations

import torch

from foldspec.kernels.rotate_append import Facts, Slots


def supports(facts: Facts) -> str | None:
    return None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first r of every d numbers of x [n, heads, d] by cos and sin [n, 1, r/2]; the others stay."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def rotate_append(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, into: Slots
) -> torch.Tensor:
    slots = into.slots
    if not isinstance(slots, torch.Tensor):
        slots = torch.tensor(slots, dtype=torch.int64, device=q.device)
    into.keys[slots] = rotate(k, cos, sin)
    into.values[slots] = v
    return rotate(q, cos, sin)
