"""Rotating and storing rows, RMSNorm and the gate of an MLP, against float64."""

from __future__ import annotations

import math
from functools import partial

import brute
import folded
import torch

from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.rotate_append import Slots
from foldspec.kernels.rotate_append.device import Move
from gpu.compare import FLOAT, HALF, TOLERANCE, compare
from gpu.rows import Numbers, Wrong
from gpu.setting import Setting, poisoned

__all__ = ["gate_cases", "gate_mul", "move_cases", "moves", "norm", "norm_cases"]


def move_cases(setting: Setting) -> list[tuple[str, tuple[int, int, int, int, torch.dtype]]]:
    """Heads, kv heads, width, how much of it turns."""
    if setting.dry:
        return [("fp32 24", (4, 2, 24, 10, FLOAT)), ("bf16 16", (3, 1, 16, 16, HALF))]
    return [
        ("bf16 32/8 128", (32, 8, 128, 128, HALF)),
        ("bf16 16/4 256, a quarter turned", (16, 4, 256, 64, HALF)),
        ("bf16 16/8 256", (16, 8, 256, 256, HALF)),
        ("bf16 16/1 512", (16, 1, 512, 512, HALF)),
        ("fp32 9/3 64", (9, 3, 64, 64, FLOAT)),
    ]


def moves(
    setting: Setting, kernels: Kernels, heads: int, kv: int, width: int, turned: int, dtype: torch.dtype
) -> Numbers:
    """A block under FOLD (q twice, k into a ring, v), what a drafter absorbs (k twice, v: the append), a target's rows;
    slots that nobody writes stay NaN."""
    count, slot_count, draw = 10, 64, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(count, h, width, generator=draw).to(dtype) for h in (heads, kv, kv))
    ring, pages = (torch.randperm(slot_count, generator=draw)[:count] for _ in range(2))
    near, far = torch.arange(count) + 70_000, torch.arange(count) + 2058
    here = partial(torch.Tensor.to, device=setting.device)
    angles = {at: _angles(position, turned, setting.device) for at, position in (("near", near), ("far", far))}

    def pool(h: int) -> torch.Tensor:
        return torch.full((slot_count, h, width), torch.nan, dtype=dtype, device=setting.device)

    def turn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.cat([folded.turned(x[..., :turned], at), x[..., turned:].double()], -1)

    qs, own, plain, values = [torch.full_like(here(q), torch.nan) for _ in range(2)], pool(kv), pool(kv), pool(kv)
    block = [Move(here(q), qs[0], None, angles["near"]), Move(here(q), qs[1], None, angles["far"]),
             Move(here(k), own, here(ring), angles["near"]), Move(here(v), values, here(pages))]  # fmt: skip
    kernels.move_rows(block)
    kept = pool(kv), pool(kv)
    kernels.move_rows([Move(here(k), kept[0], here(ring), angles["near"]), Move(here(k), plain, here(pages)),
                       Move(here(v), kept[1], here(pages))])  # fmt: skip
    target = pool(kv), pool(kv)
    with poisoned():
        rotated = kernels.rotate_append(here(q), here(k), here(v), angles["near"], Slots(*target, here(pages)))
    near_q, near_k = turn(q, near), turn(k, near)
    worst = 0.0
    for what, found, true, slots in (
        ("q of the near read", qs[0], near_q, None),
        ("q of the far read", qs[1], turn(q, far), None),
        ("keys of the ring", own, near_k, ring),
        ("values", values, v.double(), pages),
        ("keys that are absorbed", kept[0], near_k, ring),
        ("un-rotated keys", plain, k.double(), pages),
        ("values that are absorbed", kept[1], v.double(), pages),
        ("a target's q", rotated, near_q, None),
        ("a target's keys", target[0], near_k, pages),
        ("a target's values", target[1], v.double(), pages),
    ):
        found = found.cpu()
        if slots is not None:
            others = torch.ones(slot_count, dtype=torch.bool).index_fill(0, slots, False)
            if not found[others].isnan().all():
                raise Wrong(f"{what}: a slot was written that nobody asked for")
            found = found[slots]
        worst = max(worst, compare(found, true, what, 5e-6 if dtype == FLOAT else None))
    return {"error": worst, "tolerance": TOLERANCE[dtype]}


def _angles(at: torch.Tensor, turned: int, to: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angle = at.double()[:, None] * torch.from_numpy(brute.frequencies(turned))
    table = torch.stack([angle.cos(), angle.sin()], 1).float().to(to)
    return table[:, :1], table[:, 1:]


def norm_cases(setting: Setting) -> list[tuple[str, int, int, torch.dtype, bool]]:
    """Width, heads (0: whole rows), dtype, and whether the weight is wider than the rows."""
    if setting.dry:
        return [("rows 72", 72, 0, FLOAT, False), ("3 heads 32", 32, 3, FLOAT, False)]
    return [
        ("rows 4096", 4096, 0, HALF, False),
        ("rows 3840 wide", 3840, 0, HALF, True),
        ("rows 576 fp32", 576, 0, FLOAT, False),
        ("32 heads 128", 128, 32, HALF, False),
        ("16 heads 256 wide", 256, 16, HALF, True),
    ]


def norm(setting: Setting, kernels: Kernels, width: int, heads: int, dtype: torch.dtype, wide: bool) -> Numbers:
    draw = torch.Generator().manual_seed(0)
    joined = 3 * torch.randn(10, 2 * max(1, heads) * width, generator=draw).to(dtype).to(setting.device)
    x = joined[:, :width].contiguous() if not heads else joined[:, : heads * width].view(10, heads, width)
    weight = torch.randn(width, generator=draw).to(FLOAT if wide else dtype).to(setting.device)
    with poisoned():
        found = kernels.rms_norm(x, weight, 1e-5)
    x64 = x.double()
    true = weight.double() * x64 / (x64.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return {"error": compare(found, true, "the norm"), "tolerance": TOLERANCE[dtype]}


def gate_cases(setting: Setting) -> list[tuple[str, torch.dtype]]:
    if setting.dry:
        return [("silu", FLOAT), ("gelu", FLOAT)]
    return [("silu", HALF), ("gelu", HALF), ("silu", FLOAT)]


def gate_mul(setting: Setting, kernels: Kernels, gate: str, dtype: torch.dtype) -> Numbers:
    width = 1100 if setting.dry else 14336
    joined = 3 * torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype).to(setting.device)
    x, up = joined.chunk(2, 1)
    with poisoned():
        found = kernels.silu_mul(x, up) if gate == "silu" else kernels.gelu_mul(x, up)
    wide = x.double()
    if gate == "silu":
        true = wide * torch.sigmoid(wide)
    else:
        true = 0.5 * wide * (1 + torch.tanh((2 / math.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
    return {"error": compare(found, true * up.double(), gate), "tolerance": TOLERANCE[dtype]}
