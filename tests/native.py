"""What the tests of the compiled kernels share: a library for each instruction set of this CPU, and guarded memory."""

from __future__ import annotations

import functools
import platform

import pytest
import torch

from foldspec.engine import cache_folder
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import INSTRUCTION_SETS, Library

# those of this architecture; what this very CPU cannot run is skipped
_ELSEWHERE = {"neon"} if platform.machine() in ("x86_64", "AMD64") else {"avx512", "avx2"}
INSTRUCTIONS = tuple(name for name in INSTRUCTION_SETS if name not in _ELSEWHERE)
ROWS = (*range(1, 17), 33)


@functools.cache
def library(instructions: str) -> Library:
    return Library(cache_folder() / "kernels", instructions=instructions)


def kernels(instructions: str) -> Kernels:
    """Everything compiled, with these instructions. A machine that tests foldspec has a compiler: no test passes for
    want of one."""
    reason = library(instructions).reason
    if reason == f"not compiled: this CPU does not run {instructions}":
        pytest.skip(reason)
    assert reason is None
    return Kernels("native", library(instructions))


def guarded(x: torch.Tensor, fill: float = torch.nan) -> torch.Tensor:
    """A copy of x that lies between two stretches of ``fill``."""
    pool = torch.full((x.numel() + 128,), fill, dtype=x.dtype)
    inside = pool[64 : 64 + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


def margins(x: torch.Tensor) -> torch.Tensor:
    """The two stretches around a guarded tensor."""
    storage = torch.tensor([], dtype=x.dtype).set_(x.untyped_storage())
    return torch.cat([storage[:64], storage[-64:]])
