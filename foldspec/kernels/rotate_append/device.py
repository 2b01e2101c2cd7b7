"""rotate_append with its slots on the device, as a list of moves: what changes from round to round is in tensors of
fixed shape, so that a round can be recorded once and replayed.

Everything that a layer does between its projections and its attention is such a list, and one launch: q rotated for
each of its reads, k rotated and un-rotated to where each copy is kept, v beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from foldspec.kernels.rotate_append import Facts
from foldspec.kernels.rotate_append.reference import rotate

__all__ = ["Move", "MoveRows", "device_candidates", "device_reference", "page_slots", "ring_slots"]


class Move(NamedTuple):
    """Row ``r`` of ``rows`` [n, heads, width] goes to ``into[slots[r]]`` of [slots, heads, width], in its dtype.

    ``slots`` int64 [n], no slot twice; None: row ``r`` goes to place ``r``. ``angles``: cos and sin [n, 1, t/2] by
    which the first t numbers of every head turn; None: they stay. Of rows and slots the last stride is 1.
    """

    rows: torch.Tensor
    into: torch.Tensor
    slots: torch.Tensor | None = None
    angles: tuple[torch.Tensor, torch.Tensor] | None = None


class MoveRows(Protocol):
    """Moves of the same n rows, none of which reads what another writes. All is in its place when it returns."""

    def __call__(self, moves: Sequence[Move]) -> None: ...


def device_reference(moves: Sequence[Move]) -> None:
    """The definition; reads nothing from the device."""
    for rows, into, slots, angles in moves:
        moved = (rows if angles is None else rotate(rows, *angles)).to(into.dtype)
        if slots is None:
            into.copy_(moved)
        else:
            into[slots] = moved


def page_slots(table: torch.Tensor, entries: torch.Tensor, page: int) -> torch.Tensor:
    """Pages of each request [R, P] and entry numbers int64 [R, B] -> their slots, int64 [R * B]."""
    return (table.gather(1, entries // page).long() * page + entries % page).flatten()


def ring_slots(first: torch.Tensor, entries: torch.Tensor, ring: int) -> torch.Tensor:
    """The first slot of each request's ring [R] and entry numbers int64 [R, B] -> their slots, int64 [R * B]."""
    return (first[:, None].long() + entries % ring).flatten()


def device_candidates() -> list[tuple[str, Callable[[Facts], str | None], MoveRows]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.rotate_append import reference, triton

    return [("triton", triton.supports, triton.move_rows), ("reference", reference.supports, device_reference)]
