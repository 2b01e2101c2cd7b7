"""Rounds on fixed buffers (``fixed.py``), recorded in CUDA graphs and replayed.

The host's part of a round: slots for what it writes, tables and places where they have changed, a replay, and one look
at what was committed; then stop ids, stop strings and limits, as ever. Graphs are recorded when they are first needed,
one for each number of requests and each state of the context (all near, or some of it far). Without a GPU the body
runs as it stands.

What is not inside falls back to the ordinary loop by itself:

    an engine    :func:`why_not` says why
    a step       in which a prompt is prefilled; a request has its logits changed (biases, penalties, ids that may not
                 come yet) or wants log-probabilities; or a cache has no slots left for a whole block
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foldspec.acceptance.base import AcceptanceRule
from foldspec.cache.paged import PagedCache, TargetSpec
from foldspec.drafters.base import Drafter, DrafterNetwork
from foldspec.errors import ResourceError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.verify import Case
from foldspec.models.base import LanguageModel
from foldspec.options import MethodOptions, SamplingParams
from foldspec.records import PointMass, Verdict
from foldspec.schedule.fixed import Buffers, FixedRound, Parts, Seats, State
from foldspec.schedule.request import Request

__all__ = ["Graphs", "Outcome", "Outside", "why_not"]

WARM_UPS = 2  # runs before a recording: operators choose, compile and allocate what they keep


def why_not(
    spec: TargetSpec, network: DrafterNetwork | None, method: MethodOptions, rule: AcceptanceRule
) -> str | None:
    """Why rounds of an engine cannot run on fixed buffers, in a line; None if they can. ``network``: the pair's, if it
    has one; ``method`` is filled in."""
    if spec.not_fixed:
        return spec.not_fixed
    drafts = method.draft_tokens != 0
    if drafts and method.drafter is not None:
        return f"the drafter {method.drafter} looks into the text, on the host"
    if drafts and network is not None and network.not_fixed(method):
        return network.not_fixed(method)
    return f"the rule {method.accept} decides on the host" if rule.case() is None else None


class Outside(TorchDispatchMode):
    """Notes the tensors that operators take and that none of them has made, by where their memory begins. A recording
    reads them where they lie, so whoever replays it keeps them alive: a table that has grown meanwhile is another."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for x in _tensors((args, kwargs)):
            place = x.untyped_storage().data_ptr()
            if place not in self._made:
                self.found.setdefault(place, x)
        out = func(*args, **(kwargs or {}))
        self._made |= {x.untyped_storage().data_ptr() for x in _tensors(out)} - set(self.found)
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Outcome(NamedTuple):
    """What a round did to one request, as the ordinary loop has it; ``sound``: rows of finite logits before the first
    that is not."""

    proposal: PointMass
    verdict: Verdict
    sound: int


class _Seat(NamedTuple):
    """What the device holds of a request: numbers that rounds change, and how it is sampled."""

    id: int
    first: int
    anchor: int
    left: int
    seeds: tuple[int, int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, request: Request) -> _Seat:
        p, left = request.params, request.limit - len(request.output)
        numbers = request.id, request.anchor_pos, request.output[-1], left
        return cls(*numbers, request.noise.key, float(p.temperature), p.top_k, float(p.top_p), float(p.min_p))

    def moved(self, committed: Sequence[int]) -> _Seat:
        """After a round."""
        count = len(committed)
        return self._replace(first=self.first + count, anchor=committed[-1], left=self.left - count)


