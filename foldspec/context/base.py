"""A context method is a list of reads: which entries a drafter layer's block attends to, at which distances, with which
sharpness and weight. Everything that tells one method from another is in the reads that it returns, and in the few
hooks beside them, which do nothing unless a method defines them.

Notation: ``n`` context entries at positions ``0 .. n-1``; block row ``r`` of ``B`` sits at position ``p = n + r``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from foldspec.cache.side import Layout
from foldspec.errors import UsageError
from foldspec.kernels.multi_read_attention import Output
from foldspec.options import MethodOptions

__all__ = [
    "Attended", "ContextMethod", "DrafterLayer", "FixedRead", "Opened", "Read", "Rotation", "Span", "below", "joined",
]  # fmt: skip

Span: TypeAlias = tuple[int, int]  # the entries first .. last-1
Attended: TypeAlias = Callable[[], torch.Tensor]  # what a row of the target attended to: [entries], of sum 1


class Rotation(Protocol):
    """A layer's rotary embedding: x [rows, heads, d] rotated to positions [rows]; ``alone`` if what it meets is not
    rotated, ``end`` if all positions are known to lie below it. (Models have the class; this room does not import
    them.)"""

    def rotate(
        self, x: torch.Tensor, positions: torch.Tensor, *, alone: bool = False, end: int | None = None
    ) -> torch.Tensor: ...

    def stretched(self, stretch: float, length: int) -> Rotation:
        """YaRN's table for contexts ``stretch`` times as long as ``length``, of the same base."""


@dataclass(frozen=True)
class DrafterLayer:
    """What a method may know of a drafter layer.

    ``window``   Wn of a sliding layer, which sees ``p - j < Wn``; None for a full-attention layer
    ``causal``   whether block row ``r`` sees only the block rows up to itself
    """

    window: int | None = None
    causal: bool = False

    def first_seen(self, position: int) -> int:
        """The oldest entry that a row at ``position`` sees by the layer's own rule."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def block_span(self, row: int, block: int) -> tuple[int, int]:
        """The block rows ``first .. last-1`` that row ``row`` sees by the layer's own rule."""
        first = 0 if self.window is None else max(0, row - self.window + 1)
        if self.causal:
            return first, row + 1
        return first, block if self.window is None else min(block, row + self.window)


@dataclass(frozen=True)
class Opened:
    """What a method may know of a request, from its beginning to its end.

    ``longest``  tokens that it may come to, prompt and output; None where nobody said
    ``rope``     the drafter's own rotation; ``scale`` of its logits, 1/sqrt(d) as a rule
    ``keys``     (layer, first, last, rotated) -> keys [last - first, kv heads, d] of the stored entries
                 ``first .. last-1``, in a copy that :meth:`ContextMethod.stores` asked for
    ``share``    (n, entries) -> the bytes of so many keys and values of a layer, as a share of what a round after ``n``
                 entries reads beside the drafter's context: the weights, and the target's keys, values and states
    """

    longest: int | None
    rope: Rotation
    scale: float
    keys: Callable[[int, int, int, bool], torch.Tensor]
    share: Callable[[int, int], float] = lambda n, entries: 0.0


