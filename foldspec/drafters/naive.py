"""Drafts that look at no model: floors for what a trained drafter is worth.

``repeat`` proposes the last token again and again; ``unigram`` the token that has come most often in the request so far
(of equally common ones the one that came first), whatever stands before. Both propose point masses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter
from foldspec.noise import Noise
from foldspec.records import PointMass, Proposal

__all__ = ["Repeat", "Unigram"]

DRAFTS = 7  # as prompt lookup: with the anchor, a verified block of eight rows


class Repeat(Drafter):
    def __init__(self, drafts: int = DRAFTS) -> None:
        self.max_drafts = drafts
        self._ids: dict[int, list[int]] = {}

    def open(self, request: int, longest: int | None = None) -> None:
        assert request not in self._ids, "the request is open already"
        self._ids[request] = []

    def open_prefix(self, request: int) -> None:
        self.open(request)

    def fork(self, prefix: int, request: int, tokens: Sequence[int], longest: int | None = None) -> None:
        self.open(request)
        self._ids[request] += tokens

    def close(self, request: int) -> None:
        self._ids.pop(request, None)

    def truncate(self, request: int, length: int) -> None:
        del self._ids[request][length:]

    def held(self, request: int) -> int:
        return len(self._ids[request])

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        for request, start, packed in rows:
            assert start == self.held(request), "entries are absorbed in order"
            self._ids[request] += tokens[packed]

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        return [
            PointMass((self._next([*self._ids[request], token]),) * max(0, min(budget, self.max_drafts)))
            for request, token, budget in zip(anchors.requests, tokens, budgets, strict=True)
        ]

    def _next(self, ids: Sequence[int]) -> int:
        """What is proposed after all that is committed, the anchor included."""
        return ids[-1]


class Unigram(Repeat):
    def _next(self, ids: Sequence[int]) -> int:
        return Counter(ids).most_common(1)[0][0]
