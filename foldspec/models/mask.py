"""Which entries a row of a forward reads: one span of them, ``first .. last-1``, that its position gives.

                 last                          for
    causal       p + 1                         targets, autoregressive drafters
    grid(b)      the end of p's block          SDAR: blocks of b positions, counted from position 0
    full         the end of the forward        Dream, and a canvas that is denoised over a causal prefix

Causal is the grid of blocks of one position, full that of a single block which begins where the forward's rows do. A
row never reads past the rows of its own forward: feed whole blocks, or the last one reads only what it has.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAUSAL", "FULL", "Mask", "grid"]


@dataclass(frozen=True)
class Mask:
    """``block``: positions of a block, whose rows read one another and everything before; None: the rows of a forward
    are one block."""

    block: int | None

    def spans(self, start: int, count: int, window: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """``first`` and ``last`` of each of ``count`` rows from position ``start`` on. With a ``window``, a row reads
        its block and the ``window - 1`` entries before that."""
        end, block = start + count, self.block
        begins = [start if block is None else p // block * block for p in range(start, end)]
        first = tuple(0 if window is None else max(0, begin - window + 1) for begin in begins)
        return first, tuple(end if block is None else min(begin + block, end) for begin in begins)


CAUSAL = Mask(1)
FULL = Mask(None)


def grid(block: int) -> Mask:
    """Blocks of ``block`` positions, counted from position 0."""
    return Mask(block)
