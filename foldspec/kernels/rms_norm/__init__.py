"""RMSNorm: ``w * x / sqrt(mean(x^2) + eps)`` over the last axis.

An operator of its own because a step of a small model runs dozens of them, and torch's spends more on the call than on
the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from foldspec.kernels.library import Library

__all__ = ["Facts", "RmsNorm", "candidates"]


class Facts(NamedTuple):
    device: str
    dtype: torch.dtype


class RmsNorm(Protocol):
    """x [..., width] and weight [width] -> the same as x. A wider weight multiplies before the cast to x's dtype."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


def candidates(library: Library) -> list[tuple[str, Callable[[Facts], str | None], RmsNorm]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.rms_norm import native, reference, triton

    compiled = native.NativeRmsNorm(library)
    return [
        ("native", compiled.supports, compiled),
        ("triton", triton.supports, triton.rms_norm),
        ("reference", reference.supports, reference.rms_norm),
    ]
