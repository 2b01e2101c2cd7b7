"""Log-probabilities of committed tokens, from the target's raw logits at each token's own position."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foldspec.records import TokenLogprobs

__all__ = ["logprobs_of"]


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], top: int | None) -> list[TokenLogprobs]:
    """One entry a token, with the ``top`` most likely ids of its row; nothing, at no cost, where ``top`` is None.

    ``logits`` [at least len(tokens), vocabulary], of any float dtype: row ``i`` is what the target said when it judged
    token ``i``, before anything was done to it. Sums in float32.
    """
    if top is None or not tokens:
        return []
    rows = torch.log_softmax(logits[: len(tokens)].float(), dim=-1)
    chosen = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
    return [TokenLogprobs(own, _top(row, top)) for own, row in zip(chosen, rows, strict=True)]


def _top(row: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The most likely possible ids of a row [vocabulary], with their logprobs; of equal ones the lowest ids."""
    if count == 0:
        return ()
    least = row.topk(count).values[-1]
    ids = ((row >= least) & row.isfinite()).nonzero()[:, 0]  # more than asked for where some are as likely as the last
    ranked = zip(ids.tolist(), row[ids].tolist(), strict=True)
    return tuple(sorted(ranked, key=lambda pair: (-pair[1], pair[0]))[:count])
