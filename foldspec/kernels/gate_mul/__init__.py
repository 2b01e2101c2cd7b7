"""The gate of an MLP, ``f(gate) * up`` element by element: f is silu (SwiGLU) or gelu in its tanh form (GeGLU).

An operator of its own because torch's ``silu`` and ``gelu`` compute the last elements of a range with another
exponential than the others: a row's bits then depend on the rows around it, unless widths and threads happen to fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch

from foldspec.kernels.library import Library

__all__ = ["Facts", "Gate", "GateMul", "candidates"]

Gate = Literal["silu", "gelu_tanh"]


class Facts(NamedTuple):
    device: str
    dtype: torch.dtype


class GateMul(Protocol):
    """gate and up [n, width] of one dtype, each perhaps a part of wider rows -> [n, width]."""

    def __call__(self, gate: torch.Tensor, up: torch.Tensor, f: Gate) -> torch.Tensor: ...


def candidates(library: Library) -> list[tuple[str, Callable[[Facts], str | None], GateMul]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.gate_mul import native, reference, triton

    compiled = native.NativeGateMul(library)
    return [
        ("native", compiled.supports, compiled),
        ("triton", triton.supports, triton.gate_mul),
        ("reference", reference.supports, reference.gate_mul),
    ]