@dataclass(frozen=True)
class Read:
    """One read of the context by the ``B`` rows of a block.

    ``first``, ``last``   per row, the entries ``first[r] .. last[r]-1``, none if ``last[r] <= first[r]``; at most ``n``
    ``keys``              ``rotated`` (true positions), ``unrotated`` (all at position 0), or ``rerotated``: the entries
                          of ``index`` at positions 0, 1, 2, ...
    ``query_at``          per row, the position at which the query is rotated, and the block's own key where the read
                          carries the block
    ``scale``             multiplies the logits s, on top of the layer's own 1/sqrt(d); one number, or one a row
    ``exponent``          the read weighs (sum exp(scale * s)) ** exponent
    ``block``             whether the block itself is attended to in this read, by the layer's own rule (of
                          renumbered entries, without its window); exactly one read of a list carries it, and its
                          ``last`` is the number of entries in every row
    ``index``             the entries that the read is over, spans in rising order: ``first`` and ``last`` then count
                          along them. None: all ``n``
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    keys: str
    query_at: tuple[int, ...]
    scale: float | tuple[float, ...] = 1.0
    exponent: float = 1.0
    block: bool = False
    index: tuple[Span, ...] | None = None


@dataclass(frozen=True)
class FixedRead:
    """A :class:`Read` of R requests at once, without an index: what changes from round to round is on the device.

    ``first``, ``last``, ``query_at`` int64 [R, B]; ``scale`` one number, or [R, B]; ``reach``: all of ``query_at`` lies
    below it, whatever the round; None: below the requests' own positions' end.
    """

    first: torch.Tensor
    last: torch.Tensor
    keys: str
    query_at: torch.Tensor
    scale: float | torch.Tensor = 1.0
    exponent: float = 1.0
    block: bool = False
    reach: int | None = None


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans in rising order, empty ones dropped and neighbours made one."""
    found: list[Span] = []
    for first, last in spans:
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], last
        elif first < last:
            found.append((first, last))
    return tuple(found)


def below(index: Sequence[Span], limit: int) -> int:
    """How many entries of the spans are smaller than ``limit``."""
    return sum(max(0, min(last, limit) - first) for first, last in index)


