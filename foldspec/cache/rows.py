"""Rows of several requests packed without padding: the shape of every batch, ragged from the first day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["Rows"]


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

    def positions(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """[total] int64."""
        pieces = [torch.arange(s, s + c) for s, c in zip(self.starts, self.counts, strict=True)]
        return torch.cat(pieces).to(device)

    def __iter__(self):  # type: ignore[no-untyped-def]
        """(request, first position, slice of the packed rows) of each request."""
        for request, start, a, b in zip(self.requests, self.starts, self.offsets, self.offsets[1:], strict=False):
            yield request, start, slice(a, b)
