"""The compiled multi-read attention, ``csrc/multi_read_attention.cpp``: fp32 on a CPU, over views of the cache.

A row's result does not depend on the other rows, on how its entries are cut into runs, or on the number of threads.
torch's flash operator gives no such promise: with 9 query heads on 3 kv heads, a row alone and the same row among 16
differ in their last bits (torch 2.13), and splitting off the columns in which rows differ always changes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from foldspec.kernels.library import Library, longs, refusal
from foldspec.kernels.multi_read_attention import Entries, Facts, Output, ReadArgs

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _Entries(ctypes.Structure):
    _fields_ = (
        ("data", _POINTER),
        ("slot_stride", _LONG),
        ("head_stride", _LONG),
        ("runs", _POINTER),
        ("run_count", _LONG),
    )


class _Read(ctypes.Structure):
    _fields_ = (
        ("q", _POINTER),
        ("keys", _Entries),
        ("values", _Entries),
        ("first", _POINTER),
        ("last", _POINTER),
        ("scale", _FLOAT),
        ("exponent", _FLOAT),
    )


class NativeAttention:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._function: Any = None

    def supports(self, facts: Facts) -> str | None:
        return refusal(facts.device, facts.dtype) or self._library.reason

    def __call__(self, batch: Sequence[Sequence[ReadArgs]]) -> list[Output]:
        if self._function is None:
            arguments = [_POINTER, *[_LONG] * 6, _POINTER, _POINTER, _INT, _INT]
            self._function = self._library.function("multi_read_attention", arguments)
        return [self._one(reads) for reads in batch]

    def _one(self, reads: Sequence[ReadArgs]) -> Output:
        rows, heads, key_width = reads[0].q.shape
        kv_heads, value_width = reads[0].values.data.shape[1:]
        kept: list[object] = []  # what the arguments point into
        arguments = (_Read * len(reads))(*(_pack(read, kept) for read in reads))
        out = reads[0].q.new_empty(rows, heads, value_width)
        lse = reads[0].q.new_empty(len(reads), rows, heads)
        self._function(
            ctypes.addressof(arguments),
            len(reads),
            rows,
            heads,
            kv_heads,
            key_width,
            value_width,
            out.data_ptr(),
            lse.data_ptr(),
            torch.get_num_threads(),
            self._library.isa,
        )
        return Output(out, lse)


def _pack(read: ReadArgs, kept: list[object]) -> _Read:
    # sums go in blocks of columns, counted from the origin: a run that nobody sees stands for what comes before
    before = read.origin
    q, first, last = read.q.contiguous(), _longs(read.first, before), _longs(read.last, before)
    kept += (q, first, last)
    keys, values = _entries(read.keys, before, kept), _entries(read.values, before, kept)
    return _Read(q.data_ptr(), keys, values, ctypes.addressof(first), ctypes.addressof(last), read.scale, read.exponent)


def _longs(bounds: tuple[int, ...], before: int) -> ctypes.Array[ctypes.c_int64]:
    return longs(bounds if not before else tuple(bound + before for bound in bounds))


def _entries(entries: Entries, before: int, kept: list[object]) -> _Entries:
    data, runs = entries.data, entries.runs if not before else ((0, before), *entries.runs)
    assert data.dtype == torch.float32 and data.stride(2) == 1
    pairs = _pairs(runs)
    kept.append(pairs)
    return _Entries(data.data_ptr(), data.stride(0), data.stride(1), ctypes.addressof(pairs), len(runs))


@lru_cache(maxsize=64)
def _pairs(runs: tuple[tuple[int, int], ...]) -> ctypes.Array[ctypes.c_int64]:
    return longs(tuple(number for run in runs for number in run))
