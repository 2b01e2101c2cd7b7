"""Masked diffusion at work: a canvas of masks after the anchor, revealed in some steps (``denoise.py`` says which).

On a grid of blocks (SDAR), whole committed blocks are stored. The block that the anchor stands in is computed anew in
every pass, its free places masked; a draft that is longer goes on in the next block, which reads the one before as
scratch. Dream reads everything both ways: what it knows of a prefix hangs on the canvas. Either all of it is computed
anew in every pass, or, approximately, once a round beside the canvas that is all masks (``prefix_cache``). In both
cases the row before the canvas, the anchor's, is in every pass: it predicts the first draft.

A canvas lives in :meth:`MaskedDiffusion.propose` alone, and the cache is cut back before that returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter, Host
from foldspec.drafters.denoise import Masked
from foldspec.drafters.language import LanguageDrafter, LanguageNetwork
from foldspec.made_up import Numbers
from foldspec.models.base import ForwardPlan, LanguageModel
from foldspec.models.mask import FULL, Mask
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.records import PointMass, Proposal
from foldspec.sampling import DraftSampling

__all__ = ["MaskedDiffusion", "MaskedNetwork"]

MOST = 1024  # rows of a pass, unless one request alone has more


class MaskedNetwork(LanguageNetwork):
    """A language model that reads masks both ways.

    ``mask_id``  what stands where no token is known
    ``shift``    the row of a place is so many before its own
    ``quota``    how many places a step reveals, as :class:`Masked` has it
    """

    shift: ClassVar[int] = 0
    quota: ClassVar[str] = "balanced"
    order: str = "static"
    efforts: frozenset[str] = frozenset({"steps", "confidence", "entropy_bound", "order"})

    def __init__(self, language: LanguageModel, where: str, mask_id: int) -> None:
        super().__init__(language, where, mask_id)
        self.mask_id = mask_id
        self.masks: dict[int, Mask] = {}  # under which the entries of each open request were computed

    def mask(self, method: MethodOptions) -> Mask:
        """Which entries its rows read."""
        return FULL

    def pass_rows(self, method: MethodOptions, longest: int) -> int:
        return min(MOST, longest + self.rows(method))

    def bind(self, host: Host, caches: Any, method: MethodOptions, sampling: DraftSampling) -> Drafter:
        return MaskedDiffusion(self, caches, host, method, sampling)


class _Draft:
    """A request's draft in the making: what is known from position ``start`` on, where the cache ends, and the canvas
    behind it."""

    def __init__(self, drafter: MaskedDiffusion, request: int, token: int, count: int, noise: Noise) -> None:
        self._drafter, self.request, self._noise = drafter, request, noise
        self.start = drafter.stored(request)
        self._known = [*drafter.ids(request, self.start), token]
        self._anchor, self._left = self.start + len(self._known) - 1, count
        self.canvas = self._block(None)

    def _block(self, before: Masked | None) -> Masked:
        """The canvas of the next block: its free places, as many as are asked for."""
        drafter, self._first = self._drafter, self.start + len(self._known)
        self._end = drafter.end(self._first, self._left)
        count = min(self._left, self._end - self._first)
        self._left -= count
        return Masked(
            drafter.effort,
            drafter.sampling,
            self._noise,
            self._anchor,
            count,
            quota=drafter.network.quota,
            block=drafter.block,
            drafts=None if before is None else before.proposal,
        )

    @property
    def rows(self) -> list[int]:
        """The ids of the next pass. A block is whole, as in training: places that no draft is asked for stay masked."""
        mask = self._drafter.network.mask_id
        canvas = [mask if token is None else token for token in self.canvas.canvas]
        return [*self._known, *canvas, *[mask] * (self._end - self._first - len(canvas))]

    @property
    def wanted(self) -> list[int]:
        """The rows whose logits are those of the masked places."""
        first = len(self._known) - self._drafter.network.shift
        return [first + place for place in self.canvas.masked]

    def step(self, logits: torch.Tensor) -> None:
        """After a pass: reveal what the logits [masked places, ids] say."""
        kept = self._drafter.keep(self.request, self._first, self._anchor)
        self._known, self.start = self._known[kept - self.start :], kept
        self.canvas.step(logits)
        if self.canvas.done and self._left:
            self._known += [token for token in self.canvas.canvas if token is not None]
            self.canvas = self._block(self.canvas)


class MaskedDiffusion(LanguageDrafter):
    """``effort``: how many steps a block takes and what they reveal. ``block``: that of the grid, None without one."""

    def __init__(
        self, network: MaskedNetwork, cache: PagedCache, host: Host, method: MethodOptions, sampling: DraftSampling
    ) -> None:
        super().__init__(network.language, cache, host, method.draft_tokens or 0)
        self.network, self.sampling = network, sampling
        self.effort = sampling.effort.filled(network.order)
        self.biased = self.effort.biased(sampling.temperature > 0)
        self._mask = network.mask(method)
        self.block = self._mask.block
        self._once = method.prefix_cache == "approximate"

    # ------------------------------------------------------------------------------------------- a request's life

    def open(self, request: int, longest: int | None = None) -> None:
        super().open(request, longest)
        self.network.masks[request] = self._mask

    def fork(self, prefix: int, request: int, tokens: Sequence[int], longest: int | None = None) -> None:
        if self.network.masks[prefix] == self._mask:
            super().fork(prefix, request, tokens, longest)
            self.network.masks[request] = self._mask
        else:  # what is stored there hangs on another grid
            self.open(request, longest)
            self._ids[request] = list(tokens)
            self._store([request])

    def close(self, request: int) -> None:
        super().close(request)
        self.network.masks.pop(request, None)

    def reserve(self, request: int, entries: int) -> None:
        count = entries + self.max_drafts
        self.cache.reserve(request, self.end(count - 1, 1))

    def truncate(self, request: int, length: int) -> None:
        del self._ids[request][length:]
        self.cache.truncate(request, min(self.stored(request), self._whole(length)))

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        for request, start, packed in rows:
            assert start == self.held(request), "entries are absorbed in order"
            self._ids[request] += tokens[packed]
        self._store(rows.requests)

    def fill(self, rows: Rows, tokens: Sequence[int], numbers: Numbers) -> None:
        for request, start, packed in rows:
            assert start == self.held(request), "entries are made up in order"
            self._ids[request] += tokens[packed]
            self.cache.fill(request, self._whole(self.held(request)), numbers)

    def _store(self, requests: Sequence[int]) -> None:
        """Compute the whole blocks that the cache lacks, but for those of a round: the next draft does these beside
        its own rows."""
        spare = self._whole(self.max_drafts + (self.block or 0))
        ends = {request: self._whole(self.held(request)) for request in requests}
        pieces = [
            (request, start, min(self._whole(MOST), end - start))
            for request, end in ends.items()
            if end - self.stored(request) > spare
            for start in range(self.stored(request), end, self._whole(MOST))
        ]
        for request, start, count in pieces:
            self._forward(Rows.of([request], [start], [count]), self._ids[request][start : start + count], ())

    # ------------------------------------------------------------------------------------------------- for a draft

    def stored(self, request: int) -> int:
        """Entries that the cache holds: whole committed blocks between rounds."""
        return self.cache.tables.length(request)

    def ids(self, request: int, start: int) -> list[int]:
        """Committed ids from a position on."""
        return self._ids[request][start:]

    def end(self, first: int, count: int) -> int:
        """Where a canvas for ``count`` places from ``first`` on ends at the latest."""
        return first + count if self.block is None else (first // self.block + 1) * self.block

    def keep(self, request: int, first: int, anchor: int) -> int:
        """Cut the cache back after a pass, to what a later one of this round reads; as many entries stay."""
        if self.block is not None:
            kept = first // self.block * self.block
        else:
            kept = anchor if self._once else 0
        self.cache.truncate(request, kept)
        return kept

    def _whole(self, length: int) -> int:
        """Entries of whole blocks among the first ``length``."""
        return 0 if self.block is None else length // self.block * self.block

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        # a place beyond the model's last position is none that it was made for
        counts = [
            min(budget, self.max_drafts, self.model.max_positions - 1 - start)
            for budget, start in zip(budgets, anchors.starts, strict=True)
        ]
        drafts = {
            i: _Draft(self, anchors.requests[i], tokens[i], count, noises[i])
            for i, count in enumerate(counts)
            if count > 0
        }
        while going := [draft for draft in drafts.values() if not draft.canvas.done]:
            for together in _passes(going):
                self._step(together)
        for draft in drafts.values():
            self.cache.truncate(draft.request, min(self.stored(draft.request), self._whole(self.held(draft.request))))
        return [drafts[i].canvas.proposal if i in drafts else PointMass(()) for i in range(len(budgets))]

    def _step(self, drafts: Sequence[_Draft]) -> None:
        ids = [draft.rows for draft in drafts]
        counts = [len(own) for own in ids]
        rows = Rows.of([draft.request for draft in drafts], [draft.start for draft in drafts], counts)
        wanted = [draft.wanted for draft in drafts]
        heads = tuple(offset + row for offset, own in zip(rows.offsets, wanted, strict=False) for row in own)
        logits = self._forward(rows, [token for own in ids for token in own], heads)[:, : self.vocabulary]
        if self.network.mask_id < self.vocabulary:
            logits[:, self.network.mask_id] = -torch.inf
        for draft, own in zip(drafts, logits.split([len(own) for own in wanted]), strict=True):
            draft.step(own)

    @torch.inference_mode()
    def _forward(self, rows: Rows, tokens: Sequence[int], heads: tuple[int, ...]) -> torch.Tensor:
        last, mask = self.model.vocabulary - 1, self.network.mask_id  # as in `LanguageDrafter.run`
        known = [token if token == mask else min(token, last) for token in tokens]
        ids = torch.tensor(known, device=self.model.head_weight.device)
        return self.model(ids, ForwardPlan(rows, (), heads, self._mask), self.cache).logits

    def bytes_read(self, n: int) -> int:
        blocks = 1 if self.block is None else -(-self.max_drafts // self.block)
        each = self.model.bytes_read if self.block is None and not self._once else self.pass_bytes(n)
        return blocks * (self.effort.steps or 1) * each


def _passes(drafts: Sequence[_Draft]) -> Iterator[list[_Draft]]:
    """Drafts whose rows go into one pass: what reads a long prefix anew goes alone."""
    together: list[_Draft] = []
    count = 0
    for draft in drafts:
        rows = len(draft.rows)
        if together and count + rows > MOST:
            yield together
            together, count = [], 0
        together.append(draft)
        count += rows
    yield together
