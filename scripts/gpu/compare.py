"""How far a kernel's numbers are from what float64 gives."""

from __future__ import annotations

import torch

from gpu.rows import Wrong

__all__ = ["FLOAT", "HALF", "TOLERANCE", "compare"]

FLOAT, HALF = torch.float32, torch.bfloat16
# of the norm of what float64 gives; products of fp32 are tf32x3 on a GPU
TOLERANCE = {FLOAT: 3e-5, HALF: 1e-2}


def compare(found: torch.Tensor, true: torch.Tensor, what: str, tolerance: float | None = None) -> float:
    """The distance, as a part of the norm. Raises :class:`Wrong` if it is too far; NaN is."""
    error = float((found.double().cpu() - true.cpu()).norm() / true.cpu().norm())
    most = TOLERANCE[found.dtype] if tolerance is None else tolerance
    if not error < most:
        raise Wrong(f"{what}: off by {error:.3g} of the norm, {most:g} is allowed")
    return error
