"""The cross-entropy under a large frozen head, with its gradient taken at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["HeadLoss"]


class HeadLoss(torch.autograd.Function):
    """Sum [] of the cross-entropies of rows x [n, width] under ``head`` [V, width]: of the first m rows against the
    laws that the teacher's rows [m, width] have under the same head, of the others against their ``ids`` [n].

    Logits, laws and slopes are held in the head's dtype, and none is kept for the backward pass: with a large
    vocabulary they are what a step takes most memory for.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor) -> Any:
        soft = len(teacher)
        logits = F.linear(x.to(head.dtype), head)
        q = logits.softmax(-1)
        best, row = q.argmax(-1), torch.arange(len(ids), device=x.device)
        # the log of each normaliser, from the entry that is least rounded
        value = (logits[row, best].float() - q[row, best].float().log()).sum()
        value -= logits[row[soft:], ids[soft:]].float().sum()
        q[row[soft:], ids[soft:]] -= 1.0
        if soft:
            p = F.linear(teacher.to(head.dtype), head).softmax(-1)
            value -= torch.linalg.vecdot(p, logits[:soft]).float().sum()
            q[:soft] -= p
        ctx.save_for_backward((q @ head).to(x.dtype))
        return value

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        (slope,) = ctx.saved_tensors
        return slopes[0] * slope, None, None, None
