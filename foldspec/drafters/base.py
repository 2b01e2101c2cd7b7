"""What the house asks of a drafter, whichever it is: of its network to load it and to plan its memory, of the drafter
itself in the round loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import FixedRows, Rows
from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.made_up import Numbers
from foldspec.models.base import LanguageModel
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.records import DrafterFacts, PointMass, Proposal
from foldspec.sampling import DraftSampling

__all__ = ["Drafter", "DrafterNetwork", "Footprint", "Host", "NoDrafter", "Room"]


@dataclass(frozen=True)
class Host:
    """What a drafter works for: the target, its cache, and the kernels of both. ``verified``: the request whose
    verification a context method may look at, where it is not the drafter's own."""

    model: LanguageModel
    cache: PagedCache
    kernels: Kernels
    verified: int | None = None


@dataclass(frozen=True)
class Room:
    """What a drafter's caches are made for, beside pages of ``page_size`` entries: ``requests`` at once and a kept
    prompt, each of at most ``longest`` entries, a block behind them included, and ``longest_pass`` rows a forward."""

    requests: int
    longest: int
    longest_pass: int
    page_size: int


class Footprint(NamedTuple):
    """Bytes: of an ``entry`` in pages; of ``rings`` and recurrent states, and of a context method's ``state``, of all
    requests that there is room for."""

    entry: int
    rings: int
    state: int


class DrafterNetwork(nn.Module, ABC):
    """A drafter's weights, named as in its checkpoint, on the meta device until they are loaded.

    ``facts``      what the drafter asks of its target
    ``block``      B, the rows of a block, the anchor's included; None: as many as are asked for
    ``most``       drafts that a block of its own proposes at most; None: as many as are asked for
    ``confident``  whether it says where a block is not worth verifying any further
    ``integer``    tensors that hold whole numbers
    ``verdict``    what it means that a target passed all checks, in words
    ``reads_context``  whether a context method decides what it reads; else it reads everything
    ``efforts``    the fields of :class:`Effort` that change what it does, ``q_mode`` aside; ``order``: the one that is
                   taken where none is given; ``no_effort`` says why one that is not among them means nothing
    """

    facts: DrafterFacts
    block: int | None = None
    most: int | None = None
    confident: bool = False
    integer: frozenset[str] = frozenset()
    efforts: frozenset[str] = frozenset()
    order: str = "static"
    no_effort: str = (
        "the drafter has one step: a second would need the target's features of tokens that are only drafted"
    )
    verdict: ClassVar[str] = "the drafter was made for this target"
    reads_context: ClassVar[bool] = True

    def parameter_name(self, tensor: str) -> str | None:
        """The parameter that a checkpoint's tensor fills; None for one that is ignored by rule."""
        return tensor

    def described(self) -> dict[str, Any]:
        """What ``foldspec check`` says of it, beside its architecture."""
        return {} if self.block is None else {"block": self.block}

    @abstractmethod
    def rows(self, method: MethodOptions) -> int:
        """The most rows of a round, in its own forwards and in the target's, the anchor's included."""

    def pass_rows(self, method: MethodOptions, longest: int) -> int:
        """The most rows of one of its own forwards, where a request holds ``longest`` entries."""
        return self.rows(method)

    def filled(self, method: MethodOptions) -> MethodOptions:
        """The method with what it leaves to the network filled in. Raises :class:`UsageError` for what the network has
        no use for."""
        for name in ("block_length", "prefix_cache"):
            if getattr(method, name) is not None:
                raise UsageError(f"{self.facts.where} has no use for it", where=name, do="leave it out")
        return method

    def not_fixed(self, method: MethodOptions) -> str:
        """Why it cannot draft without looks from the host; empty if it can. ``method`` is filled in."""
        return "the drafter decides on the host what it does next"

    @abstractmethod
    def footprint(self, method: MethodOptions, dtype: torch.dtype, room: Room) -> Footprint:
        """The memory that its caches take."""

    @abstractmethod
    def caches(self, dtype: torch.dtype, room: Room, pages: int, device: torch.device) -> Any:
        """Its caches, shared by all drafters of these weights: for :meth:`bind` alone. They have a ``check()`` for
        debug mode."""

    def fit(self, target: LanguageModel) -> None:
        """Look at the target's modules before any weight is read. Raises :class:`PairError`."""

    @abstractmethod
    def check(self, target: LanguageModel) -> None:
        """Look at the loaded weights once. Raises :class:`CheckpointError`."""

    @abstractmethod
    def bind(self, host: Host, caches: Any, method: MethodOptions, sampling: DraftSampling) -> Drafter:
        """The drafter that these weights make for one target and one way of working. Raises :class:`UsageError` for a
        method that it cannot follow."""


