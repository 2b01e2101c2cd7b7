"""Prompt lookup: copy what followed the last time that the text ended like this. No weights, no taps.

The rule of prompt lookup decoding (A. Saxena, 2023), the model-free baseline of the papers: the longest n-gram at the
end of what is committed, of ``LONGEST`` tokens down to one, that has occurred before; the drafts are the tokens after
its most recent earlier occurrence that has as many after it as a round can verify. Where none has (drafts end where the
text ends), the earliest occurrence has most. Without that, a text going round in short circles would be drafted one
circle at a time, and the baseline would be weaker than those of other engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter
from foldspec.noise import Noise
from foldspec.records import PointMass, Proposal

__all__ = ["PromptLookup"]

LONGEST = 3  # tokens of the longest n-gram looked up, as in the first implementation
DRAFTS = 7  # with the anchor, a verified block of eight rows

Gram = tuple[int, ...]


class _Index:
    """The committed ids of a request, and where each n-gram of them ends last.

    ``_before[j]`` keeps, for each n-gram that ends at ``j``, the end that it displaced, so that entries can be taken
    away again one by one and leave nothing behind.
    """

    def __init__(self, longest: int) -> None:
        self.ids: list[int] = []
        self._longest = longest
        self._last: dict[Gram, int] = {}
        self._before: list[tuple[int | None, ...]] = []

    def _grams(self, end: int) -> list[Gram]:
        """The n-grams that end at position ``end``, the shortest first."""
        return [tuple(self.ids[end + 1 - n : end + 1]) for n in range(1, min(self._longest, end + 1) + 1)]

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.ids)
            self.ids.append(token)
            grams = self._grams(end)
            self._before.append(tuple(self._last.get(gram) for gram in grams))
            for gram in grams:
                self._last[gram] = end

    def truncate(self, length: int) -> None:
        while len(self.ids) > length:
            end = len(self.ids) - 1
            for gram, before in zip(self._grams(end), self._before.pop(), strict=True):
                if before is None:
                    del self._last[gram]
                else:
                    self._last[gram] = before
            self.ids.pop()

    def after(self, anchor: int, count: int) -> Gram:
        """At most ``count`` tokens that followed the longest n-gram ending in ``anchor`` when it occurred before."""
        recent = self.ids[max(0, len(self.ids) + 1 - self._longest) :]
        for skip in range(len(recent) + 1):
            end = self._last.get((*recent[skip:], anchor))
            if end is not None:
                while len(self.ids) - end < count:
                    before = self._before[end][len(recent) - skip]
                    if before is None:
                        break
                    end = before
                following = self.ids[end + 1 : end + 1 + count]
                return tuple(following) if len(following) == count else (*following, anchor)
        return ()


class PromptLookup(Drafter):
    """Proposes ``drafts`` tokens a round at most, none where nothing at the end of the text has occurred before."""

    def __init__(self, drafts: int = DRAFTS, longest: int = LONGEST) -> None:
        self.max_drafts = drafts
        self._longest = longest
        self._indexes: dict[int, _Index] = {}

    def open(self, request: int, longest: int | None = None) -> None:
        assert request not in self._indexes, "the request is open already"
        self._indexes[request] = _Index(self._longest)

    def open_prefix(self, request: int) -> None:
        self.open(request)

    def fork(self, prefix: int, request: int, tokens: Sequence[int], longest: int | None = None) -> None:
        self.open(request)
        self._indexes[request].append(tokens)

    def close(self, request: int) -> None:
        self._indexes.pop(request, None)

    def truncate(self, request: int, length: int) -> None:
        self._indexes[request].truncate(length)

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        for request, start, packed in rows:
            index = self._indexes[request]
            assert start == len(index.ids), "entries are absorbed in order"
            index.append(tokens[packed])

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        proposals: list[Proposal] = []
        for (request, start, _), token, budget in zip(anchors, tokens, budgets, strict=True):
            index = self._indexes[request]
            assert start == len(index.ids), "a draft follows what is committed"
            proposals.append(PointMass(index.after(token, budget) if budget > 0 else ()))
        return proposals
