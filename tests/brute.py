"""Attention by loops over single entries, in float64, from the papers' formulas: the oracle of the kernels' tests.

Nothing here is shared with foldspec. Logits come from relative distances (the query is rotated by ``p - j``, the key
never), sets from predicates on (row, entry), masses from plain exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

Seen = Callable[[int, int], bool]  # (row r, entry j or block row m)


class Attended(NamedTuple):
    """``out`` [B, heads, width]; the log masses [B, heads] of the near and the far read; far entries of a row."""

    out: torch.Tensor
    near: torch.Tensor
    far: torch.Tensor
    far_count: list[int]


def frequencies(dim: int, theta: float = 10000.0) -> np.ndarray:
    return theta ** (-np.arange(0, dim, 2) / dim)


def rotate(x: np.ndarray, position: float, inverse: np.ndarray) -> np.ndarray:
    """Half-split rotation of the first ``2 * len(inverse)`` components; the others pass."""
    half = len(inverse)
    a, b = x[:half], x[half : 2 * half]
    cos, sin = np.cos(position * inverse), np.sin(position * inverse)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[2 * half :]])


def fold(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inverse: np.ndarray,
    *,
    near: Seen,
    block: Seen,
    far: Seen = lambda r, j: False,
    far_at: Callable[[int], int] = lambda r: 0,
    alpha: float = 1.0,
) -> Attended:
    """FOLD's attention (Eqs. 1 to 4) of one block.

    ``q`` [B, heads, d] and ``k``, ``v`` [n + B, kv heads, d], un-rotated; context first, then the block. ``near`` and
    ``far`` choose context entries, ``block`` chooses block rows; a far entry is read at distance ``far_at(r)``.
    """
    Q, K, V = (x.double().numpy() for x in (q, k, v))
    rows, heads, d = Q.shape
    n, group = len(K) - rows, heads // K.shape[1]
    out = np.zeros((rows, heads, V.shape[-1]))
    masses = np.full((2, rows, heads), -math.inf)
    counts = []
    for r in range(rows):
        close = [j for j in range(n) if near(r, j)] + [n + m for m in range(rows) if block(r, m)]
        old = [j for j in range(n) if far(r, j)]
        counts.append(len(old))
        for h in range(heads):
            g = h // group
            s = [rotate(Q[r, h], n + r - j, inverse) @ K[j, g] / math.sqrt(d) for j in close]
            t = [rotate(Q[r, h], far_at(r), inverse) @ K[j, g] / math.sqrt(d) for j in old]
            top = max(s + t)  # one constant off all logits changes nothing but the range of exp
            zn = sum(math.exp(x - top) for x in s)
            on = sum(math.exp(x - top) * V[j, g] for x, j in zip(s, close, strict=True)) / zn
            masses[0, r, h] = math.log(zn) + top
            zf, of = 0.0, np.zeros_like(on)
            if old:
                peak = max(t)
                sharp = [math.exp(alpha * (x - peak)) for x in t]
                zf = sum(sharp) ** (1 / alpha) * math.exp(peak - top)
                of = sum(e * V[j, g] for e, j in zip(sharp, old, strict=True)) / sum(sharp)
                masses[1, r, h] = math.log(sum(sharp)) / alpha + peak
            out[r, h] = (zn * on + zf * of) / (zn + zf)
    return Attended(torch.from_numpy(out), torch.from_numpy(masses[0]), torch.from_numpy(masses[1]), counts)


def layer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inverse: np.ndarray,
    own: int | None,
    causal: bool,
    context: str,
    window: int,
    *,
    alpha: float = 2.0,
    coverage: str = "all",
    far_boundary: str = "D",
) -> Attended:
    """One drafter layer under a context method, from the table of masks (drafters' specification, 4.4) and the methods'
    definitions. ``own`` is the layer's native window, ``causal`` its order inside the block."""
    n, reach = len(k) - len(q), window + len(q)

    def context_seen(r: int, j: int) -> bool:
        distance = n + r - j
        if own is not None:
            return distance < own
        return distance < reach if context != "full" else True

    def block_seen(r: int, m: int) -> bool:
        if causal and m > r:
            return False
        return own is None or abs(r - m) < own

    folds = context == "fold" and (own is None or coverage == "all")
    far_from = own if own is not None and far_boundary == "complement" else max(reach, own or 0)
    return fold(
        q,
        k,
        v,
        inverse,
        near=context_seen,
        block=block_seen,
        far=lambda r, j: folds and n + r - j >= far_from,
        far_at=lambda r: max(reach, own or 0) + r,
        alpha=alpha,
    )
