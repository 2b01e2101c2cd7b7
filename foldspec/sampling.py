"""From logits to tokens. Decoding is greedy: the law of a row is a point mass on its argmax."""

from __future__ import annotations

import torch

__all__ = ["greedy"]


def greedy(logits: torch.Tensor) -> list[int]:
    """logits [n, vocabulary] -> n ids; of equal logits the lowest id."""
    return torch.argmax(logits, dim=-1).tolist() if len(logits) else []