class ContextMethod(ABC):
    """Subclasses define :meth:`reads` and, unless all rotated keys are what they need, :meth:`stores`; the other hooks
    do nothing by themselves.

    ``uses`` names the fields of :class:`MethodOptions` that the method looks at; ``coverage``, the drafter layers that
    it is for unless an option says otherwise: ``all``, or ``full`` ones. ``not_fixed``: why its reads cannot be said
    without the host; empty where :meth:`fixed_reads` says them.
    """

    uses: frozenset[str] = frozenset()
    coverage: str = "all"
    not_fixed: str = "its reads are decided on the host"

    def __init__(self, options: MethodOptions, layers: Sequence[DrafterLayer], block: int) -> None:
        """``options`` with window and alpha resolved; ``block`` is B, the anchor's row included. Raises
        :class:`UsageError` for values by layer that are not one a layer."""
        self.options, self.layers, self.block = options, tuple(layers), block
        for name in ("layer_window", "layer_alpha"):
            count = len(getattr(options, name))
            if layers and count not in (0, len(layers)):
                raise UsageError(f"names {count} layers, the drafter has {len(layers)}", where=name)

    @abstractmethod
    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        """The reads of drafter layer ``layer`` for a block that begins at position ``n``.

        ``q`` [B, heads, d], normed and un-rotated; None where only the size of the reads is asked for. Changes nothing
        that a second call at the same ``n`` would show."""

    def far(self, n: int) -> bool:
        """Whether some layer has a read beside its near one for a block that begins at ``n``. Once so, always so."""
        return False

    def fixed_reads(self, layer: int, n: torch.Tensor, far: bool) -> list[FixedRead]:
        """:meth:`reads` of R requests whose blocks begin at n [R] int64, as operations on the device alone. Where a
        request has no such read, its rows of the read are empty. ``far``: whether :meth:`far` holds of any of them."""
        raise NotImplementedError

    def kind(self, layer: int) -> Hashable:
        """Layers of one kind have the same reads."""
        widths, alphas = self.options.layer_window, self.options.layer_alpha
        return self.layers[layer], widths[layer : layer + 1], alphas[layer : layer + 1]

    def stores(self, layer: int) -> Layout:
        """The key copies that :meth:`reads` of this layer needs."""
        return Layout(rotated=True)

    def begin(self, request: Opened) -> Any:
        """What the method keeps of a request: it lives with the request, also while that has given up its pages."""
        return None

    def rope(self, layer: int, state: Any, own: Rotation) -> Rotation:
        """The rotation of this layer's keys and queries; ``own`` is the drafter's."""
        return own

    def needs(self) -> frozenset[str]:
        """``{"verifier_query"}``: :meth:`committed` asks what the target attended to."""
        return frozenset()

    def observe(self, layer: int, state: Any, n: int, q: torch.Tensor, output: Output) -> None:  # noqa: B027
        """After the reads of a layer were computed. The round may yet be undone: only :meth:`committed` may count."""

    def committed(self, state: Any, before: int, n: int, attended: Attended) -> None:  # noqa: B027
        """After a round, which took the request from ``before`` entries to ``n``. ``attended()`` is the attention of
        the target's row at position ``n-1`` to the entries ``0 .. n-1``, in its last full-attention layer, mean over
        heads: for methods that :meth:`needs` it."""

    def state_bytes(self, layer: int, longest: int, heads: int, width: int) -> int:
        """Bytes that :meth:`begin`'s state comes to hold for this layer, beside the copies of :meth:`stores`."""
        return 0

    def more_keys(self, layer: int, n: int) -> int:
        """Keys of entries that a round looks at in this layer beside its reads."""
        return 0

    def target_keys(self, n: int) -> int:
        """Keys that :meth:`committed` has the target's layer look up, a round on average."""
        return 0

    # What most methods build their reads from.

    def window(self, layer: int) -> int:
        """W of this layer."""
        assert self.options.window is not None
        return self.options.layer_window[layer] if self.options.layer_window else self.options.window

    def covers(self, layer: int) -> bool:
        """Whether the method is at work in this layer; otherwise the layer reads as it was trained."""
        return (self.options.coverage or self.coverage) == "all" or self.layers[layer].window is None

    def split(self, reach: int) -> Layout:
        """The copies that a near read of ``reach`` and a read of un-rotated keys need: of everything un-rotated keys,
        and rotated ones of what the near read sees and the block's own rows. A ring this long does not wrap while the
        context fits the window, so that reading it is then the same sum as reading pages. By the option ``layout``, or
        two full copies as in FOLD's paper."""
        if self.options.layout == "paper":
            return Layout(rotated=True, unrotated=True, side_values=True)
        return Layout(unrotated=True, ring=reach + self.block)

    def positions(self, n: int) -> tuple[int, ...]:
        """The true position of each block row."""
        return tuple(range(n, n + self.block))

    def near(self, layer: int, n: int, reach: int | None = None, since: int = 0) -> Read:
        """The read that carries the block: the entries from ``since`` on with ``p - j < reach`` that the layer itself
        sees, at true distances. FOLD's reach is ``D = W + B``; without one, this is attention as the drafter was
        trained."""
        first = [max(since, self.layers[layer].first_seen(p)) for p in self.positions(n)]
        if reach is not None:
            first = [max(f, p - reach + 1) for f, p in zip(first, self.positions(n), strict=True)]
        return Read(tuple(min(f, n) for f in first), (n,) * self.block, "rotated", self.positions(n), block=True)

    def fixed_positions(self, n: torch.Tensor) -> torch.Tensor:
        """[R, B] the true position of each block row."""
        return n[:, None] + torch.arange(self.block, device=n.device)

    def fixed_near(
        self, layer: int, n: torch.Tensor, reach: int | None = None, since: torch.Tensor | None = None
    ) -> FixedRead:
        """:meth:`near` of R requests; ``since`` [R]."""
        p, last = self.fixed_positions(n), n[:, None].expand(-1, self.block)
        reaches = [width for width in (self.layers[layer].window, reach) if width is not None]
        first = (p - (min(reaches) - 1)).clamp(min=0) if reaches else torch.zeros_like(p)
        if since is not None:
            first = first.maximum(since[:, None])
        return FixedRead(first.minimum(last), last, "rotated", p, block=True)
