"""Rows of several requests packed without padding: the shape of every batch, ragged from the first day. And rows whose
places are on the device alone, as many of each request: the shape of a round that the host does not look into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

__all__ = ["FixedRows", "Places", "Rows"]


@dataclass(frozen=True)
class Rows:
    """``counts[i]`` consecutive positions of request ``requests[i]`` from ``starts[i]`` on, packed in this order."""

    requests: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, requests: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Rows:
        return cls(tuple(requests), tuple(starts), tuple(counts))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """[R+1] where each request's rows begin in the packed tensor, and the total."""
        offsets = [0]
        for count in self.counts:
            offsets.append(offsets[-1] + count)
        return tuple(offsets)

    @property
    def total(self) -> int:
        return self.offsets[-1]

    @property
    def end(self) -> int:
        """All positions lie below it."""
        return max(start + count for start, count in zip(self.starts, self.counts, strict=True))

    def positions(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """[total] int64."""
        pieces = [torch.arange(s, s + c) for s, c in zip(self.starts, self.counts, strict=True)]
        return torch.cat(pieces).to(device)

    def __iter__(self):  # type: ignore[no-untyped-def]
        """(request, first position, slice of the packed rows) of each request."""
        for request, start, a, b in zip(self.requests, self.starts, self.offsets, self.offsets[1:], strict=False):
            yield request, start, slice(a, b)


@dataclass(frozen=True)
class Places:
    """Where the entries of requests lie, on the device: ``tables`` int32 [R, P], the pages of each; ``rings`` int32
    [R, 1] by capacity, the first slot of each one's ring. What of a table is not reserved names any page."""

    tables: torch.Tensor
    page_size: int
    rings: Mapping[int, torch.Tensor]

    def first(self, requests: int) -> Places:
        """Of the first so many requests: views."""
        return Places(
            self.tables[:requests], self.page_size, {size: base[:requests] for size, base in self.rings.items()}
        )


class FixedRows(Rows):
    """``count`` rows of each of R requests, from the positions ``first`` [R] int64 on, which nobody reads on the host:
    whoever asks for ``starts`` fails. ``steps`` [count]: 0, 1, 2, ..., kept so that no round makes it anew.

    ``places``  where their entries lie, with slots for these rows reserved
    ``end``     all positions lie below it, whatever the round
    ``far``     whether some request may have a read beside its near one (``ContextMethod.far``)
    ``shared``  what layers keep for one another while these rows live
    """

    def __init__(self, first: torch.Tensor, steps: torch.Tensor, places: Places, end: int, far: bool = False) -> None:
        count = len(steps)
        fields = {"requests": tuple(range(len(first))), "counts": (count,) * len(first), "count": count}
        fields |= {"first": first, "steps": steps, "places": places, "_end": end, "far": far, "shared": {}}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    first: torch.Tensor
    steps: torch.Tensor
    places: Places
    count: int
    far: bool
    shared: dict[Any, Any]
    _end: int

    @property
    def starts(self) -> tuple[int, ...]:
        raise AssertionError("where these rows begin is known on the device alone")

    @property
    def end(self) -> int:
        return self._end

    @cached_property
    def at(self) -> torch.Tensor:
        """[R, count] int64 positions."""
        return self.first[:, None] + self.steps

    def positions(self, device: torch.device | str = "cpu") -> torch.Tensor:
        return self.at.flatten()

    @cached_property
    def slots(self) -> torch.Tensor:
        """[total] int64: in pages."""
        pages = self.places.tables.gather(1, self.at // self.places.page_size)
        return (pages.long() * self.places.page_size + self.at % self.places.page_size).flatten()

    @cached_property
    def causal(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [R, count] each: the entries ``first .. last-1``, a row's own and all before it."""
        last = (self.at + 1).int()
        return torch.zeros_like(last), last

    def ring_slots(self, capacity: int) -> torch.Tensor:
        """[total] int64: in the rings of that capacity."""
        return (self.places.rings[capacity] + self.at % capacity).flatten()
