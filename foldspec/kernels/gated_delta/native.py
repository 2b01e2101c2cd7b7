"""The compiled gated delta rule, ``csrc/gated_delta.cpp``: fp32 on a CPU, row by row however many there are."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from foldspec.kernels.gated_delta import Facts, State
from foldspec.kernels.library import Library, refusal

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class NativeGatedDelta:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._function: Any = None

    def supports(self, facts: Facts) -> str | None:
        return refusal(facts.device, facts.dtype) or self._library.reason

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: State
    ) -> torch.Tensor:
        if self._function is None:
            arguments = [_POINTER, _LONG] * 3 + [_POINTER] * 7 + [_LONG] * 7 + [_INT] * 2
            self._function = self._library.function("gated_delta", arguments)
        q, k, v = (_packed_heads(x) for x in (q, k, v))
        g, beta = g.contiguous(), beta.contiguous()
        assert all(x.is_contiguous() and x.dtype == torch.float32 for x in state[:4])
        y = v.new_empty(v.shape)
        rows = [argument for x in (q, k, v) for argument in (x.data_ptr(), x.stride(0))]
        self._function(
            *rows,
            g.data_ptr(),
            beta.data_ptr(),
            *(x.data_ptr() for x in state[:4]),
            y.data_ptr(),
            len(v),
            state.kept,
            len(state.keys),
            *k.shape[1:],
            *v.shape[1:],
            torch.get_num_threads(),
            self._library.isa,
        )
        return y


def _packed_heads(x: torch.Tensor) -> torch.Tensor:
    """[n, heads, width] with heads one after another; rows may be parts of wider ones."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
