"""Prefill: a prompt through the target in chunks, the drafter taking in each chunk's taps at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter
from foldspec.models.base import ForwardPlan, LanguageModel
from foldspec.schedule.trace import Mark, unmarked

__all__ = ["prefill"]


@torch.inference_mode()
def prefill(
    request: int,
    prompt: Sequence[int],
    *,
    model: LanguageModel,
    cache: PagedCache,
    drafter: Drafter,
    chunk: int,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    mark: Mark = unmarked,
) -> torch.Tensor:
    """Store the whole prompt of an open request; return the logits [1, vocabulary] of its last token.

    ``progress(done, total)`` is called after each chunk, in tokens. An exception it raises ends the prefill. ``mark``
    hears of the end of each part (``schedule/trace.py``).
    """
    logits = torch.empty(0)  # a prompt is never empty, so the last chunk replaces this
    for start in range(0, len(prompt), chunk):
        tokens = prompt[start : start + chunk]
        ids = torch.tensor(tokens, device=device)
        rows = Rows.of([request], [start], [len(ids)])
        last = start + len(ids) == len(prompt)
        output = model(ids, ForwardPlan(rows, drafter.taps, (len(ids) - 1,) if last else ()), cache)
        mark("verify")
        drafter.absorb(rows, tokens, output.taps)
        mark("draft")
        logits = output.logits
        if progress is not None:
            progress(start + len(ids), len(prompt))
    return logits
