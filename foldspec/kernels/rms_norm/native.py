"""The compiled RMSNorm, ``csrc/rms_norm.cpp``: fp32 on a CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from foldspec.kernels.library import Library, refusal
from foldspec.kernels.rms_norm import Facts

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class NativeRmsNorm:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._function: Any = None

    def supports(self, facts: Facts) -> str | None:
        return refusal(facts.device, facts.dtype) or self._library.reason

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if self._function is None:
            arguments = [_POINTER] * 3 + [_LONG] * 2 + [ctypes.c_float, ctypes.c_int]
            self._function = self._library.function("rms_norm", arguments)
        x, width = x.contiguous(), weight.shape[0]
        y = torch.empty_like(x)
        rows = x.numel() // width if width else 0
        self._function(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, width, eps, self._library.isa)
        return y
