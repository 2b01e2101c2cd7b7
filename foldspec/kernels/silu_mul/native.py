"""The compiled silu_mul, ``csrc/silu_mul.cpp``: fp32 on a CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from foldspec.kernels.library import Library
from foldspec.kernels.silu_mul import Facts


class NativeSiluMul:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._function: Any = None

    def supports(self, facts: Facts) -> str | None:
        if facts.device != "cpu":
            return f"runs on a CPU, not on {facts.device}"
        if facts.dtype != torch.float32:
            return f"computes in float32, not in {str(facts.dtype).removeprefix('torch.')}"
        return self._library.reason

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self._function is None:
            arguments = [ctypes.c_void_p] * 3 + [ctypes.c_int64] + [ctypes.c_int] * 2
            self._function = self._library.function("silu_mul", arguments)
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        self._function(
            gate.data_ptr(), up.data_ptr(), y.data_ptr(), y.numel(), torch.get_num_threads(), self._library.isa
        )
        return y
