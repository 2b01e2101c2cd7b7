"""The Triton kernels of attention against FOLD's equations in float64. Buffers are NaN before anybody writes them, and so
is all memory that no row sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import folded
import pytest
import torch
from folded import Case

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


def check(output: DeviceOutput, expected: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    assert output.out.dtype == dtype and output.lse.dtype == torch.float32
    for i, (out, lse) in enumerate(expected):
        assert distance(output.out[i], out) < tolerance
        assert torch.equal(output.lse[:, i].isinf(), lse.isinf())
        some = ~lse.isinf()
        assert distance(output.lse[:, i][some], lse[some]) < tolerance


def run(case: Case, splits: tuple[int, int] = (1, 2)) -> DeviceOutput:
    reads, _ = folded.made(case)
    return device_attention([replace(read, splits=count) for read, count in zip(reads, splits, strict=True)])


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
    reads, expected = folded.made(case)
    check(device_attention([replace(read, splits=1 + i) for i, read in enumerate(reads)]), expected, case.dtype)