class Drafter(ABC):
    """A drafter keeps its own state of each open request: everything committed, and nothing drafted.

    ``taps``        target layers whose raw outputs :meth:`absorb` wants, in this order
    ``max_drafts``  tokens that a round can propose at most
    ``biased``      why drafts may not follow the laws that they are held with, given what stands before them; empty if
                    they do
    ``pass_rows``   rows of its own pass in :meth:`draft`
    """

    taps: tuple[int, ...] = ()
    max_drafts: int = 0
    biased: str = ""
    pass_rows: int = 0

    @abstractmethod
    def open(self, request: int, longest: int | None = None) -> None:
        """Begin with a request, or go on with one that was suspended. ``longest``: the tokens that it may come to,
        prompt and output (None: nobody knows). Raises :class:`ResourceError` if there is no room for it."""

    @abstractmethod
    def open_prefix(self, request: int) -> None:
        """Begin with a request that will only be absorbed and forked, by whatever context method."""

    @abstractmethod
    def fork(self, prefix: int, request: int, tokens: Sequence[int], longest: int | None = None) -> None:
        """As :meth:`open`, for a request that has absorbed what ``prefix`` has, by any drafter: ``tokens``."""

    @abstractmethod
    def close(self, request: int) -> None:
        """Forget the request and free what it held."""

    def suspend(self, request: int) -> None:
        """Free what the request holds, all of which :meth:`absorb` can bring back; the rest is kept until it is opened
        again, or closed."""
        self.close(request)

    def reserve(self, request: int, entries: int) -> None:  # noqa: B027  (nothing to do is the rule)
        """Make sure of room for ``entries`` committed entries of an open request and for a proposal after them: what
        the scheduler asks before it admits a request and before every round. Raises :class:`ResourceError`; then
        nothing has changed."""

    @abstractmethod
    def truncate(self, request: int, length: int) -> None:
        """Keep exactly the first ``length`` committed entries (or all, if it holds fewer)."""

    def held(self, request: int) -> int:
        """Committed entries that it holds of an open request."""
        return 0

    def bytes_read(self, n: int) -> int:
        """Bytes of weights and of its own context that proposing once after ``n`` entries reads."""
        return 0

    @abstractmethod
    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        """Take in committed rows: after each chunk of a prompt and after every commit. ``tokens`` [total] are their
        ids, ``taps`` [total, width] each."""

    def fill(self, rows: Rows, tokens: Sequence[int], numbers: Numbers) -> None:
        """:meth:`absorb` where no target has run, for dummy weights: what the taps would give is made up. (Here: there
        are no taps.)"""
        self.absorb(rows, tokens, ())

    @abstractmethod
    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        """For each request, at most ``budgets[i]`` tokens to follow the anchor ``tokens[i]`` at ``starts[i]``.

        A token that is drawn is drawn from ``noises[i]``, keyed by its position, its anchor's and the step.
        """

    # What a round asks that the host does not look into (``schedule/fixed.py``), where ``DrafterNetwork.not_fixed`` has
    # nothing against it: :meth:`reserve`, then :meth:`draft` and :meth:`absorb` of fixed rows, then :meth:`advance`.

    def draft(self, rows: FixedRows, anchors: torch.Tensor) -> torch.Tensor:
        """:meth:`propose` by argmax: ``max_drafts`` ids [R, max_drafts] after the anchors [R], whose positions and a
        block behind them are ``rows``."""
        raise NotImplementedError

    def places(self, request: int) -> tuple[tuple[int, ...], dict[int, int]]:
        """Where an open request lies in its cache: its pages, and by capacity where its rings begin."""
        return (), {}

    def advance(self, request: int, length: int) -> None:  # noqa: B027
        """Of the fixed rows that were absorbed, exactly those up to ``length`` entries are committed."""

    def far(self, n: int) -> bool:
        """Whether after ``n`` entries more is read than what is near (``ContextMethod.far``)."""
        return False


class NoDrafter(Drafter):
    """Proposes nothing: every round is one plain decoding step."""

    def open(self, request: int, longest: int | None = None) -> None: ...

    def open_prefix(self, request: int) -> None: ...

    def fork(self, prefix: int, request: int, tokens: Sequence[int], longest: int | None = None) -> None: ...

    def close(self, request: int) -> None: ...

    def truncate(self, request: int, length: int) -> None: ...

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None: ...

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        return [PointMass(()) for _ in tokens]

    def draft(self, rows: FixedRows, anchors: torch.Tensor) -> torch.Tensor:
        return anchors.new_empty(len(anchors), 0)
