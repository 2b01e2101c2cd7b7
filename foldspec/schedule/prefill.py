"""Prefill: a prompt through the target in chunks, the drafter taking in each chunk's taps at once. Or, where weights
are dummies, a past that is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter
from foldspec.made_up import Numbers
from foldspec.models.base import ForwardPlan, LanguageModel
from foldspec.schedule.trace import Mark, unmarked

__all__ = ["fill", "prefill"]

PIECE = 2048  # rows that are made up at a time


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
    first: int = 0,
    progress: Callable[[int, int], None] | None = None,
    mark: Mark = unmarked,
) -> torch.Tensor:
    """Store the prompt of an open request, of which the caches hold ``first`` tokens; return the logits [1, vocabulary]
    of its last one.

    ``progress(done, total)`` is called after each chunk, in tokens. An exception it raises ends the prefill. ``mark``
    hears of the end of each part (``schedule/trace.py``).
    """
    logits = torch.empty(0)  # a prompt is never empty, so the last chunk replaces this
    for start in range(first, len(prompt), chunk):
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


@torch.inference_mode()
def fill(request: int, tokens: Sequence[int], *, cache: PagedCache, drafter: Drafter, numbers: Numbers) -> None:
    """Give an open request that holds nothing a made-up past of these tokens, in every cache. Raises
    :class:`ResourceError`."""
    cache.fill(request, len(tokens), numbers)
    for start in range(0, len(tokens), PIECE):
        piece = tokens[start : start + PIECE]
        drafter.fill(Rows.of([request], [start], [len(piece)]), piece, numbers)
