"""Offline acceptance, tau_fs: every method drafts at every position of one stored greedy text, from the same states.

Live decoding shows each method other anchors, since a better draft skips some. Here the target runs once over its own
continuation, and a drafter is asked at each position for what would follow; nothing depends on what it said before.
(FOLD, appendix A: 1 + leading drafts that equal the stored text, mean over positions.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter, NoDrafter
from foldspec.engine import Engine
from foldspec.models.base import ForwardPlan
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.resources import Prefix

__all__ = ["leading", "leading_drafts", "tau_fs"]

AT_EVERY_POSITION: dict[str, Any] = {"cmr_period": 1, "infllm_repr": 0}


def tau_fs(leading: Sequence[int]) -> float:
    """One request's tau_fs from its leading drafts by position."""
    return 1 + sum(leading) / len(leading)


def leading(drafts: Sequence[int], text: Sequence[int]) -> int:
    """How many drafts are right before the first that is not."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(drafts, text, strict=False))))


def leading_drafts(
    engine: Engine, prefix: Prefix, text: Sequence[int], methods: Sequence[MethodOptions]
) -> list[list[int]]:
    """For each method, the leading right drafts at each anchor of ``text``, the target's greedy continuation of the
    prefix. Anchors are the tokens after which the longest drafts of any of the methods can be judged whole: the same
    for all, so that they can be compared pair by pair.

    Each method drafts as many tokens as its ``draft_tokens`` says, or its drafter's most. No state depends on what was
    drafted before: a selection is made anew at every position, and means stand for blocks (``AT_EVERY_POSITION``);
    where nothing is judged, nothing is learnt, and ``fold_auto`` stays with its first sharpness.
    """
    resources = engine.resources
    request = resources.new_id()
    drafters = [
        resources.drafter(replace(method, **AT_EVERY_POSITION, auto_alphas=method.auto_alphas[:1]), request)
        for method in methods
    ]
    counts = [
        drafter.max_drafts if method.draft_tokens is None else min(method.draft_tokens, drafter.max_drafts)
        for method, drafter in zip(methods, drafters, strict=True)
    ]
    anchors = len(text) - max(counts, default=0)
    if anchors < 1:
        return [[] for _ in methods]
    wanted = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))
    with resources.opened(request, NoDrafter(), prefix):
        pieces = []
        for begin in range(0, len(text) - 1, resources.chunk):  # a cache takes no longer passes
            piece = text[begin : min(begin + resources.chunk, len(text) - 1)]
            rows = Rows.of([request], [len(prefix.token_ids) + begin], [len(piece)])
            ids = torch.tensor(piece, device=resources.device)
            with torch.inference_mode():
                pieces.append(resources.found.model(ids, ForwardPlan(rows, wanted, ()), resources.cache).taps)
        states = {tap: torch.cat(own) for tap, own in zip(wanted, zip(*pieces, strict=True), strict=True)}
        return [
            _walk(resources.new_id(), prefix, text, drafter, states, anchors, count)
            for drafter, count in zip(drafters, counts, strict=True)
        ]


def _walk(
    request: int,
    prefix: Prefix,
    text: Sequence[int],
    drafter: Drafter,
    states: dict[int, torch.Tensor],
    anchors: int,
    count: int,
) -> list[int]:
    found = []
    try:
        drafter.fork(prefix.request, request, prefix.token_ids, len(prefix.token_ids) + len(text))
        with torch.inference_mode():
            for i in range(anchors):
                place = Rows.of([request], [len(prefix.token_ids) + i], [1])
                drafts = drafter.propose(place, [text[i]], [count], [Noise(0)])[0].tokens
                drafter.truncate(request, place.starts[0])
                found.append(leading(drafts, text[i + 1 :]))
                drafter.absorb(place, text[i : i + 1], [states[tap][i : i + 1] for tap in drafter.taps])
    finally:
        drafter.close(request)
    return found
