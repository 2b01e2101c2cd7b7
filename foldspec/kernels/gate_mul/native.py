"""The compiled gate_mul, ``csrc/gate_mul.cpp``: fp32 on a CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from foldspec.kernels.gate_mul import Facts, Gate
from foldspec.kernels.library import Library, refusal


class NativeGateMul:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._function: Any = None

    def supports(self, facts: Facts) -> str | None:
        return refusal(facts.device, facts.dtype) or self._library.reason

    def __call__(self, gate: torch.Tensor, up: torch.Tensor, f: Gate) -> torch.Tensor:
        if self._function is None:
            arguments = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4 + [ctypes.c_int] * 3
            self._function = self._library.function("gate_mul", arguments)
        if gate.dim() != 2 or gate.stride(1) != 1 or up.stride(1) != 1:
            gate, up = gate.reshape(-1, gate.shape[-1]).contiguous(), up.reshape(-1, up.shape[-1]).contiguous()
        rows, width = gate.shape
        y = gate.new_empty(rows, width)
        self._function(
            gate.data_ptr(),
            up.data_ptr(),
            y.data_ptr(),
            rows,
            width,
            gate.stride(0),
            up.stride(0),
            f == "gelu_tanh",
            torch.get_num_threads(),
            self._library.isa,
        )
        return y
