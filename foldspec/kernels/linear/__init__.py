"""The product of rows with a weight matrix: ``y = x W^T + b + plus``, weights held in their own dtype, fp32 arithmetic.

The compiled implementation gives a row the same bits whatever the other rows, so that what a verification pass computes
for a token is what plain decoding computes for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from foldspec.kernels.library import Library

__all__ = ["Facts", "Linear", "candidates"]


class Facts(NamedTuple):
    """What an implementation needs to know to say whether it fits: ``dtype`` of rows, ``held`` of the weights, and
    whether those lie in panels (``panels.py``)."""

    device: str
    dtype: torch.dtype
    held: torch.dtype
    packed: bool = False


class Linear(Protocol):
    """x [n, in], weight [out, in], bias [out] and plus [n, out] in the dtype of x -> [n, out] in the dtype of x.

    ``plus`` is added last: the residual stream, which the product joins.
    """

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plus: torch.Tensor | None = None
    ) -> torch.Tensor: ...


def candidates(library: Library) -> list[tuple[str, Callable[[Facts], str | None], Linear]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.linear import native, reference

    compiled = native.NativeLinear(library)
    return [("native", compiled.supports, compiled), ("reference", reference.supports, reference.linear)]
