"""The compiled packing, ``csrc/pack.cpp``: into fp32 or bf16 on a CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from foldspec.kernels.library import Library
from foldspec.kernels.pack import Facts

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class NativePack:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._function: Any = None

    def supports(self, facts: Facts) -> str | None:
        if facts.device != "cpu":
            return f"runs on a CPU, not on {facts.device}"
        if facts.held not in (torch.float32, torch.bfloat16):
            return f"packs float32 or bfloat16, not {str(facts.held).removeprefix('torch.')}"
        return self._library.reason

    def __call__(self, rows: torch.Tensor, to: torch.Tensor) -> None:
        if self._function is None:
            self._function = self._library.function("pack", [_POINTER] * 2 + [_LONG] * 2 + [_INT] * 2)
        if (rows.dtype, to.dtype) != (torch.bfloat16, torch.float32):  # that one is cast as it is packed
            rows = rows.to(to.dtype)
        assert rows.shape == to.shape and rows.is_contiguous() and to.is_contiguous()
        self._function(rows.data_ptr(), to.data_ptr(), *rows.shape, rows.itemsize, to.itemsize)
