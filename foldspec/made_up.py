"""Random numbers for weights and contexts that are made up, so cheap that filling costs little more than writing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Numbers"]

# A prime above any vocabulary: rows of a matrix begin at different places of the cycle, so no two of them are alike.
_CYCLE = 1_048_573


class Numbers:
    """Normal numbers that come again after a cycle of about a million; the same ones for each object."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        draw = torch.Generator().manual_seed(0)
        self._cycle = torch.randn(_CYCLE, generator=draw).to(device)
        self._next = 0

    def fill(self, out: torch.Tensor, scale: float = 1.0, mean: float = 0.0) -> None:
        """Fill a contiguous tensor of floats with numbers of this mean and standard deviation."""
        flat, done = out.view(-1), 0
        cycle = (self._cycle * scale + mean).to(out.dtype) if len(flat) > _CYCLE else None
        while done < len(flat):
            count = min(_CYCLE - self._next, len(flat) - done)
            part = slice(self._next, self._next + count)
            flat[done : done + count] = self._cycle[part] * scale + mean if cycle is None else cycle[part]
            self._next = part.stop % _CYCLE
            done += count

    def tensor(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A tensor of standard normal numbers in the dtype and on the device of another."""
        out = torch.empty(*shape, dtype=like.dtype, device=like.device)
        self.fill(out)
        return out
