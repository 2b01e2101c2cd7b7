"""Packing: the compiled bytes are those of the definition, and nothing is written beside them."""

from __future__ import annotations

import native
import pytest
import torch
from native import guarded, margins

from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.kernels.pack import Facts
from foldspec.kernels.pack.reference import pack

# rows, width: narrow panels, columns that no block divides, a line and a half of the cache, powers of two
SHAPES = [(1, 1), (7, 3), (15, 40), (16, 1), (16, 8), (16, 33), (33, 50), (48, 36), (64, 2048), (2100, 17)]
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def drawn(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Bits of every kind: NaNs, infinities and subnormals too."""
    size, draw = dtype.itemsize, torch.Generator().manual_seed(sum(shape))
    return torch.randint(256, (shape[0], shape[1] * size), dtype=torch.uint8, generator=draw).view(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BITS[x.dtype])


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", BITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_are_those_of_the_definition(shape: tuple[int, int], stored: torch.dtype, held: torch.dtype) -> None:
    rows = drawn(shape, stored)
    if stored != held and (stored, held) != (torch.bfloat16, torch.float32):
        rows[rows.isnan()] = 0  # torch narrows a NaN to one or another, as it comes
    wanted, to = torch.empty(shape, dtype=held), guarded(torch.zeros(shape, dtype=held), fill=-7.0)
    pack(rows, wanted)
    for first in range(0, shape[0], 16):  # the definition in other words: the columns of a panel, one after another
        columns = torch.cat([rows[first : first + 16, k].to(held) for k in range(min(shape[1], 99))])
        assert torch.equal(bits(columns), bits(wanted[first : first + 16].flatten()[: len(columns)]))
    kernels = native.kernels("portable")
    kernels.pack(guarded(rows), to)
    assert torch.equal(bits(to), bits(wanted)) and bool((margins(to) == -7.0).all())


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_parts_of_whole_panels_make_the_whole(kernels: str) -> None:
    run = Kernels(kernels, native.library("portable"))
    rows = torch.randn(150, 37).bfloat16()
    whole, parts = torch.empty(150, 37), torch.empty(150, 37)
    run.pack(rows, whole)
    for piece, to in zip(rows.split(48), parts.split(48), strict=True):
        run.pack(piece, to)
    assert torch.equal(whole, parts)


def test_what_does_not_fit_runs_on_torch_and_says_why() -> None:
    chosen = Kernels("auto", native.library("portable"))
    for facts, reason in (
        (Facts("cuda", torch.float32), "runs on a CPU, not on cuda"),
        (Facts("cpu", torch.float16), "packs float32 or bfloat16, not float16"),
    ):
        chosen.choose("pack", facts)
        assert chosen.choices[-1] == ("pack", "reference", (("native", reason),))
    rows, to = torch.randn(20, 5), torch.empty(20, 5)
    Kernels("auto", Library(None)).pack(rows, to)
    assert torch.equal(to[:16].flatten(), rows[:16].T.flatten()) and torch.equal(
        to[16:].flatten(), rows[16:].T.flatten()
    )
