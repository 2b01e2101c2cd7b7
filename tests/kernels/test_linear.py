"""The compiled products and gates: right to float64 over odd shapes, nothing read or written outside, and a row's bits
the same whatever the other rows and the threads."""

from __future__ import annotations

import ctypes
from functools import partial

import native
import pytest
import torch
import torch.nn.functional as F
from native import INSTRUCTIONS, ROWS, guarded, kernels, margins

from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.kernels.linear import Facts
from foldspec.kernels.linear.panels import rows as rows_of
from foldspec.kernels.pack.reference import pack

# rows, out, in: tails of every vector width, odd columns, tiles that are not full, a band's edge (24)
SHAPES = [(1, 1, 1), (5, 7, 13), (8, 3, 16), (16, 24, 17), (33, 50, 31), (7, 25, 100), (2, 49, 576), (12, 72, 64)]
HELD = (torch.float32, torch.bfloat16)


def drawn(rows: int, out: int, width: int, held: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias between NaN."""
    draw = torch.Generator().manual_seed(rows * out + width)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((rows, width), (out, width), (out,)))
    return guarded(x), guarded(weight.to(held)), guarded(bias)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A packed copy, between NaN as the original."""
    to = guarded(weight) if weight.is_floating_point() else torch.empty_like(weight)
    pack(weight, to)
    return to


@pytest.mark.parametrize("held", HELD, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_product_is_right(instructions: str, shape: tuple[int, int, int], held: torch.dtype) -> None:
    x, weight, bias = drawn(*shape, held)
    plain = x.double() @ weight.double().T
    run = kernels(instructions)
    for b, wanted in ((None, plain), (bias, plain + bias.double())):
        y = run.linear(x, packed(weight), b, packed=True)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), wanted, atol=3e-6 * shape[2] ** 0.5, rtol=0)


@pytest.mark.parametrize("held", HELD, ids=str)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_nothing_is_written_outside(instructions: str, held: torch.dtype) -> None:
    """A kernel for 8 rows that is given 5 must not write 8."""
    kernels(instructions)
    library = native.library(instructions)
    for rows, out, width in SHAPES:
        x, weight, _ = drawn(rows, out, width, held)
        y = guarded(torch.zeros(rows, out), fill=-7.0)
        arguments = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3 + [ctypes.c_int] * 3
        run = library.function("linear", arguments)
        half = int(held == torch.bfloat16)
        run(x.data_ptr(), packed(weight).data_ptr(), None, None, y.data_ptr(), rows, out, width, half, 2, library.isa)
        assert bool((margins(y) == -7.0).all()) and bool(y.isfinite().all())


@pytest.mark.parametrize("held", HELD, ids=str)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_row_has_the_same_bits_alone_and_among_others(instructions: str, held: torch.dtype) -> None:
    run = kernels(instructions)
    x, weight, bias = drawn(40, 101, 147, held)
    weight, plus = packed(weight), drawn(40, 1, 101, held)[0]
    torch.set_num_threads(1)
    alone = torch.cat([run.linear(x[i : i + 1], weight, bias, plus[i : i + 1], packed=True) for i in range(40)])
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for rows in ROWS:
            for start in (0, 40 - rows):
                part = slice(start, start + rows)
                assert torch.equal(run.linear(x[part], weight, bias, plus[part], packed=True), alone[part])


