"""Language models as drafters: a network of its own with a cache of its own, which needs nothing of the target but the
ids that were committed.

What such a drafter stores while it drafts may lie in its cache until :meth:`LanguageDrafter.truncate`, which takes it
back. Each entry's id is kept beside it, so that :meth:`LanguageDrafter.absorb` feeds exactly what is missing: drafts
that stand and were stored are not computed again, and nothing else survives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import ClassVar

import torch

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter, DrafterNetwork, Footprint, Host, Room
from foldspec.made_up import Numbers
from foldspec.models.base import ForwardPlan, LanguageModel
from foldspec.options import MethodOptions
from foldspec.records import DrafterFacts

__all__ = ["LanguageDrafter", "LanguageNetwork"]

PADDING = 1024  # rows by which tables of one vocabulary may differ: they are padded to round sizes


class LanguageNetwork(DrafterNetwork):
    """A drafter that is a ``language`` model. ``where`` names its checkpoint in errors; ``mask_id``, where it has one,
    must be an id of the target's as well."""

    verdict: ClassVar[str] = "the drafter's vocabulary is the target's"
    reads_context: ClassVar[bool] = False
    no_effort: str = "the drafter decodes one token after another: --draft-tokens says how many"

    def __init__(self, language: LanguageModel, where: str, mask_id: int | None = None) -> None:
        super().__init__()
        self.language = language
        self.facts = DrafterFacts(where, None, language.vocabulary, (), None, mask_id, padding=PADDING)

    def parameter_name(self, tensor: str) -> str | None:
        own = self.language.parameter_name(tensor)
        return None if own is None else f"language.{own}"

    def rows(self, method: MethodOptions) -> int:
        return (method.draft_tokens or 0) + 1

    def footprint(self, method: MethodOptions, dtype: torch.dtype, room: Room) -> Footprint:
        spec = self.language.cache_spec(dtype)
        rings = (room.requests + 1) * spec.bytes_per_request(room.longest_pass, room.longest)
        marks = replace(spec, pools=spec.recurrent).bytes_per_request(room.longest_pass, room.longest)
        return Footprint(spec.bytes_per_entry, rings + room.requests * marks, 0)

    def caches(self, dtype: torch.dtype, room: Room, pages: int, device: torch.device) -> PagedCache:
        return PagedCache(
            self.language.cache_spec(dtype),
            pages=pages,
            page_size=room.page_size,
            requests=room.requests + 1,  # and a kept prompt
            marks=room.requests,
            longest_pass=room.longest_pass,
            longest=room.longest,
            device=device,
        )

    def check(self, target: LanguageModel) -> None:
        pass


class LanguageDrafter(Drafter):
    """A language model at work in its own cache. ``max_drafts``: tokens of a draft."""

    def __init__(self, model: LanguageModel, cache: PagedCache, host: Host, max_drafts: int) -> None:
        self.model, self.cache, self.max_drafts = model, cache, max_drafts
        # ids that both tables have, for its laws: what only the larger of two has is padding
        self.vocabulary = min(model.vocabulary, host.model.vocabulary)
        self._device = model.head_weight.device
        whole = self.vocabulary == host.model.vocabulary
        self.support = None if whole else torch.arange(self.vocabulary, device=self._device)
        self._ids: dict[int, list[int]] = {}

    # ------------------------------------------------------------------------------------------- a request's life

    def open(self, request: int, longest: int | None = None) -> None:
        self.cache.open(request)
        self._ids[request] = []

    def open_prefix(self, request: int) -> None:
        self.open(request)

    def fork(self, prefix: int, request: int, tokens: Sequence[int], longest: int | None = None) -> None:
        self.cache.fork(prefix, request)
        self._ids[request] = list(tokens)

    def close(self, request: int) -> None:
        self.cache.close(request)
        self._ids.pop(request, None)

    def reserve(self, request: int, entries: int) -> None:
        self.cache.reserve(request, entries + self.max_drafts)

    def truncate(self, request: int, length: int) -> None:
        if length < self.held(request):
            self.cache.truncate(request, length)
            del self._ids[request][length:]

    def held(self, request: int) -> int:
        return len(self._ids[request])

    # -------------------------------------------------------------------------------------------------- committed

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        lacking = self.lacking(rows, tokens)
        if lacking:
            requests, starts, pieces = zip(*lacking, strict=True)
            ids = [token for piece in pieces for token in piece]
            self.run(Rows.of(requests, starts, [len(piece) for piece in pieces]), ids, head_rows=())

    def lacking(self, rows: Rows, tokens: Sequence[int]) -> list[tuple[int, int, Sequence[int]]]:
        """(request, start, ids) of what is committed and not held yet. What is held and not committed is truncated."""
        found: list[tuple[int, int, Sequence[int]]] = []
        for request, start, packed in rows:
            own, held = tokens[packed], self._ids[request]
            assert start <= len(held), "entries are absorbed in order"
            pairs = zip(held[start:], own, strict=False)
            known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.truncate(request, start + known)
            if known < len(own):
                found.append((request, start + known, own[known:]))
        return found

    def fill(self, rows: Rows, tokens: Sequence[int], numbers: Numbers) -> None:
        for request, start, packed in rows:
            assert start == self.held(request), "entries are made up in order"
            self.cache.fill(request, start + packed.stop - packed.start, numbers)
            self._ids[request] += tokens[packed]

    # ----------------------------------------------------------------------------------------------- for its kinds

    @contextmanager
    def drafting(self, requests: Sequence[int]) -> Iterator[None]:
        """Around the forwards of a proposal. A model with states, which cannot be cut at a row later, holds afterwards
        what it held before; of another, :meth:`truncate` takes back what does not stand."""
        if not self.cache.spec.recurrent:
            yield
            return
        held = {request: self.held(request) for request in requests}
        for request in held:
            self.cache.mark(request)
        yield
        for request, length in held.items():
            self.cache.rewind(request, length)
            del self._ids[request][length:]

    def run(self, rows: Rows, tokens: Sequence[int], head_rows: tuple[int, ...] | None = None) -> torch.Tensor:
        """One forward over rows that follow what the cache holds, and which it then holds too; ``tokens`` [total] are
        their ids. Logits [head rows, the drafter's ids]."""
        known = self.model.vocabulary - 1  # an id that the drafter's table lacks, padding of the target's, is its last
        ids = torch.tensor([min(token, known) for token in tokens], device=self._device)
        logits = self.model(ids, ForwardPlan(rows, (), head_rows), self.cache).logits
        for request, _, packed in rows:
            self._ids[request] += tokens[packed]
        return logits

    def pass_bytes(self, n: int) -> int:
        """Bytes that one forward after ``n`` entries reads."""
        return self.model.bytes_read + self.cache.spec.bytes_read(n)
