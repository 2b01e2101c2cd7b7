"""What stands between a layer's projections and its attention: rotate new queries and keys to their positions, and
store keys and values in the cache.

One operator because each of its parts is a few kilobytes: called one by one, the calls cost more than the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from foldspec.kernels.library import Library

__all__ = ["Facts", "RotateAppend", "Slots", "candidates"]


class Slots(NamedTuple):
    """Where the rows of a forward go in one layer of a pool: row ``r`` to slot ``slots[r]`` of ``keys`` and ``values``
    [slots, kv heads, width]. ``slots`` is known to the host, or int64 [n] on the device."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: tuple[int, ...] | torch.Tensor


class Facts(NamedTuple):
    device: str
    dtype: torch.dtype
    stored: torch.dtype


class RotateAppend(Protocol):
    """q [n, heads, d], k and v [n, kv heads, width], un-rotated; cos and sin [n, 1, r/2], r <= d -> q rotated, in its
    shape. Rotated keys and the values are in their slots when it returns."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, into: Slots
    ) -> torch.Tensor: ...


def candidates(library: Library) -> list[tuple[str, Callable[[Facts], str | None], RotateAppend]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.rotate_append import native, reference, triton

    compiled = native.NativeRotateAppend(library)
    return [
        ("native", compiled.supports, compiled),
        ("triton", triton.supports, triton.rotate_append),
        ("reference", reference.supports, reference.rotate_append),
    ]
