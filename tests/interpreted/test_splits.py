"""However a read is split, and wherever its parts come from: the Triton merge gives the numbers of the definition."""

from __future__ import annotations

import itertools
from dataclasses import replace

import flash_stand_in
import folded
import pytest
import torch
from folded import Case

from foldspec.kernels.multi_read_attention import device, triton
from foldspec.kernels.multi_read_attention.splits import SPLITS

COUNTS = [(1, 64), (64, 1), (8, 16), (64, 64)]


def test_splits_change_the_order_of_sums_alone() -> None:
    """Also where most of them are empty, and where a request has no far entries at all."""
    reads, expected = folded.made(Case((1, 200), block=7, group=2, alpha=2.0, width=64, page=256))
    assert set(itertools.chain(*COUNTS)) <= set(SPLITS)
    outputs = [
        triton.device_attention([replace(read, splits=n) for read, n in zip(reads, counts, strict=True)])
        for counts in COUNTS
    ]
    for output in outputs:
        for i, (out, lse) in enumerate(expected):
            assert float((output.out[i].double() - out).norm() / out.norm()) < 1e-6
            assert torch.equal(output.lse[:, i].isinf(), lse.isinf())
    assert any(not torch.equal(a.out, b.out) for a, b in itertools.pairwise(outputs))  # they were split otherwise


def test_parts_from_elsewhere() -> None:
    """Of one, two and three reads, rows without entries among them: as the definition merges them."""
    draw = torch.Generator().manual_seed(0)
    (near, far), _ = folded.made(Case((1, 60), block=3, group=3, kv=2, alpha=2.0, width=64, page=256))
    near, far = (replace(read, exponent=exponent) for read, exponent in ((near, 1.0), (far, 0.5)))
    requests, block, heads, width = near.q.shape
    parts = []
    for _ in range(3):
        o, lse = (torch.randn(requests, block, heads, *more, generator=draw) for more in ((width,), ()))
        lse[0, 2], lse[1] = -torch.inf, 20 * lse[1]
        o[0, 2] = torch.nan
        parts.append((o, lse))
    for reads in ([near], [near, far], [far, near, far]):
        given = parts[: len(reads)]
        sound = [(o.nan_to_num(0.0), lse) for o, lse in given]
        place = torch.full((requests, block, heads, 2, width), torch.nan)
        found, wanted = triton.merge(reads, given, place[..., 0, :]), device.merge(reads, sound)
        assert found.out.data_ptr() == place.data_ptr() and place[..., 1, :].isnan().all()
        torch.testing.assert_close(found.out, wanted.out, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.lse, wanted.lse, atol=1e-6, rtol=1e-6)


def test_flash_attn_shares_the_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tests, once over, with the merge that a GPU runs."""
    from kernels import test_flash_attention as own

    calls = flash_stand_in.install(monkeypatch)
    merged: list[int] = []
    merge = triton.merge

    def listen(reads: object, parts: list[object], out: object = None) -> object:
        merged.append(len(parts))
        return merge(reads, parts, out)  # type: ignore[arg-type]

    monkeypatch.setattr(triton, "merge", listen)
    for n in (1, 33):
        reads = own.fold_reads(n, 7, 32, 2.0, (4, 2, 16))
        own.check(own.run(reads), own.by_hand(reads), torch.bfloat16)
    assert merged == [2, 2] and len(calls) == 4
