"""FOLD's two reads as a GPU has them, and what they come to in float64: far keys un-rotated in pages, near keys rotated
in a ring or in pages, values in pages, requests of different lengths side by side."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import brute
import torch

from foldspec.kernels.multi_read_attention.device import DeviceRead

WINDOW = 24
LONG = 150


@dataclass(frozen=True)
class Case:
    """``lengths`` of the contexts, block rows, query heads a kv head, head size, and how it all lies in memory."""

    lengths: tuple[int, ...]
    block: int
    group: int
    width: int
    alpha: float = 2.0
    kv: int = 1
    page: int = 16
    ring: bool = True
    dtype: torch.dtype = torch.float32
    window: int = WINDOW
    # what a caller could get wrong
    far_shift: int = 0
    far_more: int = 0
    turn: int = 1


def lengths(block: int) -> tuple[int, ...]:
    """Contexts of one entry, around where the far set begins and around where every row has one, and a long one."""
    return 1, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + block - 1, WINDOW + block, LONG


def covering(factors: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few combinations in which any two values of two factors meet."""

    def pairs(one: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(one.items(), 2))

    left = set().union(*(pairs(dict(zip(factors, v, strict=True))) for v in itertools.product(*factors.values())))
    draw, found = random.Random(0), []
    while left:
        tries = [{name: draw.choice(values) for name, values in factors.items()} for _ in range(200)]
        best = max(tries, key=lambda one: len(pairs(one) & left))
        if pairs(best) & left:
            found.append(best)
            left -= pairs(best)
    return found


def turned(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x [n, ..., d] in float64, rotated to the positions [n] (half-split)."""
    half = x.shape[-1] // 2
    angle = at.double()[:, None] * torch.from_numpy(brute.frequencies(x.shape[-1]))
    cos, sin = (f(angle).view(len(x), *[1] * (x.dim() - 2), half) for f in (torch.cos, torch.sin))
    a, b = x.double().split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """FOLD's Eqs. 1 to 4 in float64, by relative distances: out [B, heads, d], and ``log sum exp`` of the near logits
    and of alpha times the far ones [2, B, heads]. q [B, heads, d]; k, v [n + B, kv heads, d], all un-rotated."""
    q, k, v = q.double(), k.double(), v.double()
    block, heads, d = q.shape
    n, reach = len(k) - block, case.window + block
    out, lse = torch.zeros(block, heads, d).double(), torch.full((2, block, heads), -math.inf).double()
    for r in range(block):
        distance = n + r - torch.arange(n + block)
        far = (distance >= reach) & (torch.arange(n + block) < n)
        met = distance.where(~far, torch.tensor(reach + r))
        own = turned(q[r].expand(n + block, heads, d), met)
        scores = (own * k.repeat_interleave(case.group, 1)).sum(-1) / math.sqrt(d)
        values = v.repeat_interleave(case.group, 1)
        near, old = scores[~far], case.alpha * scores[far]
        lse[0, r], lse[1, r] = near.logsumexp(0), old.logsumexp(0) if len(old) else -math.inf
        weight = torch.stack([lse[0, r], lse[1, r] / case.alpha]).softmax(0)[..., None]
        out[r] = weight[0] * (near.softmax(0)[..., None] * values[~far]).sum(0)
        if len(old):
            out[r] += weight[1] * (old.softmax(0)[..., None] * values[far]).sum(0)
    return out, lse


def made(case: Case) -> tuple[list[DeviceRead], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The two reads of all requests, and what each request should get. Whatever is no entry is NaN, also where tables
    point beyond a context."""
    draw = torch.Generator().manual_seed(case.block + 31 * case.group + case.width)
    block, heads, d, page = case.block, case.group * case.kv, case.width, case.page
    requests, reach = len(case.lengths), case.window + case.block
    ring = reach + block if case.ring else 0
    each = -(-(max(case.lengths) + block) // page) + 1
    count = requests * each + 1  # the last page is nobody's
    pools = {name: torch.full((count * page, case.kv, d), torch.nan, dtype=case.dtype) for name in ("near", "far", "v")}
    if ring:  # with room behind the last ring, for what a mistake may read there
        pools["near"] = torch.full((requests * ring + 2 * LONG, case.kv, d), torch.nan, dtype=case.dtype)
    tables = {name: torch.full((requests, each), count - 1, dtype=torch.int32) for name in pools}
    bounds = torch.zeros(4, requests, block, dtype=torch.int32)
    q = torch.zeros(2, requests, block, heads, d, dtype=case.dtype)
    expected = []
    for i, n in enumerate(case.lengths):
        own = torch.randn(block, heads, d, generator=draw).to(case.dtype)
        k, v = (torch.randn(n + block, case.kv, d, generator=draw).to(case.dtype) for _ in range(2))
        expected.append(wanted(own, k, v, case))
        entry, row = torch.arange(n + block), torch.arange(block)
        slots = {}
        for name, length in (("near", n + block), ("far", n), ("v", n + block)):
            used = -(-length // page)
            tables[name][i, :used] = torch.randperm(each, generator=draw)[:used] * requests + i
            slots[name] = tables[name][i].long()[entry[:length] // page] * page + entry[:length] % page
        first = max(0, n - reach + 1)
        if ring:
            tables["near"][i] = count  # only the first place counts
            tables["near"][i, 0] = i * ring
            slots["near"] = i * ring + entry % ring
        pools["near"][slots["near"][first:]] = turned(k, case.turn * entry)[first:].to(case.dtype)
        pools["far"][slots["far"]] = k[:n]
        pools["v"][slots["v"]] = v
        q[0, i] = turned(own, case.turn * (n + row))
        q[1, i] = turned(own, reach + row + case.far_shift)
        bounds[0, i], bounds[1, i] = (n + row - reach + 1).clamp(min=0), n + block
        bounds[3, i] = (n + row - reach + 1 + case.far_more).clamp(0, n)
    scale = 1 / math.sqrt(d)
    near = DeviceRead(
        q[0], pools["near"], pools["v"], tables["near"], tables["v"], bounds[0], bounds[1], scale, page=page, ring=ring
    )
    far = DeviceRead(
        q[1],
        pools["far"],
        pools["v"],
        tables["far"],
        tables["v"],
        bounds[2],
        bounds[3],
        case.alpha * scale,
        1 / case.alpha,
        page=page,
    )
    return [near, far], expected
