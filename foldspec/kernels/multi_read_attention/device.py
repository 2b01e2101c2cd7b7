"""Multi-read attention with its numbers on the device: what changes from round to round is in tensors of fixed shape,
so that a round can be recorded once and replayed. Tables of pages stand in the place of runs of slots.

The equation is that of the operator (``__init__.py``). ``device_reference`` is the definition; ``triton.py`` has the
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from foldspec.kernels.multi_read_attention import Facts

__all__ = ["DeviceAttention", "DeviceOutput", "DeviceRead", "device_candidates", "device_reference", "facts_of"]


@dataclass(frozen=True)
class DeviceRead:
    """One read by the blocks of R requests, B rows each.

    ``q``            [R, B, heads, d] rotated for this read, of any strides but 1 in the last
    ``keys``         [slots, kv heads, d] and ``values`` [slots, kv heads, dv]: one layer of a pool, in the dtype of q
    ``key_table``    int32 [R, P]: entry ``e`` of request ``r`` lies at slot ``table[r, e // page] * page + e % page``;
                     ``value_table`` the same for values, int32 [R, P]. What no row reaches may hold anything
    ``first``        int32 [R, B], contiguous, with ``last``: row ``b`` sees the entries ``first .. last-1``, of all
                     ``P * page``; none if ``last <= first``
    ``scale``        the whole factor of the logits; the read weighs ``(sum exp(scale * q . k)) ** exponent``
    ``page``         entries a page, a power of two
    ``ring``         0, or: the key (never the value) of entry ``e`` lies at slot ``key_table[r, 0] + e % ring``. The
                     rows of a request together then reach over no more than ``ring`` entries
    ``splits``       how many programs share a request's entries on a GPU; 0: chosen from what the tables have room for.
                     It changes the order of sums alone

    Entries from a request's smallest ``first`` to its largest ``last``, of rows that see any, hold numbers; everything
    else in the pools may be NaN.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    key_table: torch.Tensor
    value_table: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    scale: float
    exponent: float = 1.0
    page: int = 256
    ring: int = 0
    splits: int = 0

    def __post_init__(self) -> None:
        requests, rows, heads, width = self.q.shape
        assert self.keys.shape[1:] == (self.values.shape[1], width) and heads % self.keys.shape[1] == 0
        assert self.page > 0 and self.page & (self.page - 1) == 0 and self.ring >= 0, "a page is a power of two"
        assert self.q.dtype == self.keys.dtype == self.values.dtype, "one dtype"
        assert self.q.stride(3) == self.keys.stride(2) == self.values.stride(2) == 1, "rows lie in one piece"
        tables = (self.key_table, self.value_table)
        assert all(t.dtype == torch.int32 and t.shape[0] == requests and t.stride(1) == 1 for t in tables)
        assert self.ring or self.key_table.shape == self.value_table.shape, "tables of one length"
        bounds = (self.first, self.last)
        assert all(b.dtype == torch.int32 and b.shape == (requests, rows) and b.is_contiguous() for b in bounds)

    @property
    def entries(self) -> int:
        """The most entries of a request that the tables have room for."""
        return self.value_table.shape[1] * self.page


class DeviceOutput(NamedTuple):
    """``out`` [R, B, heads, dv] in the dtype of q; ``lse`` [reads, R, B, heads], natural, in fp32 (float64 for float64
    inputs): -inf where a row's read is empty."""

    out: torch.Tensor
    lse: torch.Tensor


# (reads of the same requests and rows, where ``out`` goes if that has a place) -> output. No value is read on the host.
DeviceAttention: TypeAlias = Callable[[Sequence[DeviceRead], torch.Tensor | None], DeviceOutput]


def device_candidates() -> list[tuple[str, Callable[[Facts], str | None], DeviceAttention]]:
    """Implementations in order of preference: (name, supports -> None or the reason why not, function)."""
    from foldspec.kernels.multi_read_attention import reference, triton

    return [
        ("triton", triton.supports, triton.device_attention),
        ("reference", reference.supports, device_reference),
    ]


def facts_of(read: DeviceRead) -> Facts:
    return Facts(read.q.device.type, read.q.dtype, read.q.shape[-1], read.values.shape[-1])


def device_reference(reads: Sequence[DeviceRead], out: torch.Tensor | None = None) -> DeviceOutput:
    """The definition: dense scores over everything that the tables have room for. Reads no value on the host, and every
    shape follows from shapes."""
    parts = [_attend(read) for read in reads]
    lse = torch.stack([mass for _, mass in parts])
    z = torch.stack([read.exponent * mass for read, (_, mass) in zip(reads, parts, strict=True)])
    weight = z.softmax(0).nan_to_num(0.0)
    merged = (weight[..., None] * torch.stack([o for o, _ in parts])).sum(0)
    if out is None:
        return DeviceOutput(merged.to(reads[0].q.dtype), lse)
    return DeviceOutput(out.copy_(merged), lse)


def _attend(read: DeviceRead) -> tuple[torch.Tensor, torch.Tensor]:
    """A read's softmax averages [R, B, heads, dv] and log masses [R, B, heads]."""
    wide = torch.promote_types(read.q.dtype, torch.float32)
    requests, rows, heads, width = read.q.shape
    entry = torch.arange(read.entries, device=read.q.device)
    seen = (entry >= read.first[..., None]) & (entry < read.last[..., None])  # [R, B, entries]
    reached = seen.any(1)
    value_slots = read.value_table.long()[:, entry // read.page] * read.page + entry % read.page
    if read.ring:
        key_slots = read.key_table[:, :1].long() + entry % read.ring
    else:
        key_slots = read.key_table.long()[:, entry // read.page] * read.page + entry % read.page
    # what no row reaches may hold anything, its place in the table too: slot 0 and zeros stand for it
    keys, values = (
        pool[slots.where(reached, 0)].to(wide).masked_fill(~reached[..., None, None], 0.0)
        for pool, slots in ((read.keys, key_slots), (read.values, value_slots))
    )
    q = read.q.to(wide).reshape(requests, rows, keys.shape[2], -1, width)
    scores = torch.einsum("rbkgd,rekd->rbkge", q, keys) * read.scale
    scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
    probabilities = scores.softmax(-1).masked_fill(~seen.any(-1)[:, :, None, None, None], 0.0)
    o = torch.einsum("rbkge,rekd->rbkgd", probabilities, values)
    return o.reshape(requests, rows, heads, -1), scores.logsumexp(-1).reshape(requests, rows, heads)
