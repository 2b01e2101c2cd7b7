"""The gate of a SwiGLU: ``silu(gate) * up``, element by element.

An operator of its own because torch's ``silu`` computes the last elements of a range with another exponential than the
others: a row's bits then depend on the rows around it, unless widths and threads happen to fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from foldspec.kernels.library import Library

__all__ = ["Facts", "SiluMul", "candidates"]


class Facts(NamedTuple):
    device: str
    dtype: torch.dtype


class SiluMul(Protocol):
    """gate and up [n, width] of one dtype, each perhaps a part of wider rows -> [n, width]."""

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...


def candidates(library: Library) -> list[tuple[str, Callable[[Facts], str | None], SiluMul]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.silu_mul import native, reference

    compiled = native.NativeSiluMul(library)
    return [("native", compiled.supports, compiled), ("reference", reference.supports, reference.silu_mul)]
