"""The recurrence of a gated DeltaNet layer: a matrix a head that decays, is corrected by each row, and is read by it.

It differs from attention in that nothing of it can be left out later: a row that is taken back has changed the whole
matrix. So the matrix stays where it was before the last rows, whose corrections are recorded beside it; those that turn
out to stand are folded in, in their order, before the next rows. That is exact to the last bit: a row's own step adds
the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from foldspec.kernels.library import Library

__all__ = ["Facts", "GatedDelta", "State", "candidates"]


class State(NamedTuple):
    """What one layer keeps of one request, fp32 or better. It is changed in place.

    ``matrix``   [value heads, key width, value width] before the recorded rows
    ``keys``     [R, key heads, key width] of the recorded rows, normalised
    ``updates``  [R, value heads, value width], what each adds: ``matrix += key updateᵀ``
    ``decays``   [R, value heads], what the matrix is multiplied by before
    ``kept``     how many of the recorded rows stand
    """

    matrix: torch.Tensor
    keys: torch.Tensor
    updates: torch.Tensor
    decays: torch.Tensor
    kept: int


class Facts(NamedTuple):
    device: str
    dtype: torch.dtype


class GatedDelta(Protocol):
    """q and k [n, key heads, key width], not normalised yet, v [n, value heads, value width], in the model's dtype;
    log decays g and rates beta [n, value heads] in the state's -> [n, value heads, value width] in the dtype of v.

    The kept rows are folded into the matrix, and the first of the new ones too where there are more than R; the last
    min(n, R) are recorded.
    """

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: State
    ) -> torch.Tensor: ...


def candidates(library: Library) -> list[tuple[str, Callable[[Facts], str | None], GatedDelta]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.gated_delta import chunked, native, reference

    compiled = native.NativeGatedDelta(library)
    return [
        ("native", compiled.supports, compiled),
        ("chunked", chunked.supports, chunked.gated_delta),
        ("reference", reference.supports, reference.gated_delta),
    ]
