"""What the round loop asks of a drafter, whichever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from foldspec.cache.paged import CacheSpec
from foldspec.cache.rows import Rows
from foldspec.context.base import DrafterLayer
from foldspec.context.reader import ContextReader
from foldspec.made_up import Numbers
from foldspec.models.base import LanguageModel
from foldspec.models.rope import Rope
from foldspec.noise import Noise
from foldspec.records import DrafterFacts, PointMass, Proposal
from foldspec.sampling import ARGMAX, DraftSampling

__all__ = ["Drafter", "DrafterNetwork", "NoDrafter"]


class DrafterNetwork(nn.Module, ABC):
    """A drafter's weights, named as in its checkpoint, on the meta device until they are loaded.

    ``layer_facts``  what a context method may know of each layer
    ``block``   B, the rows of a block, the anchor's included
    ``rope``    the layers' rotary embedding; ``scale`` multiplies their logits
    ``facts``   what the drafter asks of its target
    ``heads``   query heads of a layer
    ``confident`` whether it says where a block is not worth verifying any further
    ``integer`` tensors that hold whole numbers
    ``efforts`` the fields of :class:`Effort` that change what it does, ``q_mode`` aside, and ``order`` the one that is
                taken where none is given; ``no_effort`` says why one that is not among them means nothing
    """

    layer_facts: tuple[DrafterLayer, ...]
    block: int
    rope: Rope
    scale: float
    heads: int
    facts: DrafterFacts
    confident: bool = False
    integer: frozenset[str] = frozenset()
    efforts: frozenset[str] = frozenset()
    order: str = "static"
    no_effort: str = (
        "the drafter has one step: a second would need the target's features of tokens that are only drafted"
    )

    @abstractmethod
    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """The geometry of its context."""

    @abstractmethod
    def check(self, target: LanguageModel) -> None:
        """Look at the loaded weights once. Raises :class:`CheckpointError`."""

    @abstractmethod
    def bind(self, target: LanguageModel, reader: ContextReader, sampling: DraftSampling = ARGMAX) -> Drafter:
        """The drafter that these weights make for one target, one context method and one way to choose drafts."""


class Drafter(ABC):
    """A drafter keeps its own state of each open request: everything committed, and nothing drafted.

    ``taps``        target layers whose raw outputs :meth:`absorb` wants, in this order
    ``max_drafts``  tokens that a round can propose at most
    ``biased``      why drafts may not follow the laws that they are held with, given what stands before them; empty if
                    they do
    """

    taps: tuple[int, ...] = ()
    max_drafts: int = 0
    biased: str = ""

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
