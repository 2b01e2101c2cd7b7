"""Temperature, top-k, top-p and min-p of many rows at once, as two numbers a row.

What a row keeps is always the first of its ids in falling order of scaled logits, equal ones in the order of ids. So
the least logit that is kept, and the last id that is kept of those that equal it, say all (``laws.law_of``).
"""

from __future__ import annotations

import math

import torch

__all__ = ["cuts"]


def cuts(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``floor`` [N] fp32 and ``last`` [N] int64 of :class:`Blocks`. ``logits`` [N, V]; the others [N], ``top_k`` int64,
    the rest float64, as in :class:`SamplingParams`. At temperature 0 all is kept. Looks at nothing on the host."""
    size = logits.shape[-1]
    warm = temperature > 0
    x = logits.double()
    x = (x - x.amax(-1, keepdim=True)) / torch.where(warm, temperature, 1.0)[:, None]
    falling, ids = x.float().sort(dim=-1, descending=True, stable=True)
    kept = torch.where(top_k > 0, top_k.clamp(max=size), size)
    place = torch.arange(size, device=logits.device)
    values = torch.where(place < kept[:, None], falling.double(), -math.inf)
    mass = (values - values.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
    likely = ((place < kept[:, None]) & (mass < top_p[:, None])).sum(-1) + 1
    kept = torch.where(top_p < 1, torch.minimum(kept, likely), kept)
    kept = torch.minimum(kept, (falling >= min_p.log().float()[:, None]).sum(-1))
    end = (kept - 1).clamp(min=0)[:, None]
    floor, last = falling.gather(-1, end)[:, 0], ids.gather(-1, end)[:, 0]
    return torch.where(warm, floor, -math.inf), torch.where(warm, last, size)
