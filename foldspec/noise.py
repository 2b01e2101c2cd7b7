"""Noise as a function of what it is for: no generator, no state, so neither batches nor retries can shift it.

Every draw is keyed as design section 4 says: by seed, absolute position and purpose, and a draft's also by its anchor
and step. The bits are those of Philox4x32-10 (Salmon et al., 2011) in integer operations, which a kernel can repeat:

    key      (low, high) 32 bits of the seed
    counter  (id // 2, position, anchor, 256 step + purpose)
    words    0 and 1 for an even id, 2 and 3 for an odd one, the first of the two the higher; a number that belongs to
             no id is that of id 0
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from foldspec.laws import Law

__all__ = ["Noise", "Purpose", "gumbel", "philox", "uniform"]

MASK = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a draw is for. Two purposes never share a number."""

    TARGET = 1  # the target's own token at a position
    ACCEPT = 2  # whether a draft at that position stands
    RESIDUAL = 3  # the token in place of one that does not
    DRAFT = 4  # a drafted token
    PLACE = 5  # which places of a block a step reveals
    CANVAS = 6  # a token in place of one that is not known


def philox(counter: Sequence[Any], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """Philox4x32-10: four words of 32 bits for a counter of four and a key of two, ints for ints. Where one is an int64
    tensor, so is each word; there a product of two words runs over into the sign, whose bits the masks take as they
    are."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & MASK) ^ c1 ^ k0, b & MASK, ((a >> 32) & MASK) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


class Noise:
    """The noise of one request. ``seed`` is a whole number of at most 64 bits, ``key`` its low and its high 32."""

    def __init__(self, seed: int) -> None:
        self.key = seed & MASK, (seed >> 32) & MASK

    def uniform(self, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> float:
        """A number in [0, 1) of 53 bits; it can be 0 and cannot round to 1."""
        high, low, _, _ = philox((0, position, anchor, step << 8 | purpose), self.key)
        return float((high << 32 | low) >> 11) * 2.0**-53

    def whole(self, count: int, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        """A whole number from 0 below ``count``, at most 2^53, all equally likely up to rounding."""
        return int(self.uniform(purpose, position, anchor=anchor, step=step) * count)

    def draw(self, law: Law, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        """One token of a law: the largest of logit + Gumbel noise, which each id has for itself (a Gumbel-max draw).
        Two laws drawn from with the same key so agree with probability at least (1 - TV) / (1 + TV)."""
        if law.token is not None:
            return law.token
        noise = self._gumbel(law, position, anchor, step << 8 | purpose)
        best = int((law.logits.double() + noise).argmax())
        return best if law.ids is None else int(law.ids[best])

    def _gumbel(self, law: Law, position: int, anchor: int, last: int) -> torch.Tensor:
        """[m] float64."""
        size, device = len(law.logits), law.logits.device
        if law.ids is None:
            pairs = torch.arange((size + 1) // 2, device=device)
            return _each(philox((pairs, position, anchor, last), self.key))[:size]
        a, b, c, d = philox((law.ids >> 1, position, anchor, last), self.key)
        return _gumbel(torch.where((law.ids & 1).bool(), _top_bits(c, d), _top_bits(a, b)))


def uniform(key: tuple[torch.Tensor, torch.Tensor], purpose: Purpose, position: torch.Tensor) -> torch.Tensor:
    """:meth:`Noise.uniform` of many requests at once: float64, as int64 keys and positions broadcast."""
    high, low, _, _ = philox((0, position, 0, int(purpose)), key)
    return (high << 21 | low >> 11).double() * 2.0**-53


def gumbel(key: tuple[Any, Any], size: int, position: torch.Tensor, purpose: torch.Tensor) -> torch.Tensor:
    """[..., size] float64: what :meth:`Noise.draw` adds to the logits of ids 0 .. size-1, for many draws at once. Keys,
    positions and purposes are int64 [..., 1]."""
    pairs = torch.arange((size + 1) // 2, device=position.device)
    return _each(philox((pairs, position, 0, purpose), key))[..., :size]


def _each(words: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Noise of ids 0, 1, 2, ... from the words of their pairs."""
    a, b, c, d = words
    return _gumbel(torch.stack((_top_bits(a, b), _top_bits(c, d)), dim=-1).flatten(-2))


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """float64: -log(-log u), with u of 52 bits in the open interval (0, 1)."""
    return bits.double().add_(0.5).mul_(2.0**-52).log_().neg_().log_().neg_()


def _top_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The upper 52 bits of two words."""
    return high << 20 | low >> 12