class Graphs:
    """Rounds of up to ``requests`` requests, of at most ``longest`` entries each, blocks included, on buffers of their
    own. ``pool`` gives recordings their memory on a GPU: a handle that all engines over the same weights may share,
    since never two of them run at once and nothing that one leaves there is read by another.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: PagedCache,
        drafter: Drafter,
        kernels: Kernels,
        case: Case,
        *,
        drafts: int,
        requests: int,
        longest: int,
        device: torch.device,
        pool: Any = None,
    ) -> None:
        self._parts, self._device, self._pool = Parts(model, cache, drafter, kernels, case), device, pool
        self._cache, self._drafter = cache, drafter
        self._drafts, self._most, self._longest = drafts, requests, longest
        self._buffers: Buffers | None = None
        self._runs: dict[State, Callable[[], None]] = {}
        self._seats: list[_Seat] = []
        self._tables: list[Any] = []
        self._kept: list[dict[int, torch.Tensor]] = []  # what recordings read
        self.failed = ""  # why a recording failed, after which all rounds are ordinary ones
        self.rounds = 0  # rounds that ran here

    @property
    def buffers(self) -> Buffers | None:
        """There from the first round on."""
        return self._buffers

    @property
    def prepared(self) -> int:
        """Recordings so far, one that failed included: what a round may have to wait for."""
        return len(self._runs) + bool(self.failed)

    def run(self, requests: Sequence[Request], rule: AcceptanceRule) -> list[Outcome] | None:
        """Run a round of these requests and say what it did, each to be committed and then :meth:`keep`; None, and
        nothing has happened, where the ordinary loop must."""
        if not requests or self.failed or rule.case() is None or any(_looked_into(request) for request in requests):
            return None
        try:
            for request in requests:
                self._cache.reserve(request.id, request.anchor_pos + self._drafts + 1)
                self._drafter.reserve(request.id, request.anchor_pos + 1)
        except ResourceError:
            return None
        buffers = self._prepare(requests, rule)
        run = self._find(self._state(requests))
        if run is None:
            return None
        run()
        self.rounds += 1
        rows = buffers.out[: len(requests)].tolist()  # the one look at the device
        self._seats = [seat.moved(row[3 : 3 + row[2]]) for seat, row in zip(self._seats, rows, strict=True)]
        return [self._outcome(request, row) for request, row in zip(requests, rows, strict=True)]

    def keep(self, request: Request, length: int) -> None:
        """Both caches hold exactly ``length`` entries of it, after a round."""
        self._cache.keep(request.id, length)
        self._drafter.advance(request.id, length)

    def _outcome(self, request: Request, row: Sequence[int]) -> Outcome:
        accepted, sound, committed, *rest = row
        run, rest = rest[: self._drafts + 1], rest[self._drafts + 1 :]
        drafts, outside = rest[: self._drafts][: max(0, request.draft_budget)], rest[self._drafts :]
        rows = tuple(j for j, without in enumerate(outside) if without)
        verdict = Verdict(accepted, run[committed - 1], rows, followed=committed > accepted)
        return Outcome(PointMass(tuple(drafts)), verdict, sound)

    def _state(self, requests: Sequence[Request]) -> State:
        params = [request.params for request in requests]
        return State(
            len(requests),
            any(self._drafter.far(request.anchor_pos) for request in requests),
            not any(p.temperature for p in params),
            any(_filtered(p) for p in params),
        )

    def _prepare(self, requests: Sequence[Request], rule: AcceptanceRule) -> Buffers:
        """Bring the buffers up to the host's books, where they are not."""
        places = [(self._cache.places(r.id)[0], *self._drafter.places(r.id)) for r in requests]
        if self._buffers is None:
            rings = tuple(sorted(places[0][2]))
            seats = Seats(
                self._most, self._longest, self._cache.tables.page_size, self._drafts, self._drafter.pass_rows, rings
            )
            self._buffers = Buffers(seats, self._device)
            self._buffers.shares.copy_(self._parts.case.by_draft(self._drafts, "cpu"))
        b, n = self._buffers, len(requests)
        now = [_Seat.of(request) for request in requests]
        if now != self._seats:
            buffers = (b.first, b.anchor, b.left, b.seeds, b.temperature, b.top_k, b.top_p, b.min_p)
            for buffer, column in zip(buffers, list(zip(*now, strict=True))[1:], strict=True):
                buffer[:n].copy_(torch.tensor(column, dtype=buffer.dtype))
            self._seats = now
        if places != self._tables:
            width = b.seats.pages
            for table, number in ((b.target.tables, 0), (b.draft.tables, 1)):
                pages = [(*place[number], *(0,) * width)[:width] for place in places]
                table[:n].copy_(torch.tensor(pages, dtype=torch.int32))
            for capacity, base in b.draft.rings.items():
                base[:n].copy_(torch.tensor([[place[2][capacity]] for place in places], dtype=torch.int32))
            self._tables = places
        forced = [rule.settled(r.anchor_pos + 1, r.noise) for r in requests]
        if None not in forced:
            b.forced[:n].copy_(torch.tensor(forced))
        return b

    def _find(self, state: State) -> Callable[[], None] | None:
        assert self._buffers is not None
        if state not in self._runs:
            round_ = FixedRound(self._parts, self._buffers, state)
            run: Callable[[], None] = round_
            if self._device.type == "cuda":
                try:
                    with torch.cuda.device(self._device):
                        run = self._record(round_)
                except RuntimeError as error:  # an operator that cannot be recorded; torch has no one class for it
                    self.failed = f"recording failed: {error}".splitlines()[0]
                    return None
            self._runs[state] = run
        return self._runs[state]

    def _record(self, round_: FixedRound) -> Callable[[], None]:
        """A graph of the round; the buffers are then as they were. (Scratch rows in the caches are not, which the next
        round writes anyhow.)"""
        assert self._buffers is not None
        before = {name: tensor.clone() for name, tensor in self._buffers.tensors.items()}

        def restore() -> None:
            assert self._buffers is not None
            for name, tensor in self._buffers.tensors.items():
                tensor.copy_(before[name])

        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                with self._parts.kernels.tuning(), Outside() as outside:
                    round_()
                restore()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            round_()
        self._kept.append(outside.found)
        return graph.replay


def _looked_into(request: Request) -> bool:
    """Whether the host looks into a round of it, or changes its logits."""
    p = request.params
    barred = len(request.output) < p.min_tokens
    return bool(p.logit_bias or p.penalizes or barred or p.logprobs is not None)


def _filtered(params: SamplingParams) -> bool:
    return bool(params.temperature and (params.top_k or params.top_p < 1 or params.min_p))
