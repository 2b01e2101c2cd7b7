"""The compiled rotate_append, ``csrc/rotate_append.cpp``: fp32 on a CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from foldspec.kernels.library import Library, longs, refusal
from foldspec.kernels.rotate_append import Facts, Slots

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _Rows(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("step", _LONG), ("heads", _LONG), ("width", _LONG))


class NativeRotateAppend:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._function: Any = None

    def supports(self, facts: Facts) -> str | None:
        wrong = refusal(facts.device, facts.dtype)
        if wrong is None and facts.stored != torch.float32:
            wrong = f"stores float32, not {str(facts.stored).removeprefix('torch.')}"
        return wrong or self._library.reason

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, into: Slots
    ) -> torch.Tensor:
        if self._function is None:
            rows = [ctypes.POINTER(_Rows)] * 3
            arguments = [*rows, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, *[_POINTER] * 3, _INT]
            self._function = self._library.function("rotate_append", arguments)
        rotated = q.new_empty(q.shape)
        if isinstance(into.slots, torch.Tensor):
            assert into.slots.dtype == torch.int64 and into.slots.is_contiguous()
            place = into.slots.data_ptr()
        else:
            slots = longs(into.slots)
            place = ctypes.addressof(slots)
        q_rows, k_rows, v_rows = _rows(q), _rows(k), _rows(v)
        assert cos.stride() == sin.stride() and cos.stride(2) == 1
        assert into.keys.is_contiguous() and into.values.is_contiguous()
        self._function(
            q_rows,
            k_rows,
            v_rows,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            cos.shape[2],
            place,
            q.shape[0],
            into.keys.data_ptr(),
            into.values.data_ptr(),
            rotated.data_ptr(),
            self._library.isa,
        )
        return rotated


def _rows(x: torch.Tensor) -> _Rows:
    _, heads, width = x.shape
    step, of_head, packed = x.stride()
    assert packed == 1 and (of_head == width or heads == 1), "heads lie one after another"
    return _Rows(x.data_ptr(), step, heads, width)
