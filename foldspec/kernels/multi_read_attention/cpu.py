"""Multi-read attention on a CPU: torch's flash operator over views of the cache, then one merge by log-sum-exp.

Query heads that share a kv head are packed into rows, so that K and V are read once for all of them. Where the rows of
a block see different entries, only the few columns in which they differ get a mask; the bulk is read without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from foldspec.kernels.multi_read_attention import Entries, Facts, Output, ReadArgs


def supports(facts: Facts) -> str | None:
    if facts.device != "cpu":
        return f"runs on a CPU, not on {facts.device}"
    if facts.key_width != facts.value_width:
        return f"needs keys and values of one width, not {facts.key_width} and {facts.value_width}"
    # A private operator: a torch release may take it away, and then the reference still serves.
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return "this torch has no CPU flash attention"
    return None


def multi_read_attention(batch: Sequence[Sequence[ReadArgs]]) -> list[Output]:
    return [_one(reads) for reads in batch]


def _one(reads: Sequence[ReadArgs]) -> Output:
    rows, heads, _ = reads[0].q.shape
    kv_heads = reads[0].keys.data.shape[1]
    group = heads // kv_heads
    parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for read in reads:
        # [rows, heads, d] -> [1, kv heads, rows * group, d]
        q = read.q.reshape(rows, kv_heads, group, -1).transpose(0, 1).reshape(1, kv_heads, rows * group, -1)
        parts.append([_attend(q, read, group, lo, hi) for lo, hi in _columns(read.first, read.last)])
    if len(reads) == 1 and len(parts[0]) == 1:
        o, lse = parts[0][0]
        lse = lse[None]
    else:
        o, lse = _merge(parts, [read.exponent for read in reads], q)
    out = o.reshape(kv_heads, rows, group, -1).transpose(0, 1).reshape(rows, heads, -1)
    return Output(out, lse.reshape(len(reads), kv_heads, rows, group).transpose(1, 2).reshape(len(reads), rows, heads))


def _columns(first: tuple[int, ...], last: tuple[int, ...]) -> list[tuple[int, int]]:
    """Split the columns that any row sees into those all rows see and those where the rows differ."""
    seen: list[tuple[int, int]] = []
    for f, l in sorted((f, l) for f, l in zip(first, last, strict=True) if f < l):
        if seen and f <= seen[-1][1]:
            seen[-1] = seen[-1][0], max(seen[-1][1], l)
        else:
            seen.append((f, l))
    if len(seen) != 1:  # nothing, or rows far apart: what lies between may hold anything
        return seen
    low, high = seen[0]
    inner_low, inner_high = min(max(first), high), max(min(last), low)
    if inner_low >= inner_high:
        return [(low, high)]
    cuts = [(low, inner_low), (inner_low, inner_high), (inner_high, high)]
    return [(lo, hi) for lo, hi in cuts if lo < hi]


def _views(entries: Entries, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """(first column, count, slot) of each run's share of the columns lo .. hi-1."""
    start = 0
    for slot, count in entries.runs:
        a, b = max(lo, start), min(hi, start + count)
        if a < b:
            yield a, b - a, slot + a - start
        start += count


def _attend(q: torch.Tensor, read: ReadArgs, group: int, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [kv heads, rows * group, width] and log-sum-exp [kv heads, rows * group] over the columns lo .. hi-1.

    Keys and values are cut by different runs where keys come from a ring and values from pages.
    """
    found = []
    value_views = list(_views(read.values, lo, hi))
    for column, count, key_slot in _views(read.keys, lo, hi):
        for v_column, v_count, value_slot in value_views:
            a, b = max(column, v_column), min(column + count, v_column + v_count)
            if a < b:
                k = read.keys.data.narrow(0, key_slot + a - column, b - a).transpose(0, 1)[None]
                v = read.values.data.narrow(0, value_slot + a - v_column, b - a).transpose(0, 1)[None]
                found.append(_flash(q, k, v, read, group, a, b))
    if len(found) == 1:
        return found[0]
    o, lse = _merge([found], [1.0], q)
    return o, lse[0]


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, read: ReadArgs, group: int, lo: int, hi: int
) -> tuple[torch.Tensor, torch.Tensor]:
    mask, empty = _mask(
        tuple(max(f - lo, 0) for f in read.first),
        tuple(min(l - lo, hi - lo) for l in read.last),
        hi - lo,
        group,
        q.dtype,
    )
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=read.scale
    )
    o, lse = o[0], lse[0]
    if empty is not None:  # what the operator returns for a fully masked row is no one's promise: repair it by count
        o, lse = o.masked_fill(empty[:, None], 0.0), lse.masked_fill(empty, -torch.inf)
    return o, lse


@lru_cache(maxsize=64)
def _mask(
    first: tuple[int, ...], last: tuple[int, ...], columns: int, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Additive mask [rows * group, columns] and the rows that see nothing; None for either where there is no need.

    Cached because the layers of a forward share it, and because a block's pattern repeats from round to round.
    """
    if max(first) == 0 and min(last) == columns:
        return None, None
    column = torch.arange(columns)
    low, high = (torch.tensor(b).repeat_interleave(group)[:, None] for b in (first, last))
    seen = (column >= low) & (column < high)
    empty = ~seen.any(-1)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf), empty if bool(empty.any()) else None


def _merge(
    parts: list[list[tuple[torch.Tensor, torch.Tensor]]], exponents: list[float], q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the parts of each read by their mass, then the reads by mass ** exponent. Returns o and L [reads, ...]."""
    nothing = q.new_zeros(q.shape[1:3], dtype=torch.promote_types(q.dtype, torch.float32)).fill_(-torch.inf)
    lse = torch.stack([torch.stack([p[1] for p in read]).logsumexp(0) if read else nothing for read in parts])
    z = torch.tensor(exponents, dtype=lse.dtype)[:, None, None] * lse
    total = z.logsumexp(0)
    out = q.new_zeros(q.shape[1:], dtype=lse.dtype)
    for i, read in enumerate(parts):
        for o, part_lse in read:
            # exp(part - L_i) is the part's share of its read, exp(z_i - total) the read's share; both 0 where empty
            share = (part_lse - lse[i]).exp() * (z[i] - total).exp()
            out += o * share.nan_to_num(0.0)[..., None]
    return out.to(q.dtype), lse
