"""A context method is a list of reads: which entries a drafter layer's block attends to, at which distances, with which
sharpness and weight. Everything that tells one method from another is in the reads that it returns.

Notation: ``n`` context entries at positions ``0 .. n-1``; block row ``r`` of ``B`` sits at position ``p = n + r``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from foldspec.cache.side import Layout
from foldspec.options import MethodOptions

__all__ = ["ContextMethod", "DrafterLayer", "Read"]


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
class Read:
    """One read of the context by the ``B`` rows of a block.

    ``first``, ``last``   per row, the entries ``first[r] .. last[r]-1``, none if ``last[r] <= first[r]``; at most ``n``
    ``keys``              ``rotated`` (true positions) or ``unrotated`` (all at position 0)
    ``query_at``          per row, the position at which the query is rotated: the distance to un-rotated keys
    ``scale``             multiplies the logits s, on top of the layer's own 1/sqrt(d)
    ``exponent``          the read weighs (sum exp(scale * s)) ** exponent
    ``block``             whether the block itself is attended to in this read, by the layer's own rule and at true
                          positions; exactly one read of a list carries it, and its ``last`` is ``n`` in every row
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    keys: str
    query_at: tuple[int, ...]
    scale: float = 1.0
    exponent: float = 1.0
    block: bool = False


class ContextMethod(ABC):
    """Subclasses define :meth:`reads` and, unless rotated keys are all they need, :meth:`stores`.

    ``uses`` names the fields of :class:`MethodOptions` that :meth:`reads` looks at.
    """

    uses: frozenset[str] = frozenset()

    def __init__(self, options: MethodOptions, layers: Sequence[DrafterLayer], block: int) -> None:
        """``options`` with window and alpha resolved; ``block`` is B, the anchor's row included."""
        self.options, self.layers, self.block = options, tuple(layers), block

    @abstractmethod
    def reads(self, layer: int, n: int) -> list[Read]:
        """The reads of drafter layer ``layer`` for a block that begins at position ``n``."""

    def stores(self, layer: int) -> Layout:
        """The key copies that :meth:`reads` of this layer needs."""
        return Layout(rotated=True)

    # What most methods build their reads from.

    def positions(self, n: int) -> tuple[int, ...]:
        """The true position of each block row."""
        return tuple(range(n, n + self.block))

    def near(self, layer: int, n: int, reach: int | None = None) -> Read:
        """The read that carries the block: the entries with ``p - j < reach`` that the layer itself sees, at true
        distances. FOLD's reach is ``D = W + B``; without one, this is attention as the drafter was trained."""
        first = [self.layers[layer].first_seen(p) for p in self.positions(n)]
        if reach is not None:
            first = [max(f, p - reach + 1) for f, p in zip(first, self.positions(n), strict=True)]
        return Read(tuple(min(f, n) for f in first), (n,) * self.block, "rotated", self.positions(n), block=True)
