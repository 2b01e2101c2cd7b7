"""The compiled linear operator, ``csrc/linear.cpp``: fp32 rows on a CPU, weights held as fp32 or bf16, in panels.

It serves every number of rows, a prefill's hundreds too. Measured at 64 to 512 rows (Zen 5, 1 thread, SmolLM2's shapes)
torch's GEMM, which packs the weights anew on every call, takes 2.3 times as long as the AVX-512 code and 1.1 times as
long as the AVX2 code; and one rule for all numbers leaves no edge at which a row's bits could change.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from foldspec.kernels.library import Library, refusal
from foldspec.kernels.linear import Facts

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class NativeLinear:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._function: Any = None

    def supports(self, facts: Facts) -> str | None:
        wrong = refusal(facts.device, facts.dtype)
        if wrong is None and facts.held not in (torch.float32, torch.bfloat16):
            wrong = f"takes weights as float32 or bfloat16, not {str(facts.held).removeprefix('torch.')}"
        wrong = wrong or self._library.reason
        return wrong if wrong or facts.packed else "reads weights in panels, not as a checkpoint has them"

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plus: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._function is None:
            arguments = [_POINTER] * 5 + [_LONG] * 3 + [_INT] * 3
            self._function = self._library.function("linear", arguments)
        (rows, width), out = x.shape, weight.shape[0]
        assert weight.is_contiguous()
        x = x.contiguous()
        bias = None if bias is None else bias.contiguous()
        plus = None if plus is None else plus.contiguous()
        y = x.new_empty(rows, out)
        self._function(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if plus is None else plus.data_ptr(),
            y.data_ptr(),
            rows,
            out,
            width,
            weight.dtype == torch.bfloat16,
            torch.get_num_threads(),
            self._library.isa,
        )
        return y
