"""flash-attn 2 in plain torch: ``flash_attn_with_kvcache`` with the signature of release 2.8, what it checks of its
arguments, and what it says of rows that see nothing. For tests without a GPU.

As in the kernels, the values of a masked entry are multiplied by a probability of zero, so that NaN there is NaN in the
result; what is behind a sequence's length is not read.
"""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch

from foldspec.kernels.multi_read_attention import flash

HALF = (torch.float16, torch.bfloat16)


class Calls(list[dict[str, Any]]):
    """The keyword arguments of every call."""


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    batch, rows, heads, width = q.shape
    pages, page, kv_heads, key_width = k_cache.shape
    assert q.dtype in HALF and q.dtype == k_cache.dtype == v_cache.dtype, "FlashAttention only supports fp16 and bf16"
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1, "must have contiguous last dimension"
    assert k_cache.shape == v_cache.shape and key_width == width and heads % kv_heads == 0
    assert width <= 256 and width % 8 == 0, "only supports head dimension at most 256"
    assert page % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert isinstance(block_table, torch.Tensor) and block_table.dtype == torch.int32, "block_table must be int32"
    assert block_table.shape[0] == batch and block_table.stride(-1) == 1 and block_table.shape[1] > 0
    assert int(block_table.min()) >= 0 and int(block_table.max()) < pages, "pages that there are"
    assert isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.dtype == torch.int32, "seqlens must be int32"
    assert cache_seqlens.shape == (batch,) and cache_seqlens.is_contiguous()
    assert int(cache_seqlens.max()) <= block_table.shape[1] * page
    assert not any(x is not None for x in (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes))
    assert softcap == 0 and num_splits == 0 and rotary_interleaved
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    left, right = window_size
    if causal and rows > 1:
        right = 0
    out, lse = q.new_zeros(q.shape), torch.full((batch, heads, rows), math.inf)
    for r in range(batch):
        length = int(cache_seqlens[r])
        dense = (x[block_table[r].long()].flatten(0, 1)[:length].double() for x in (k_cache, v_cache))
        keys, values = (x.transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for x in dense)
        i, j = torch.arange(rows)[:, None] + length - rows, torch.arange(length)
        seen = ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
        scores = (scale * (q[r].double().transpose(0, 1) @ keys.transpose(1, 2))).masked_fill(~seen, -math.inf)
        some = seen.any(1)
        probabilities = scores.softmax(-1).masked_fill(~some[:, None], 0.0)
        out[r] = (probabilities @ values).transpose(0, 1).to(q.dtype)
        lse[r] = scores.logsumexp(-1).masked_fill(~some, math.inf).float()  # the released kernels' mass of nothing
    return (out, lse) if return_softmax_lse else out


def install(patch: pytest.MonkeyPatch, version: str = "2.8.3") -> Calls:
    """Let ``import flash_attn`` find the stand-in, and let it run on a CPU; what it is called with."""
    calls = Calls()

    def listen(*arguments: Any, **named: Any) -> Any:
        calls.append(named)
        return flash_attn_with_kvcache(*arguments, **named)

    module = types.ModuleType("flash_attn")
    vars(module).update(__version__=version, flash_attn_with_kvcache=listen)
    patch.setitem(__import__("sys").modules, "flash_attn", module)
    patch.setattr(flash, "DEVICE", "cpu")
    return calls
