"""Attention by loops over single entries, in float64, from the papers' formulas: the oracle of the kernels' tests.

Nothing here is shared with foldspec. Logits come from relative distances (the query is rotated by ``p - j``, the key
never), sets from predicates on (row, entry), masses from plain exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


def one_softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inverse: np.ndarray,
    distance: Callable[[int, int], float | None],
    *,
    scale: Callable[[int], float] = lambda r: 1.0,
    gain: float = 1.0,
) -> torch.Tensor:
    """[B, heads, width]. Row ``r`` meets entry ``j`` of ``k`` [n + B, ...] at ``distance(r, j)``, or not at all (None);
    ``gain`` multiplies what is rotated, of queries and keys."""
    Q, K, V = (x.double().numpy() for x in (q, k, v))
    out = np.zeros((*Q.shape[:2], V.shape[-1]))
    for r in range(len(Q)):
        met = [(j, far) for j in range(len(K)) if (far := distance(r, j)) is not None]
        for h in range(Q.shape[1]):
            g = h * K.shape[1] // Q.shape[1]
            s = [scale(r) * _scored(Q[r, h], K[j, g], far, inverse, gain) for j, far in met]
            weights = np.exp(np.array(s) - max(s))
            out[r, h] = weights @ np.array([V[j, g] for j, _ in met]) / weights.sum()
    return torch.from_numpy(out)


def _scored(q: np.ndarray, k: np.ndarray, far: float, inverse: np.ndarray, gain: float) -> float:
    turned = 2 * len(inverse)
    x = rotate(q, far, inverse)
    return float(gain**2 * (x[:turned] @ k[:turned]) + x[turned:] @ k[turned:]) / math.sqrt(len(q))


def distances(
    name: str, n: int, block: int, own: int | None, causal: bool, options: dict[str, Any]
) -> Callable[[int, int], float | None]:
    """At which distance row ``r`` of a layer meets entry ``j`` under a context method: the methods' definitions, of
    those that make one softmax and choose by position alone. ``own`` is the layer's native window, ``causal`` its
    order inside the block. An ``infllm`` here reads all its blocks, a ``cmr`` its last chunks."""
    reach = options.get("window", 0) + block
    covered = own is None or options.get("coverage", "full" if name in ("streaming", "infllm") else "all") == "all"

    def native(d: int) -> float | None:
        return d if own is None or d < own else None

    def to_block(r: int, m: int) -> float | None:
        if causal and m > r:
            return None
        return r - m if own is None or abs(r - m) < own or (name == "cmr" and covered) else None

    def to_entry(r: int, j: int) -> float | None:
        d = n + r - j
        if name == "shared_window":
            return native(d) if j >= n - options["draft_window"] else None
        if name == "window":
            return native(d) if d < max(reach, own or 0) else None
        if not covered or name in ("full", "yarn"):
            return native(d)
        if name == "rerope":
            return d if d < (own or reach) else reach
        if name == "infllm":
            return (native(d) if d < reach else reach - 1) if own is None else (d if d < own else None)
        if name == "streaming":
            out = max(0, n - options["sinks"] - options["recents"])
            if out and j < options["sinks"]:
                return d - out
            return native(d) if not out or j >= n - options["recents"] else None
        assert name == "cmr"
        kept = _last_chunks(n, options["cmr_chunk"], options["cmr_topk"])
        return len(kept) + r - kept.index(j) if j in kept else None

    return lambda r, j: to_block(r, j - n) if j >= n else to_entry(r, j)


def _last_chunks(n: int, chunk: int, count: int) -> Sequence[int]:
    chunks = [range(a, min(n, a + chunk)) for a in range(0, n, chunk)]
    return [j for entries in chunks[-count:] for j in entries]
