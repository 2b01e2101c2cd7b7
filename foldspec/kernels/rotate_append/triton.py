"""rotate_append in one Triton launch, arithmetic in fp32: on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foldspec.kernels import jit
from foldspec.kernels.rotate_append import Facts, Slots
from foldspec.kernels.rotate_append.device import Move


def supports(facts: Facts) -> str | None:
    return jit.refusal(facts.device, facts.dtype) or jit.refusal(facts.device, facts.stored)


def rotate_append(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, into: Slots
) -> torch.Tensor:
    slots = torch.as_tensor(into.slots, dtype=torch.int64, device=q.device)
    rotated = torch.empty_like(q, memory_format=torch.contiguous_format)
    angles = cos, sin
    move_rows([Move(q, rotated, None, angles), Move(k, into.keys, slots, angles), Move(v, into.values, slots)])
    return rotated


def move_rows(moves: Sequence[Move]) -> None:
    launch(moves)()


def launch(moves: Sequence[Move]) -> jit.Launch:
    from foldspec.kernels.rotate_append.triton_kernels import move_rows as kernel

    count, heads = len(moves[0].rows), tuple(move.rows.shape[1] for move in moves)
    halves = tuple(0 if move.angles is None else move.angles[0].shape[2] for move in moves)
    for move, half in zip(moves, halves, strict=True):
        assert len(move.rows) == count and move.into.shape[1:] == move.rows.shape[1:] and 2 * half <= move.rows.shape[2]
        assert move.rows.stride(2) == move.into.stride(2) == 1, "numbers of a head lie one after another"
        assert all(a.stride(2) == 1 or half == 1 for a in move.angles or ()), "so do a row's angles"
        assert move.slots is None or (move.slots.shape == (count,) and move.slots.is_contiguous())
    block = jit.power_of_two(max(move.rows.shape[2] for move in moves))
    arguments = {
        "rows": tuple(move.rows for move in moves),
        "into": tuple(move.into for move in moves),
        "slots": tuple(move.slots for move in moves),
        "cos": tuple(move.angles and move.angles[0] for move in moves),
        "sin": tuple(move.angles and move.angles[1] for move in moves),
        "steps": tuple(_steps(move) for move in moves),
        "HEADS": heads,
        "WIDTHS": tuple(move.rows.shape[2] for move in moves),
        "HALVES": halves,
        "BLOCK": block,
    }
    return jit.Launch(kernel, (count, sum(heads)), arguments, warps=max(1, block // 256))


def _steps(move: Move) -> tuple[int, ...]:
    angles = (0, 0) if move.angles is None else tuple(a.stride(0) for a in move.angles)
    return (*move.rows.stride()[:2], *move.into.stride()[:2], *angles)


def configurations(arch: int) -> jit.Configurations:
    """Of a target's layer (q, k, v); of a drafter's block under FOLD (q twice, k into the ring, v); and of what it
    absorbs (k into the ring and, un-rotated, into pages; v)."""
    found = {}
    for name, dtype, heads, kv_heads, width, turned in (
        ("bf16-32-8-128", torch.bfloat16, 32, 8, 128, 128),  # Llama-3.1-8B, Qwen3-8B and their drafters
        ("bf16-16-4-256-turned-64", torch.bfloat16, 16, 4, 256, 64),  # Qwen3.5-9B
        ("bf16-16-8-256", torch.bfloat16, 16, 8, 256, 256),  # Gemma-4-12B, sliding layers
        ("bf16-16-1-512", torch.bfloat16, 16, 1, 512, 512),  # and whole ones
        ("fp32-9-3-64", torch.float32, 9, 3, 64, 64),  # SmolLM2-135M
    ):
        q = torch.empty(16, heads, width, dtype=dtype, device="meta")
        k = torch.empty(16, kv_heads, width, dtype=dtype, device="meta")
        pool = torch.empty(4096, kv_heads, width, dtype=dtype, device="meta")
        slots = torch.empty(16, dtype=torch.int64, device="meta")
        at = torch.empty(16, 2, turned // 2, device="meta")
        angles = at[:, :1], at[:, 1:]
        turned_q, turned_k, v = Move(q, q, None, angles), Move(k, pool, slots, angles), Move(k, pool, slots)
        found[f"target-{name}"] = launch([turned_q, turned_k, v])
        found[f"block-{name}"] = launch([turned_q, turned_q, turned_k, v])
        found[f"absorb-{name}"] = launch([turned_k, v, v])
    return found
