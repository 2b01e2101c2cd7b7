"""Memory that takes addresses alone, until a page of it is written: for offsets beyond 32 bits."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys

import torch

# Elements from one row to the next: twice this is beyond 2 ** 32, and no part of it is 0 when cut to 32 bits.
FAR = 2**31 + 64 * 48
BEFORE = 2**31
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # named from Python 3.13 on


def empty(*shape: int, dtype: torch.dtype = torch.float32, scanned: bool = False) -> torch.Tensor:
    """Zeros that are addresses only; in large pages if they are going to be read from end to end."""
    space = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON | NORESERVE)
    if scanned and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: it takes longer
            space.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(space, dtype=dtype).view(shape)


def apart(x: torch.Tensor) -> torch.Tensor:
    """A copy of x whose rows lie FAR from each other. An offset that was cut to 32 bits still finds memory."""
    space = empty(BEFORE + (len(x) - 1) * FAR + x[0].numel())
    return space.as_strided(x.shape, (FAR, *x.contiguous().stride()[1:]), BEFORE).copy_(x)
