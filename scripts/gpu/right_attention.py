"""Attention and its merge against FOLD's equations in float64 (``tests/folded.py``): rows that see nothing, contexts
around where the far set begins, NaN wherever nobody should look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import folded
import torch
from folded import Case

from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import device, flash, triton
from foldspec.kernels.multi_read_attention.device import DeviceRead
from gpu.compare import HALF, TOLERANCE, compare
from gpu.rows import Absent, Numbers, Wrong
from gpu.setting import Setting, poisoned

__all__ = ["attention", "attention_cases", "by_flash", "merged"]

PER_REQUEST = ("q", "key_table", "value_table", "first", "last")


def attention_cases(setting: Setting) -> Iterator[tuple[str, Case, tuple[int, int]]]:
    """Name, case, splits of near and far."""
    if setting.dry:
        yield "fp32 16", Case((1, 25, 70), 7, 3, 16, window=16), (1, 3)
        yield "bf16 16", Case((33,), 7, 2, 16, window=16, dtype=HALF), (1, 2)
        return
    for block, group in ((7, 3), (10, 4), (16, 7)):
        yield f"fp32 128 B{block} G{group}", Case(folded.lengths(block), block, group, 128, kv=2), (1, 8)
    for block, group, width, kv in (
        (10, 4, 128, 8),  # Llama-3.1-8B
        (7, 4, 128, 8),  # Qwen3-8B
        (16, 4, 256, 4),  # Qwen3.5-9B
        (7, 2, 256, 8),  # Gemma-4-12B, sliding layers
        (7, 16, 512, 1),  # and whole ones
        (16, 3, 64, 3),
        (1, 4, 128, 8),  # plain decoding
    ):
        case = Case(folded.lengths(block), block, group, width, alpha=4.0, kv=kv, page=256, dtype=HALF)
        yield f"bf16 {width} B{block} G{group}", case, (1, 8)
    long = Case((600, 3000), 10, 4, 128, window=512, kv=2, page=256, ring=False, dtype=HALF)
    yield "bf16 128 long, without a ring", long, (8, 16)


def attention(setting: Setting, kernels: Kernels, case: Case, splits: tuple[int, int]) -> Numbers:
    made, expected = folded.made(case)
    reads = [replace(read, splits=count) for read, count in zip(_moved(made, setting.device), splits, strict=True)]
    with poisoned():
        output = kernels.device_attention(reads, torch.full_like(reads[0].q, torch.nan))
        # where nothing is far, the near read alone is the answer
        alone = kernels.device_attention(reads[:1])
    worst = 0.0
    for i, (n, (out, lse)) in enumerate(zip(case.lengths, expected, strict=True)):
        masses = output.lse[:, i].cpu()
        if not torch.equal(masses.isinf(), lse.isinf()):
            raise Wrong(f"{n} entries: which rows see nothing is not said right")
        some = ~lse.isinf()
        worst = max(worst, compare(output.out[i], out, f"{n} entries"))
        compare(masses[some], lse[some], f"log masses of {n} entries", TOLERANCE[case.dtype])
        if n <= case.window:
            worst = max(worst, compare(alone.out[i], out, f"one read of {n} entries"))
    return {"error": worst, "tolerance": TOLERANCE[case.dtype], "contexts": list(case.lengths)}


def _moved(reads: Sequence[DeviceRead], to: torch.device) -> list[DeviceRead]:
    """The same reads with their tensors elsewhere; those that share pools go on sharing them."""
    kept: dict[int, torch.Tensor] = {}

    def move(x: Any) -> Any:
        return kept.setdefault(id(x), x.to(to)) if isinstance(x, torch.Tensor) else x

    return [replace(read, **{name: move(value) for name, value in vars(read).items()}) for read in reads]


def merged(setting: Setting) -> Numbers:
    """Three parts with empty rows, whose averages are NaN."""
    case = Case((1, 60), 3, 3, 16 if setting.dry else 128, kv=2)
    near, far = _moved(folded.made(case)[0], setting.device)
    draw = torch.Generator().manual_seed(0)
    requests, block, heads, width = near.q.shape
    parts, sound = [], []
    for _ in range(3):
        o, lse = (torch.randn(requests, block, heads, *more, generator=draw) for more in ((width,), ()))
        lse[0, 2] = -torch.inf
        sound.append((o.double(), lse.double()))
        o = o.clone()
        o[0, 2] = torch.nan
        parts.append((o.to(setting.device), lse.to(setting.device)))
    worst = 0.0
    for count in (2,) if not setting.dry else (1, 2, 3):  # the merge of one follows every single read
        reads = [near, far, far][:count]
        with poisoned():
            found = triton.merge(reads, parts[:count])
        wanted = device.merge(reads, sound[:count])
        seen = ~wanted.lse.isinf().all(0)
        worst = max(worst, compare(found.out.cpu()[seen], wanted.out.double()[seen], f"a merge of {count}", 3e-5))
    return {"error": worst, "tolerance": 3e-5}


def by_flash(setting: Setting) -> Numbers:
    case = Case((24, 300), 10, 4, 128, kv=8, page=256, ring=False, dtype=HALF)
    made, expected = folded.made(case)
    reads = _moved(made, setting.device)
    reason = flash.supports(device.facts_of(reads[0]))
    if reason is not None:
        raise Absent(f"flash-attn: {reason}")
    worst = 0.0
    for i, (n, (out, _)) in enumerate(zip(case.lengths, expected, strict=True)):
        parts = []
        for read in reads:
            first, last = (tuple(bound[i].tolist()) for bound in (read.first, read.last))
            band = flash.band(first, last)
            assert band is not None
            one = _alone(read, i)  # both pools are read by one table
            one = replace(one, keys=_by_the_values_table(read, i), key_table=one.value_table)
            parts.append(flash.device_part(one, band.left, band.right))
        found = triton.merge([_alone(read, i) for read in reads], parts)
        worst = max(worst, compare(found.out[0], out, f"{n} entries"))
    return {"error": worst, "tolerance": TOLERANCE[HALF]}


def _alone(read: DeviceRead, i: int) -> DeviceRead:
    """The read of one request."""
    own: dict[str, Any] = {name: getattr(read, name)[i : i + 1] for name in PER_REQUEST}
    return replace(read, **own)


def _by_the_values_table(read: DeviceRead, i: int) -> torch.Tensor:
    """The keys of a request, placed as its values are; numbers in the place of NaN, as flash-attn wants them."""
    pages = read.keys.unflatten(0, (-1, read.page))
    placed = torch.zeros_like(read.values).unflatten(0, (-1, read.page))
    placed[read.value_table[i].long()] = pages[read.key_table[i].long()]
    return placed.flatten(0, 1).nan_to_num_(0.0)
