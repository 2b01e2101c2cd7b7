"""From rows of a matrix as a checkpoint has them to the layout in which the compiled product reads them
(``linear/panels.py``), cast to the dtype that they are held in: what a loader does with every piece of a file.

An operator of its own because torch's copy into the other order takes as long as reading the files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from foldspec.kernels.library import Library

__all__ = ["Facts", "Pack", "candidates"]


class Facts(NamedTuple):
    """``held`` is the dtype of the packed rows."""

    device: str
    held: torch.dtype


class Pack(Protocol):
    """Contiguous rows [n, in] in any float dtype -> ``to`` [n, in], contiguous and elsewhere, in panels. They may be
    part of a matrix that begins with a panel and ends with one or with the matrix, and ``to`` the same part."""

    def __call__(self, rows: torch.Tensor, to: torch.Tensor) -> None: ...


def candidates(library: Library) -> list[tuple[str, Callable[[Facts], str | None], Pack]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.pack import native, reference

    compiled = native.NativePack(library)
    return [("native", compiled.supports, compiled), ("reference", reference.supports, reference.pack)]
