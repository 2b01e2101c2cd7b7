"""The one attention operator: block queries read the context in one or two reads, merged by an alpha-norm.

    out = sum_i w_i o_i,   w = softmax_i( exponent_i * L_i ),   L_i = logsumexp_j( scale_i * q_i . k_ij )

``o_i`` is the softmax average of read ``i``. One read with exponent 1 is plain attention; FOLD is two reads, the far
one with ``scale = alpha / sqrt(d)`` and ``exponent = 1 / alpha`` (its Eqs. 2 to 4 in the log domain).

``reference.py`` is the definition and the oracle of the tests; the files beside it are faster ways to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from foldspec.kernels.library import Library

__all__ = ["Attention", "Entries", "Facts", "Output", "ReadArgs", "candidates"]


class Entries(NamedTuple):
    """A sequence of cache entries, as the maximal runs of consecutive slots that hold it.

    ``data`` [slots, kv heads, width] is one layer of a pool; ``runs`` lists (first slot, count), in entry order.
    """

    data: torch.Tensor
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ReadArgs:
    """One read of one request.

    ``q`` [B, heads, d] rotated for this read. Row ``r`` sees the entries ``first[r] .. last[r]-1`` of the sequence that
    ``keys`` and ``values`` hold (equal lengths, not always the same runs); what lies outside all rows' ranges may hold
    anything. ``scale`` is the whole factor of the logits, 1/sqrt(d) included; the read weighs
    ``(sum exp(scale * q . k)) ** exponent``. A row may see nothing: it then weighs nothing.

    ``origin`` is the position of the first entry in the whole context. It changes no result, but where sums are cut: of
    a row that reads a window, they are the same whatever rows come before it.
    """

    q: torch.Tensor
    keys: Entries
    values: Entries
    first: tuple[int, ...]
    last: tuple[int, ...]
    scale: float
    exponent: float = 1.0
    origin: int = 0


class Output(NamedTuple):
    """``out`` [B, heads, value width] in the dtype of q; ``lse`` [reads, B, heads]: L_i, -inf where a read is empty."""

    out: torch.Tensor
    lse: torch.Tensor


class Facts(NamedTuple):
    """What an implementation needs to know to say whether it fits."""

    device: str
    dtype: torch.dtype
    key_width: int
    value_width: int

    @classmethod
    def of(cls, read: ReadArgs) -> Facts:
        return cls(read.q.device.type, read.q.dtype, read.q.shape[-1], read.values.data.shape[-1])


# One request's reads in, its output out. A batch is a sequence of requests.
Attention: TypeAlias = Callable[[Sequence[Sequence[ReadArgs]]], list[Output]]


def candidates(library: Library) -> list[tuple[str, Callable[[Facts], str | None], Attention]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.multi_read_attention import cpu, eager, native, reference, triton

    compiled = native.NativeAttention(library)
    return [
        ("native", compiled.supports, compiled),
        ("cpu", cpu.supports, cpu.multi_read_attention),
        ("triton", triton.supports, triton.multi_read_attention),
        ("reference", reference.supports, reference.multi_read_attention),
        ("eager", eager.supports, eager.multi_read_attention),  # never in the reference's place unless asked for
    ]
