"""Multi-read attention by flash-attn 2: one ``flash_attn_with_kvcache`` a read, then the merge of all device versions.

Of a read's ``length`` entries, flash-attn lets row ``b`` of B see a band along the diagonal that ends in the bottom
right corner, ``b + length - B - left .. b + length - B + right``, both inclusive. FOLD's near read is one (left = D -
1, no end to the right), its far read is causal (right = 0) over n - W entries, and so is a target's. Keys and values
lie in the same places of the same pages: a ring of keys beside pages of values cannot be read (``layout=paper`` keeps
none). Runs only when it is asked for (``--kernels flash-attn``); reads that are no such band are refused.

Of the pages that a read begins in, what is before its first entry must be numbers, as older entries of a request are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch

from foldspec.errors import UsageError
from foldspec.kernels.multi_read_attention import Facts, Output, ReadArgs, triton
from foldspec.kernels.multi_read_attention.device import DeviceOutput, DeviceRead, facts_of, merge

__all__ = ["Band", "band", "device_part", "multi_read_attention", "supports"]

PAGE = 256  # flash-attn's pages are multiples of it, and so it can read larger ones as several
WIDEST = 256  # of a head
DEVICE = "cuda"


def supports(facts: Facts) -> str | None:
    if facts.device != DEVICE:
        return f"runs on a GPU, not on {facts.device}"
    if facts.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in half precision alone, not in {str(facts.dtype).removeprefix('torch.')}"
    if facts.key_width != facts.value_width:
        return f"needs keys and values of one width, not {facts.key_width} and {facts.value_width}"
    if facts.key_width > WIDEST or facts.key_width % 8:
        return f"has heads of a multiple of 8 up to {WIDEST}, not of {facts.key_width}"
    try:
        import flash_attn
    except ImportError:
        return "flash-attn is not installed"
    if not flash_attn.__version__.startswith("2.") or not hasattr(flash_attn, "flash_attn_with_kvcache"):
        return f"is written for flash-attn 2, not {flash_attn.__version__}"
    return None


class Band(NamedTuple):
    """What rows see of ``length`` entries; ``left`` and ``right`` as above, -1 where there is no end."""

    length: int
    left: int
    right: int


@lru_cache(maxsize=64)
def band(first: tuple[int, ...], last: tuple[int, ...]) -> Band | None:
    """The band in which each row sees its entries ``first .. last-1``; a row that sees nothing may be anywhere in it.
    None if there is none."""
    seen = [(b, f, l) for b, (f, l) in enumerate(zip(first, last, strict=True)) if f < l]
    length = max((l for _, _, l in seen), default=0)
    diagonal = length - len(first)
    lefts = {b + diagonal - f for b, f, _ in seen if f > 0}
    rights = {l - 1 - b - diagonal for b, _, l in seen if l < length}
    if len(lefts) > 1 or len(rights) > 1 or min(lefts | rights, default=0) < 0:
        return None
    found = Band(length, *(side.pop() if side else -1 for side in (lefts, rights)))
    for b, f, l in seen:  # those that begin or end with the entries
        low = 0 if found.left < 0 else max(0, b + diagonal - found.left)
        high = length if found.right < 0 else min(length, b + diagonal + found.right + 1)
        if (low, high) != (f, l):
            return None
    return found


def device_part(read: DeviceRead, left: int, right: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A read whose rows see what a band says: its averages [R, B, heads, dv] in the dtype of q and log masses [R, B,
    heads]. Reads no number on the host."""
    from flash_attn import flash_attn_with_kvcache

    assert read.page % PAGE == 0 and not read.ring, "in pages that flash-attn can read"
    assert read.key_table.data_ptr() == read.value_table.data_ptr(), "keys and values lie in the same places"
    empty = read.last <= read.first
    o, lse = flash_attn_with_kvcache(
        read.q,
        *(pool.unflatten(0, (-1, read.page)) for pool in (read.keys, read.values)),
        cache_seqlens=read.last.masked_fill(empty, 0).amax(1),
        block_table=read.key_table,
        softmax_scale=read.scale,
        causal=right == 0,
        window_size=(left, right or -1),
        return_softmax_lse=True,
    )
    # by count: what flash-attn says of a row that sees nothing (its mass is +inf) is no one's promise
    return o, lse.transpose(1, 2).masked_fill(empty[..., None], -torch.inf)


