"""The verify of CUDA C++, ``csrc/cuda/verify.cu``, compiled at first use and called through ctypes: fp32 or bf16 logits
on a GPU."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from foldspec.kernels.verify import CASES, Blocks, Decided, Facts

__all__ = ["CudaVerify", "Functions"]

DIVERGENCES = ("taylor", "chi2", "tv", "exact_kl")  # as the source numbers them
_POINTER, _LONG, _DOUBLE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int32
_TENSORS = ("logits", "first", "counts", "drafts", "positions", "keys", "temperatures", "shares", "floor", "last")


class _Verify(ctypes.Structure):
    """As the source has it."""

    _fields_ = (
        *((name, _POINTER) for name in (*_TENSORS, "q", "q_rows", "forced", "found", "room")),
        *((name, _LONG) for name in ("step", "vocabulary", "requests", "most", "q_count")),
        *((name, _DOUBLE) for name in ("leniency", "factor")),
        *((n, _INT) for n in ("bf16", "q_wide", "kind", "divergence", "relaxed", "mixture", "greedy", "mass")),
        *((name, _POINTER) for name in ("peaks", "sums", "drawn", "by_draft", "rulings", "tails")),
    )


class Functions(Protocol):
    """Where the compiled functions are: ``reason`` says why there are none."""

    @property
    def reason(self) -> str | None: ...

    def function(self, name: str, arguments: list[Any], result: Any = None) -> Any: ...


class CudaVerify:
    def __init__(self, library: Functions) -> None:
        self._library = library
        self._functions: tuple[Any, Any, Any] | None = None

    def supports(self, facts: Facts) -> str | None:
        if facts.device != "cuda":
            return f"runs on a GPU, not on {facts.device}"
        if facts.logits not in (torch.float32, torch.bfloat16):
            return f"reads float32 and bfloat16, not {str(facts.logits).removeprefix('torch.')}"
        return self._library.reason

    def __call__(self, blocks: Blocks) -> Decided:
        """On the current stream of the blocks' device; waits for nothing."""
        if self._functions is None:
            this, find = ctypes.POINTER(_Verify), self._library.function
            self._functions = (
                find("verify_room", [this], _LONG),
                find("verify", [this, _POINTER], ctypes.c_int),
                find("error", [ctypes.c_int], ctypes.c_char_p),
            )
        room_of, verify, error_of = self._functions
        requests, most = blocks.drafts.shape
        found = torch.empty(requests, 3 + most, dtype=torch.int64, device=blocks.logits.device)
        given = _arguments(blocks, found)
        room = torch.empty(room_of(given), dtype=torch.uint8, device=found.device)
        given.room = room.data_ptr()
        with torch.cuda.device(found.device) if found.is_cuda else nullcontext():
            wrong = verify(given, torch.cuda.current_stream().cuda_stream if found.is_cuda else 0)
        if wrong:
            raise RuntimeError(f"the CUDA verification kernel: {error_of(wrong).decode()}")
        return Decided(found[:, 0], found[:, 1], found[:, 2], found[:, 3:].bool())


def _arguments(blocks: Blocks, found: torch.Tensor) -> _Verify:
    case, logits = blocks.case, blocks.logits
    assert logits.stride(1) == 1 and (blocks.q is None or blocks.q.is_contiguous())
    given = _Verify(found=found.data_ptr(), step=logits.stride(0), vocabulary=logits.shape[1])
    for name in (*_TENSORS, "q", "q_rows", "forced"):
        tensor = getattr(blocks, name)
        assert tensor is None or name == "logits" or tensor.is_contiguous()
        setattr(given, name, None if tensor is None else tensor.data_ptr())
    given.requests, given.most = blocks.drafts.shape
    given.q_count = 0 if blocks.q is None else len(blocks.q)
    given.q_wide = blocks.q is not None and blocks.q.dtype == torch.float64
    given.bf16 = logits.dtype == torch.bfloat16
    given.kind, given.divergence = CASES.index(case.kind), DIVERGENCES.index(case.divergence)
    given.leniency, given.factor, given.relaxed, given.mixture = case.leniency, case.factor, case.relaxed, case.mixture
    given.greedy, given.mass = blocks.greedy, blocks.counts_mass
    return given
