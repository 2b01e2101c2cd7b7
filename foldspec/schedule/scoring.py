"""How likely a given text is to the target: by its own raw logits, whoever wrote the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.models.base import ForwardPlan, LanguageModel

__all__ = ["TextScore", "score"]

PIECE = 128  # tokens whose logits over the vocabulary are held at a time


@dataclass(frozen=True)
class TextScore:
    """One entry a token: its log-probability in nats, and whether it is the target's argmax (of equal
    logits, one)."""

    logprobs: tuple[float, ...]
    greedy: tuple[bool, ...]


@torch.inference_mode()
def score(
    request: int, tokens: Sequence[int], logits: torch.Tensor, model: LanguageModel, cache: PagedCache
) -> TextScore:
    """``tokens`` after what an open request holds, whose last token had ``logits`` [1, vocabulary]. All but the last of
    them are stored. Log-probabilities are of raw logits, whatever the text was drawn by, with sums in float32."""
    first = cache.tables.length(request)
    logprobs: list[float] = []
    greedy: list[bool] = []
    for start in range(0, len(tokens), PIECE):
        piece = torch.tensor(tokens[start : start + PIECE], device=logits.device)
        stored = piece[: len(tokens) - 1 - start]  # nothing asks what comes after the last
        if len(stored):
            rows = Rows.of([request], [first + start], [len(stored)])
            logits = torch.cat([logits, model(stored, ForwardPlan(rows), cache).logits])
        laws = torch.log_softmax(logits[: len(piece)].float(), dim=-1)
        logprobs += laws.gather(1, piece[:, None])[:, 0].tolist()
        greedy += (laws.argmax(dim=-1) == piece).tolist()
        logits = logits[-1:]
    return TextScore(tuple(logprobs), tuple(greedy))
