"""Multi-read attention in half precision, rounded where transformers' eager attention rounds: scores and probabilities
are held in the dtype of q. The other implementations keep both in fp32, which is closer to the definition; this one is
for the same bits as there, and runs only when it is asked for (``--kernels eager``). Copies K and V freely.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foldspec.kernels.multi_read_attention import Facts, Output, ReadArgs
from foldspec.kernels.multi_read_attention.reference import bounds, gather, merge


def supports(facts: Facts) -> str | None:
    half = facts.dtype in (torch.bfloat16, torch.float16)
    return None if half else f"is the reference in {str(facts.dtype).removeprefix('torch.')}: for half precision alone"


def multi_read_attention(batch: Sequence[Sequence[ReadArgs]]) -> list[Output]:
    return [merge(reads, [_attend(read) for read in reads]) for reads in batch]


def _attend(read: ReadArgs) -> tuple[torch.Tensor, torch.Tensor]:
    q = read.q.transpose(0, 1)
    keys, values = (gather(e, q.shape[0], q.dtype) for e in (read.keys, read.values))
    seen = bounds(read, keys.shape[1])
    values = values.masked_fill(~seen.any(0)[:, None], 0.0)
    scores = ((q @ keys.transpose(1, 2)) * read.scale).masked_fill(~seen, -torch.inf).float()
    probabilities = scores.softmax(-1).masked_fill(~seen.any(-1)[:, None], 0.0).to(q.dtype)
    return (probabilities @ values).float(), scores.logsumexp(-1)
