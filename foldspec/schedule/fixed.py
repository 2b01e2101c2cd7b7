"""A whole round on buffers of fixed shapes and places: draft, verify, accept, commit, and what the caches keep.

What changes from round to round lies on the device, lengths and tables of pages included; the host looks at nothing.
Where there is a GPU, the round can so be recorded once and replayed (``graphs.py``); anywhere else the same body runs
as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import FixedRows, Places
from foldspec.drafters.base import Drafter
from foldspec.models.base import ForwardPlan, LanguageModel

__all__ = ["Buffers", "FixedRound", "Seats"]


@dataclass(frozen=True)
class Seats:
    """``requests`` at once, each of ``longest`` entries at most, blocks included, in pages of ``page_size``; ``drafts``
    verified a round, and a drafter's own pass over ``block`` rows; ``rings``: the capacities that its cache has."""

    requests: int
    longest: int
    page_size: int
    drafts: int
    block: int
    rings: tuple[int, ...]

    @property
    def pages(self) -> int:
        return -(-self.longest // self.page_size)

    @property
    def bytes(self) -> int:
        """What :class:`Buffers` take."""
        numbers = 4 + 2 + 2 * self.drafts + 1
        each = 8 * numbers + 4 * (2 * self.pages + len(self.rings))
        return self.requests * each + 8 * (self.drafts + 1 + self.block)


class Buffers:
    """The state of a batch, on the device: allocated once, rewritten in place.

    ``first``   int64 [R] the anchors' positions; ``anchor`` int64 [R] their ids
    ``left``    int64 [R] tokens that each may still commit
    ``forced``  int64 [R] drafts that stand whatever the target says of them; -1: it is the target that says
    ``target``, ``draft``  where entries lie
    ``out``     int64 [R, 2 + drafts + 1 + drafts]: what a round did, for the host: drafts that stood, rows of finite
                logits, the run of tokens that it commits (those behind it mean nothing), and the drafts
    """

    def __init__(self, seats: Seats, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.seats, n = seats, seats.requests
        self.first, self.anchor, self.left = (zeros(n) for _ in range(3))
        self.forced = zeros(n) - 1
        self.target = Places(zeros(n, seats.pages, dtype=torch.int32), seats.page_size, {})
        rings = {capacity: zeros(n, 1, dtype=torch.int32) for capacity in seats.rings}
        self.draft = Places(zeros(n, seats.pages, dtype=torch.int32), seats.page_size, rings)
        self.out = zeros(n, 2 + 2 * seats.drafts + 1)
        self.steps = torch.arange(max(seats.drafts + 1, seats.block), device=device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name."""
        rings = {f"ring {capacity}": base for capacity, base in self.draft.rings.items()}
        own = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return own | {"target tables": self.target.tables, "draft tables": self.draft.tables} | rings


class FixedRound:
    """A round of ``requests`` requests on the first places of the buffers; ``far``: some of them read more than what is
    near."""

    def __init__(
        self,
        model: LanguageModel,
        cache: PagedCache,
        drafter: Drafter,
        buffers: Buffers,
        requests: int,
        far: bool,
    ) -> None:
        self._model, self._cache, self._drafter = model, cache, drafter
        self._buffers, self._requests, self._far = buffers, requests, far

    def __call__(self) -> None:
        """Advance every request; the caches' slots for what it writes are reserved. No value is read on the host, no
        shape depends on one, and nothing that lives longer is allocated."""
        b, n, seats = self._buffers, self._requests, self._buffers.seats
        first, anchor = b.first[:n].clone(), b.anchor[:n].clone()
        target, draft = b.target.first(n), b.draft.first(n)
        drafting = FixedRows(first, b.steps[: seats.block], draft, seats.longest, self._far)
        drafts = self._drafter.draft(drafting, anchor)[:, : seats.drafts]

        steps = b.steps[: seats.drafts + 1]
        ids = torch.cat((anchor[:, None], drafts), 1).flatten()
        verifying = FixedRows(first, steps, target, seats.longest)
        output = self._model(ids, ForwardPlan(verifying, self._drafter.taps), self._cache)
        self._cache.end()

        accepted, sound, run = self._judge(output.logits.unflatten(0, (n, -1)), drafts)
        count = accepted + 1
        b.first[:n] += count
        b.left[:n] -= count
        b.anchor[:n] = run.gather(1, accepted[:, None])[:, 0]
        # keys of rows that fell are written as well, where the next rounds write theirs before anything reads them
        self._drafter.absorb(FixedRows(first, steps, draft, seats.longest), (), output.taps)
        b.out[:n] = torch.cat((accepted[:, None], sound[:, None], run, drafts), 1)

    def _judge(
        self, logits: torch.Tensor, drafts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """logits [R, drafts + 1, vocabulary] -> drafts that stand [R], finite rows before the first that is not [R],
        and the tokens [R, drafts + 1], of which the first ``accepted + 1`` are committed.

        A draft stands while it is the target's argmax (of equal logits the lowest id), and one of it may still come.
        """
        b, n = self._buffers, self._requests
        best, steps = logits.argmax(-1), b.steps[: drafts.shape[1]]
        sound = logits.amax(-1).isfinite().long().cumprod(1).sum(1)
        most = (b.left[:n] - 1).clamp(0, b.seats.drafts)
        stand = torch.where(b.forced[:n, None] < 0, drafts == best[:, :-1], steps < b.forced[:n, None])
        accepted = (stand & (steps < most[:, None])).long().cumprod(1).sum(1)
        own = torch.arange(best.shape[1], device=best.device) >= accepted[:, None]
        run = torch.where(own, best, torch.cat((drafts, best[:, -1:]), 1))
        return accepted, sound, run
