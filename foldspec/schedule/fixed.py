"""A whole round on buffers of fixed shapes and places: draft, verify, accept, commit, and what the caches keep.

What changes from round to round lies on the device, lengths and tables of pages included; the host looks at nothing.
Where there is a GPU, the round can so be recorded once and replayed (``graphs.py``); anywhere else the same body runs
as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import FixedRows, Places
from foldspec.drafters.base import Drafter
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.verify import Blocks, Case
from foldspec.kernels.verify.filters import cuts
from foldspec.models.base import ForwardPlan, LanguageModel

__all__ = ["Buffers", "FixedRound", "Parts", "Seats", "State"]


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
        numbers = 10 + 3 + 3 * self.drafts + 1
        each = 8 * numbers + 4 * (2 * self.pages + len(self.rings))
        return self.requests * each + 8 * (2 * self.drafts + 1 + self.block)


class Buffers:
    """The state of a batch, on the device: allocated once, rewritten in place.

    ``first``   int64 [R] the anchors' positions; ``anchor`` int64 [R] their ids
    ``left``    int64 [R] tokens that each may still commit
    ``forced``  int64 [R] drafts that stand, for a rule for which that was decided beforehand
    ``seeds``   int64 [R, 2], as ``Noise.key``; ``temperature``, ``top_p``, ``min_p`` float64 [R] and ``top_k`` int64
                [R], as in ``SamplingParams``; ``shares`` float64 [drafts], as in ``Blocks``
    ``target``, ``draft``  where entries lie
    ``out``     int64 [R, 3 + 3 drafts + 1]: what a round did, for the host: drafts that stood, rows of finite logits,
                tokens that are committed; the run of tokens (those behind the count mean nothing), the drafts, and
                which of them stand although the target's law has no room for them
    """

    def __init__(self, seats: Seats, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.seats, n = seats, seats.requests
        self.first, self.anchor, self.left, self.forced, self.top_k = (zeros(n) for _ in range(5))
        self.temperature, self.top_p, self.min_p = (zeros(n, dtype=torch.float64) for _ in range(3))
        self.seeds, self.shares = zeros(n, 2), zeros(seats.drafts, dtype=torch.float64)
        self.target = Places(zeros(n, seats.pages, dtype=torch.int32), seats.page_size, {})
        rings = {capacity: zeros(n, 1, dtype=torch.int32) for capacity in seats.rings}
        self.draft = Places(zeros(n, seats.pages, dtype=torch.int32), seats.page_size, rings)
        self.out = zeros(n, 3 + 3 * seats.drafts + 1)
        self.steps = torch.arange(max(seats.drafts + 1, seats.block), device=device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name."""
        rings = {f"ring {capacity}": base for capacity, base in self.draft.rings.items()}
        own = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return own | {"target tables": self.target.tables, "draft tables": self.draft.tables} | rings


@dataclass(frozen=True)
class Parts:
    """What a round is made of; ``case``: its acceptance rule."""

    model: LanguageModel
    cache: PagedCache
    drafter: Drafter
    kernels: Kernels
    case: Case


class State(NamedTuple):
    """What decides which operations a round has: how many ``requests``; whether some read more than what is near
    (``far``); whether no temperature is above 0 (``greedy``); and whether top-k, top-p or min-p is asked for
    (``filtered``)."""

    requests: int
    far: bool
    greedy: bool
    filtered: bool


class FixedRound:
    """A round of the requests in the first places of the buffers."""

    def __init__(self, parts: Parts, buffers: Buffers, state: State) -> None:
        self._parts, self._buffers, self._state = parts, buffers, state

    def __call__(self) -> None:
        """Advance every request; the caches' slots for what it writes are reserved. No value is read on the host, no
        shape depends on one, and nothing that lives longer is allocated."""
        b, n, seats, parts = self._buffers, self._state.requests, self._buffers.seats, self._parts
        first, anchor = b.first[:n].clone(), b.anchor[:n].clone()
        target, draft = b.target.first(n), b.draft.first(n)
        drafting = FixedRows(first, b.steps[: seats.block], draft, seats.longest, self._state.far)
        drafts = parts.drafter.draft(drafting, anchor)[:, : seats.drafts]

        steps = b.steps[: seats.drafts + 1]
        ids = torch.cat((anchor[:, None], drafts), 1).flatten()
        verifying = FixedRows(first, steps, target, seats.longest)
        output = parts.model(ids, ForwardPlan(verifying, parts.drafter.taps), parts.cache)
        parts.cache.end()

        counts = (b.left[:n] - 1).clamp(0, seats.drafts)
        decided = parts.kernels.verify(self._blocks(output.logits, first, drafts, counts))
        own = steps == decided.accepted[:, None]
        run = torch.where(own, decided.token[:, None], torch.cat((drafts, anchor[:, None]), 1))
        # with the rule ``unverified`` nothing of the target's comes after drafts
        alone = (counts > 0).long() if parts.case.kind == "unverified" else 0
        committed = decided.accepted + 1 - alone
        b.first[:n] += committed
        b.left[:n] -= committed
        b.anchor[:n] = run.gather(1, committed[:, None] - 1)[:, 0]
        # keys of rows that fell are written as well, where the next rounds write theirs before anything reads them
        parts.drafter.absorb(FixedRows(first, steps, draft, seats.longest), (), output.taps)
        numbers = torch.stack((decided.accepted, decided.sound, committed), 1)
        b.out[:n] = torch.cat((numbers, run, drafts, decided.outside.long()), 1)

    def _blocks(self, logits: torch.Tensor, first: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor) -> Blocks:
        """What the rule decides about: logits [R * (drafts + 1), vocabulary] of blocks that begin at ``first``."""
        b, n, rows = self._buffers, self._state.requests, drafts.shape[1] + 1
        floor = last = None
        if self._state.filtered:
            of_rows = (x[:n].repeat_interleave(rows) for x in (b.temperature, b.top_k, b.top_p, b.min_p))
            floor, last = cuts(logits, *of_rows)
        return Blocks(
            self._parts.case,
            self._state.greedy,
            logits,
            first=torch.arange(0, n * rows, rows, device=first.device),
            counts=counts,
            drafts=drafts,
            positions=first + 1,
            keys=b.seeds[:n],
            temperatures=b.temperature[:n],
            shares=b.shares,
            floor=floor,
            last=last,
            forced=b.forced[:n],
        )
