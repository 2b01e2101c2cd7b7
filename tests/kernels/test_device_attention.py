"""Attention whose numbers stay on the device: its definition against the operator's, which the tests of that compare
with loops over entries; and that it asks the device for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import Entries, ReadArgs
from foldspec.kernels.multi_read_attention.device import DeviceRead, device_reference
from foldspec.kernels.multi_read_attention.reference import multi_read_attention

REQUESTS, ROWS, HEADS, KV, WIDTH, VALUE, PAGES = 3, 4, 6, 2, 10, 6, 5


def drawn(page: int, ring: int, seed: int) -> DeviceRead:
    """Requests of different lengths, one of them empty, in pages out of order; NaN and impossible pages wherever
    nothing may be read."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.full((slots, KV, width), torch.nan, dtype=torch.float64)
        for slots, width in ((REQUESTS * (ring or PAGES * page), WIDTH), (REQUESTS * PAGES * page, VALUE))
    )
    tables = torch.full((2, REQUESTS, PAGES), 2**31 - 1, dtype=torch.int32)
    first, last = torch.zeros(2, REQUESTS, ROWS, dtype=torch.int32)
    for r, length in enumerate((3 * page + 5, 0, page)):
        reach = min(length, ring or length)
        last[r] = torch.tensor([length - ROWS + b + 1 for b in range(ROWS)]) if length else 0
        first[r] = torch.tensor([length - reach + b % 2 for b in range(ROWS)]) if length else 0
        first[r, 2] = last[r, 2] + 2  # a row that sees nothing
        used = -(-length // page)
        for table, pool in zip(tables, (keys, values), strict=True):
            table[r, :used] = torch.randperm(PAGES, generator=draw)[:used] * REQUESTS + r
            in_ring = pool is keys and ring
            if in_ring:
                table[r, 0] = r * ring
            for e in range(length - reach, length):
                slot = r * ring + e % ring if in_ring else table[r, e // page] * page + e % page
                pool[slot] = torch.randn(KV, pool.shape[2], generator=draw, dtype=torch.float64)
    q = torch.randn(REQUESTS, ROWS, HEADS, WIDTH, generator=draw, dtype=torch.float64)
    return DeviceRead(q, keys, values, tables[0], tables[1], first, last, 0.3, page=page, ring=ring)


def arguments(read: DeviceRead, request: int) -> ReadArgs:
    """The read of one request as the operator takes it, an entry a run."""
    first, last = read.first[request].tolist(), read.last[request].tolist()
    seen = [(f, l) for f, l in zip(first, last, strict=True) if f < l]
    low, high = min((f for f, _ in seen), default=0), max((l for _, l in seen), default=0)

    def runs(table: torch.Tensor, ring: int) -> tuple[tuple[int, int], ...]:
        pages = table[request].tolist()
        slots = [
            pages[0] + e % ring if ring else pages[e // read.page] * read.page + e % read.page for e in range(low, high)
        ]
        return tuple((slot, 1) for slot in slots)

    keys, values = Entries(read.keys, runs(read.key_table, read.ring)), Entries(read.values, runs(read.value_table, 0))
    bounds = tuple(max(0, f - low) for f in first), tuple(max(0, l - low) for l in last)
    return ReadArgs(read.q[request], keys, values, *bounds, read.scale, read.exponent)


@pytest.mark.parametrize("page", [16, 4])
@pytest.mark.parametrize("ring", [0, 11])
def test_the_definition_is_the_operators(page: int, ring: int) -> None:
    """Alone and as the second of two reads, the first over other entries."""
    one, two = drawn(page, ring, 1), replace(drawn(16, 0, 2), scale=0.9, exponent=1 / 3)
    for reads in ([one], [one, two], [two, one]):
        found = device_reference(reads)
        wanted = multi_read_attention([[arguments(read, r) for read in reads] for r in range(REQUESTS)])
        for r in range(REQUESTS):
            torch.testing.assert_close(found.out[r], wanted[r].out, atol=1e-12, rtol=0)
            torch.testing.assert_close(found.lse[:, r], wanted[r].lse, atol=1e-12, rtol=0)
        assert found.out.isfinite().all() and (found.out[1] == 0).all()
        assert (found.out[0, 0] != 0).all()


def test_it_writes_where_it_is_told() -> None:
    read = drawn(16, 0, 3)
    wanted = device_reference([read])
    place = torch.full((REQUESTS, ROWS, 2 * HEADS, VALUE), torch.nan, dtype=torch.float64)
    found = Kernels().device_attention([read], place[:, :, ::2])
    assert torch.equal(place[:, :, ::2], wanted.out) and found.out.data_ptr() == place.data_ptr()
    assert place[:, :, 1::2].isnan().all() and torch.equal(found.lse, wanted.lse)


def test_no_number_comes_to_the_host() -> None:
    """Where tensors have shapes alone, a read of a value, or a shape that follows from values, is an error."""
    with FakeTensorMode() as mode:
        read = DeviceRead(
            torch.empty(REQUESTS, ROWS, HEADS, WIDTH),
            torch.empty(64, KV, WIDTH),
            torch.empty(64, KV, VALUE),
            *(torch.empty(REQUESTS, PAGES, dtype=torch.int32) for _ in range(2)),
            *(torch.empty(REQUESTS, ROWS, dtype=torch.int32) for _ in range(2)),
            scale=0.3,
            page=16,
        )
        found = device_reference([read, replace(read, ring=20, exponent=0.5)])
        assert found.out.shape == (REQUESTS, ROWS, HEADS, VALUE) and found.lse.shape == (2, REQUESTS, ROWS, HEADS)
        assert found.out.fake_mode is mode
