"""Definition of multi-read attention: dense scores and masks, accumulation in fp32 or better. Copies K and V freely."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foldspec.kernels.multi_read_attention import Entries, Facts, Output, ReadArgs


def supports(facts: Facts) -> str | None:
    return None


def gather(entries: Entries, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[heads, entries, width]: the entries in order, each kv head repeated for the query heads that share it."""
    dense = torch.cat([entries.data[slot : slot + count] for slot, count in entries.runs] or [entries.data[:0]])
    dense = dense.transpose(0, 1).to(dtype)
    return dense.repeat_interleave(heads // dense.shape[0], dim=0)


def bounds(read: ReadArgs, entries: int) -> torch.Tensor:
    """[rows, entries]: which entries a row sees."""
    column = torch.arange(entries, device=read.q.device)
    first, last = (torch.tensor(b, device=read.q.device)[:, None] for b in (read.first, read.last))
    return (column >= first) & (column < last)


def merge(reads: Sequence[ReadArgs], parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Output:
    """Each read's softmax averages [heads, rows, width] and log masses [heads, rows], by mass ** exponent."""
    lse = torch.stack([mass for _, mass in parts])
    exponent = torch.tensor([read.exponent for read in reads], dtype=lse.dtype, device=lse.device)
    weight = (exponent[:, None, None] * lse).softmax(0).nan_to_num(0.0)
    out = (weight[..., None] * torch.stack([o for o, _ in parts])).sum(0)
    return Output(out.transpose(0, 1).to(reads[0].q.dtype), lse.transpose(1, 2))


def multi_read_attention(batch: Sequence[Sequence[ReadArgs]]) -> list[Output]:
    return [merge(reads, [_attend(read) for read in reads]) for reads in batch]


def _attend(read: ReadArgs) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(read.q.dtype, torch.float32)
    q = read.q.to(wide).transpose(0, 1)
    keys, values = (gather(e, q.shape[0], wide) for e in (read.keys, read.values))
    seen = bounds(read, keys.shape[1])
    # what no row sees may hold anything, NaN too, and 0 * NaN must not survive
    values = values.masked_fill(~seen.any(0)[:, None], 0.0)
    scores = (read.scale * (q @ keys.transpose(1, 2))).masked_fill(~seen, -torch.inf)
    # a row that sees nothing has softmax NaN; its weight in the merge is 0
    out = scores.softmax(-1).masked_fill(~seen.any(-1)[:, None], 0.0) @ values
    return out, scores.logsumexp(-1)