class _Placed(NamedTuple):
    """A read by pages: its band, the pages, and its bounds counted from the beginning of the first page."""

    band: Band
    pages: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]


def multi_read_attention(batch: Sequence[Sequence[ReadArgs]]) -> list[Output]:
    """Requests whose reads have the same bands and pools go together. Raises :class:`UsageError` for what flash-attn
    cannot read."""
    placed = [[_place(read) for read in reads] for reads in batch]
    groups: dict[Any, list[int]] = {}
    for i, (reads, places) in enumerate(zip(batch, placed, strict=True)):
        groups.setdefault(tuple(map(_kind, reads, places)), []).append(i)
    outputs: list[Output | None] = [None] * len(batch)
    for members in groups.values():
        bands = [place.band for place in placed[members[0]]]
        together = [
            _together([batch[i][j] for i in members], [placed[i][j] for i in members]) for j in range(len(bands))
        ]
        parts = [device_part(read, b.left, b.right) for read, b in zip(together, bands, strict=True)]
        found = _merge(together, parts)
        for at, i in enumerate(members):
            outputs[i] = Output(found.out[at], found.lse[:, at])
    return [output for output in outputs if output is not None]


def _merge(reads: Sequence[DeviceRead], parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DeviceOutput:
    fits = triton.supports(facts_of(reads[0])) is None and len(reads) <= triton.MOST_READS
    return (triton.merge if fits else merge)(reads, parts)


def _kind(read: ReadArgs, place: _Placed) -> tuple[Any, ...]:
    """What reads of different requests must have in common to be one call."""
    pools = [(x.data_ptr(), x.shape, x.stride()) for x in (read.keys.data, read.values.data)]
    return len(read.first), *pools, place.band.left, place.band.right, read.scale, read.exponent


def _place(read: ReadArgs) -> _Placed:
    found = _pages(read.values.runs)
    if found is None or len(read.values.data) % PAGE:
        what = f"entries must follow one another in pages of a multiple of {PAGE}"
        _refuse(what, f"use --page-size {PAGE} and a context method that leaves none out")
    if _pages(read.keys.runs) != found or len(read.keys.data) != len(read.values.data):
        _refuse("keys must lie where their values do", "use --context-opt layout=paper, which keeps no ring of keys")
    start, pages = found
    # the bounds of a row that sees nothing may be anything
    bounds = [(f + start, l + start) if f < l else (0, 0) for f, l in zip(read.first, read.last, strict=True)]
    first, last = zip(*bounds, strict=True)
    along = band(first, last)
    if along is None:
        _refuse("rows must see a band of entries along the diagonal", "use another context method")
    return _Placed(along, pages, first, last)


def _refuse(what: str, do: str) -> NoReturn:
    raise UsageError(f"flash-attn: {what}", where="--kernels", do=f"{do}, or leave --kernels out")


# The layers of a forward share runs and bounds.
@lru_cache(maxsize=64)
def _pages(runs: tuple[tuple[int, int], ...]) -> tuple[int, tuple[int, ...]] | None:
    """The place of the first entry in its page, and the pages in order; None if a run cuts a page short."""
    runs = tuple(run for run in runs if run[1])
    if any(slot % PAGE for slot, _ in runs[1:]) or any((slot + count) % PAGE for slot, count in runs[:-1]):
        return None
    pages = tuple(page for slot, count in runs for page in range(slot // PAGE, (slot + count - 1) // PAGE + 1))
    return (runs[0][0] % PAGE if runs else 0), pages


def _together(column: Sequence[ReadArgs], places: Sequence[_Placed]) -> DeviceRead:
    """The reads of several requests as one."""
    one, device = column[0], column[0].q.device
    most = max(1, *(len(place.pages) for place in places))
    table = torch.stack([_numbers(place.pages, most, device) for place in places])
    first, last = (
        torch.stack([_numbers(bounds, len(bounds), device) for bounds in each])
        for each in ([place.first for place in places], [place.last for place in places])
    )
    q = torch.stack([read.q for read in column])
    return DeviceRead(
        q, one.keys.data, one.values.data, table, table, first, last, one.scale, exponent=one.exponent, page=PAGE
    )


@lru_cache(maxsize=64)
def _numbers(numbers: tuple[int, ...], length: int, device: torch.device) -> torch.Tensor:
    """int32 [length], zeros behind the numbers."""
    return torch.tensor(numbers + (0,) * (length - len(numbers)), dtype=torch.int32).to(device)
