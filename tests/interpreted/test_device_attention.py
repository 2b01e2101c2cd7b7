"""The Triton kernels of attention against FOLD's equations in float64. Buffers are NaN before anybody writes them, and
so is all memory that no row sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import brute
import folded
import pytest
import torch
from folded import Case

from foldspec.kernels.multi_read_attention import Entries, ReadArgs, reference, triton
from foldspec.kernels.multi_read_attention.device import DeviceOutput
from foldspec.kernels.multi_read_attention.triton import device_attention

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
BLOCKS, GROUPS, ALPHAS, WIDTHS = (7, 10, 16), (1, 3, 4, 7, 16), (1.0, 2.0, 4.0), (64, 128, 256, 512)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **more: torch.full(shape, torch.nan, **more))


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


def run(case: Case, near: int = 1, far: int = 2) -> None:
    """The two reads in so many splits, against what they should come to."""
    reads, expected = folded.made(case)
    output = device_attention([replace(reads[0], splits=near), replace(reads[1], splits=far)])
    check(output, expected, case.dtype)


def check(output: DeviceOutput, expected: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    assert output.out.dtype == dtype and output.lse.dtype == torch.float32
    for i, (out, lse) in enumerate(expected):
        assert distance(output.out[i], out) < tolerance
        assert torch.equal(output.lse[:, i].isinf(), lse.isinf())
        some = ~lse.isinf()
        assert distance(output.lse[:, i][some], lse[some]) < tolerance


def selection() -> list[Case]:
    """Any two of length, block, group, alpha, head size, page and ring meet in one of these."""
    factors = {"block": BLOCKS, "group": GROUPS, "alpha": ALPHAS, "width": WIDTHS, "page": (16, 256)}
    chosen = folded.covering({**factors, "ring": (True, False), "three": (0, 1, 2)})
    cases = []
    for one in chosen:
        every = folded.lengths(one["block"])
        three = (every[:3], every[2:5], every[4:])[one.pop("three")]
        cases.append(Case(three, **one))
    return cases


@pytest.mark.parametrize("case", selection(), ids=str)
def test_fold(case: Case) -> None:
    run(case)


HALVES = [
    Case((1, 25, 40), 16, 4, 64, dtype=torch.bfloat16),
    Case((24, 150), 10, 7, 128, alpha=4.0, ring=False, page=256, dtype=torch.bfloat16),
    Case((33,), 7, 3, 512, alpha=1.0, dtype=torch.bfloat16),
    Case((31, 150), 7, 16, 64, dtype=torch.float16),
]


@pytest.mark.parametrize("case", HALVES, ids=str)
def test_half_precision(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(("near", "far"), [(1, 1), (3, 8)])
def test_any_tiles_and_splits(near: int, far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests, two kv heads, tiles that cut the rows of a block; more splits than there are entries for."""
    monkeypatch.setattr(triton, "tiles", lambda *facts: triton.Tiles(16, 16, 4, 1))
    run(Case(folded.lengths(7)[:: 1 if far == 1 else 3], 7, 3, 16, kv=2), near, far)


@pytest.mark.slow
def test_a_layer_of_llama() -> None:
    run(Case((600,), 16, 4, 128, kv=8, window=256, page=256, dtype=torch.bfloat16), 8, 8)


def test_the_oracle_is_the_papers() -> None:
    """What these tests compare with, against loops over single entries."""
    case = Case((40,), 3, 2, 8, alpha=3.0, window=5)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, generator=draw).double() for shape in ((3, 2, 8), (43, 1, 8), (43, 1, 8)))
    out, lse = folded.wanted(q, k, v, case)
    true = brute.fold(
        q,
        k,
        v,
        brute.frequencies(8),
        near=lambda r, j: 40 + r - j < 8,
        block=lambda r, m: True,
        far=lambda r, j: 40 + r - j >= 8,
        far_at=lambda r: 8 + r,
        alpha=3.0,
    )
    for found, wanted in ((out, true.out), (lse[0], true.near), (lse[1] / 3, true.far)):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_the_selection_covers() -> None:
    cases = selection()
    assert {(n - c.block, c.group) for c in cases for n in c.lengths if n > folded.WINDOW} >= {
        (folded.WINDOW, group) for group in GROUPS
    }
    for names in (("block", "group"), ("group", "width"), ("alpha", "width"), ("ring", "group"), ("page", "block")):
        met = {tuple(getattr(case, name) for name in names) for case in cases}
        assert len(met) == len({a for a, _ in met}) * len({b for _, b in met})
    assert {case.width for case in cases} == set(WIDTHS) and {case.group for case in cases} == set(GROUPS)


def test_it_writes_where_it_is_told_and_nowhere_else() -> None:
    reads, expected = folded.made(Case((30, 40), 7, 3, 16))
    place = torch.full((2, 7, 2 * 3, 16), torch.nan)
    output = device_attention(reads, place[:, :, ::2])
    assert output.out.data_ptr() == place.data_ptr() and place[:, :, 1::2].isnan().all()
    check(output, expected, torch.float32)


def test_requests_that_share_pools() -> None:
    """The operator's own form: requests of unlike lengths go together where they have the same rows, and a chunk of a
    prompt, of more rows than a tile, beside them."""
    draw = torch.Generator().manual_seed(0)
    pool = torch.full((600, 2, 24), torch.nan)
    batch = []
    for i, (rows, count) in enumerate(((4, 37), (4, 90), (40, 61), (4, 5))):
        runs = ((100 * i + 60, count // 2), (100 * i, count - count // 2))
        for slot, length in runs:
            pool[slot : slot + length] = torch.randn(length, 2, 24, generator=draw)
        last = tuple(max(0, count - rows + r + 1) for r in range(rows))
        entries = Entries(pool, runs)
        batch.append([ReadArgs(torch.randn(rows, 6, 24, generator=draw), entries, entries, (0,) * rows, last, 0.2)])
    for found, wanted in zip(triton.multi_read_attention(batch), reference.multi_read_attention(batch), strict=True):
        torch.testing.assert_close(found.out, wanted.out, atol=2e-6, rtol=0)
        torch.testing.assert_close(found.lse, wanted.lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_what_is_compiled_ahead_is_all_there_is(arch: int) -> None:
    """Every argument has its type or its value, and no variant is made for what a number happens to be."""
    known = triton.configurations(arch)
    assert len({one.name for one in known}) == len(known)
    for one in known:
        assert [name for name in one.kernel.arg_names if name not in one.constants] == list(one.signature)
        assert one.kernel.kwargs["do_not_specialize"] == range(1, len(one.signature))
        assert one.aligned == (one.kernel.arg_names[0],)