@pytest.mark.parametrize("held", HELD, ids=str)
def test_threads_share_a_product_large_enough_to_be_shared(held: torch.dtype) -> None:
    run = kernels("portable")
    x, weight, bias = drawn(3, 4000, 500, held)
    weight = packed(weight)
    outs = []
    for threads in (1, 2, 3, 2, 7):
        torch.set_num_threads(threads)
        outs += [run.linear(x, weight, bias, packed=True) for _ in range(5)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_rows_may_be_views_and_weights_whole_panels_of_others() -> None:
    run = kernels("portable")
    x, weight, bias = drawn(6, 80, 10, torch.float32)
    weight = packed(weight)
    wanted = run.linear(x[::2, :10].clone(), weight, bias, packed=True)
    assert torch.equal(run.linear(x[::2, :10], weight, bias, packed=True), wanted)
    assert torch.equal(run.linear(x[::2], weight[32:], bias[32:], packed=True), wanted[:, 32:])
    assert run.linear(x[:0], weight, packed=True).shape == (0, 80)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_what_the_product_joins_is_added_to_it(instructions: str) -> None:
    run = kernels(instructions)
    x, weight, bias = drawn(9, 37, 20, torch.float32)
    plus = torch.randn(9, 37, generator=torch.Generator().manual_seed(1))
    wanted = plus.double() + x.double() @ weight.double().T + bias.double()
    for y in (run.linear(x, packed(weight), bias, plus, packed=True), Kernels().linear(x, weight, bias, plus)):
        torch.testing.assert_close(y.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 3), (7, 7), (16, 5), (16, 16), (40, 1), (33, 8), (2100, 17), (48, 6)], ids=str
)
def test_packed_rows_are_found_again(shape: tuple[int, int]) -> None:
    weight = torch.arange(shape[0] * shape[1]).view(shape)
    held = packed(weight)
    assert sorted(held.flatten().tolist()) == weight.flatten().tolist()
    ids = torch.randint(shape[0], (50,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows_of(held, ids), weight[ids])
    for panel in range(0, shape[0], 16):  # by its definition: [in, rows of the panel]
        assert torch.equal(held[panel : panel + 16].flatten(), weight[panel : panel + 16].T.flatten())


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_product_over_nothing_is_zero(instructions: str) -> None:
    y = kernels(instructions).linear(torch.empty(2, 0), torch.empty(3, 0), packed=True)
    assert torch.equal(y, torch.zeros(2, 3))


def test_the_definition_widens_what_is_held_narrow() -> None:
    x, weight, bias = drawn(4, 6, 8, torch.bfloat16)
    y = Kernels("reference").linear(x, weight, bias)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight.float(), bias), atol=0, rtol=0)


def test_what_does_not_fit_runs_on_torch_and_says_why() -> None:
    chosen = Kernels("auto", native.library("portable"))
    for facts, reason in (
        (Facts("cuda", torch.bfloat16, torch.bfloat16), "runs on a CPU, not on cuda"),
        (Facts("cpu", torch.float32, torch.float32), "reads weights in panels, not as a checkpoint has them"),
        (Facts("cpu", torch.float64, torch.float64), "computes in float32, not in float64"),
        (Facts("cpu", torch.float32, torch.float16), "takes weights as float32 or bfloat16, not float16"),
    ):
        chosen.choose("linear", facts)
        assert chosen.choices[-1] == ("linear", "reference", (("native", reason),))
        assert not chosen.compiles("linear", facts)
    assert Kernels().notices == ()
    without = Kernels("auto", Library(None))
    without.choose("linear", Facts("cpu", torch.float32, torch.float32))
    assert without.choices[-1].refused == (("native", "not compiled: no folder to build in was named"),)


# ------------------------------------------------------------------------------------------------------------ gate_mul

GATES = {"silu_mul": F.silu, "gelu_mul": partial(F.gelu, approximate="tanh")}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_gate_is_right_at_every_size(instructions: str, name: str) -> None:
    run = getattr(kernels(instructions), name)
    for count in (1, 3, 7, 8, 15, 16, 17, 100, 1531):
        x, up, _ = drawn(2, 1, count, torch.float32)
        gate = 8 * x[:1]
        y = run(gate, up)
        wanted = GATES[name](gate.double()) * up.double()
        torch.testing.assert_close(y.double(), wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_gate_of_extremes(instructions: str, name: str) -> None:
    run = getattr(kernels(instructions), name)
    gate = torch.tensor([[-1e30, -200.0, -88.5, -0.0, 0.0, 88.5, 200.0, 1e30, torch.inf, torch.nan]])
    y, gate = run(gate, torch.ones(1, 10))[0], gate[0]
    assert y[:5].abs().max() < 1e-6 and torch.equal(y[5:9], gate[5:9]) and bool(y[9].isnan())


@pytest.mark.parametrize("width", [48, 40, 577, 1531, 16384])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_gate_of_a_row_has_the_same_bits_among_others(instructions: str, width: int) -> None:
    """As torch's does not, where widths leave a remainder."""
    draw = torch.Generator().manual_seed(width)
    gate, up = (3 * torch.randn(33, width, generator=draw) for _ in range(2))
    for run in (getattr(kernels(instructions), name) for name in GATES):
        alone = torch.cat([run(gate[i : i + 1], up[i : i + 1]) for i in range(33)])
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in ROWS:
                assert torch.equal(run(gate[:rows], up[:rows]), alone[:rows])
