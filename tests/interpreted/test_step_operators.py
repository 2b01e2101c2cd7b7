"""rotate_append, RMSNorm and gate_mul as Triton has them, interpreted."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import brute
import numpy as np
import pytest
import torch
from far import BEFORE, FAR, apart, empty
from native import guarded, margins

from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.gate_mul import triton_kernels as gate_mul_kernels
from foldspec.kernels.rms_norm import triton_kernels as rms_norm_kernels
from foldspec.kernels.rotate_append import Slots, triton_kernels
from foldspec.kernels.rotate_append.device import Move, page_slots, ring_slots

KERNELS = Kernels("triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}  # of the norm of what float64 gives


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(_poisoned, getattr(torch, name)))


def _poisoned(make: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> torch.Tensor:
    made = make(*arguments, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < CLOSE[found.dtype], error  # not of NaN


# -------------------------------------------------------------------------------------------------------- rotate_append


class Case(NamedTuple):
    """``turned`` of ``width`` numbers are rotated, ``still`` of their pairs by angle 0; values are ``value`` wide."""

    heads: int
    kv_heads: int
    width: int
    turned: int
    value: int
    still: int = 0


CASES = {
    "whole": Case(3, 1, 16, 16, 16),
    "partial": Case(4, 2, 24, 10, 24),
    "proportional": Case(2, 1, 16, 16, 8, still=5),
    "two numbers": Case(2, 2, 2, 2, 5),
}
PAGE, RING, FIRST = 4, 9, 27  # a ring of a pool that has three


def moves_are_right(case: Case, dtype: torch.dtype) -> None:
    """A block under FOLD: q for two reads, k in two copies, v; two requests of three rows, all parts of wider rows."""
    inverse = brute.frequencies(case.turned)
    inverse[len(inverse) - case.still :] = 0.0
    near = torch.tensor([[7, 8, 9], [0, 1, 2]])
    far = torch.tensor([[20, 21, 22]] * 2)
    sizes = [case.heads * case.width, case.kv_heads * case.width, case.kv_heads * case.value]
    joined = guarded(drawn(6, sum(sizes), dtype=dtype))
    q, k, v = (
        part.view(6, -1, width)
        for part, width in zip(joined.split(sizes, 1), (case.width, case.width, case.value), strict=True)
    )

    def angles(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = at.flatten().double()[:, None] * torch.from_numpy(inverse)
        table = guarded(torch.stack([angle.cos(), angle.sin()], 1).float())
        return table[:, :1], table[:, 1:]

    def pool(slots: int, width: int) -> torch.Tensor:
        return guarded(torch.full((slots, case.kv_heads, width), torch.nan, dtype=dtype), 7.0)

    def turned(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        rows = zip(x.double().numpy(), at.flatten().tolist(), strict=True)
        return torch.from_numpy(np.stack([[brute.rotate(head, p, inverse) for head in row] for row, p in rows]))

    tables = torch.tensor([[3, 0, 5], [2, 1, 4]], dtype=torch.int32)
    pages = page_slots(tables, near, PAGE)
    assert pages.tolist() == [0 * 4 + 3, 5 * 4, 5 * 4 + 1, 2 * 4, 2 * 4 + 1, 2 * 4 + 2]
    ring = ring_slots(torch.tensor([FIRST, FIRST - 2 * RING], dtype=torch.int32), near, RING)
    assert ring.tolist() == [FIRST + 7, FIRST + 8, FIRST, FIRST - 18, FIRST - 17, FIRST - 16]
    reads = [guarded(torch.full((6, case.heads, case.width), torch.nan, dtype=dtype), 7.0) for _ in range(2)]
    rotated, unrotated, values = pool(4 * RING, case.width), pool(24, case.width), pool(24, case.value)
    own, again = angles(near), angles(far)
    KERNELS.move_rows(
        [
            Move(q, reads[0], None, own),
            Move(q, reads[1], None, again),
            Move(k, rotated, ring, own),
            Move(k, unrotated, pages),
            Move(v, values, pages),
        ]
    )
    close(reads[0], turned(q, near))
    close(reads[1], turned(q, far))
    close(rotated[ring], turned(k, near))
    assert torch.equal(unrotated[pages], k) and torch.equal(values[pages], v)
    for data, slots in ((rotated, ring), (unrotated, pages), (values, pages)):
        others = torch.ones(len(data), dtype=torch.bool)
        others[slots] = False
        assert bool(data[others].isnan().all()), "a slot that is not ours was written"
    for data in (*reads, rotated, unrotated, values):
        assert bool((margins(data) == 7.0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_rows_go_to_every_place(name: str, dtype: torch.dtype) -> None:
    moves_are_right(CASES[name], dtype)


@pytest.mark.parametrize("slots", [(4, 5, 19, 0), torch.tensor([4, 5, 19, 0])])
def test_a_targets_rows(slots: tuple[int, ...]) -> None:
    """The form that models call, as the definition has it; slots of the host or of the device."""
    q, k, v, angle = drawn(4, 4, 16), drawn(4, 2, 16, seed=1), drawn(4, 2, 12, seed=2), drawn(4, 1, 6, seed=3)
    outputs = []
    for kernels in (KERNELS, Kernels("reference")):
        pools = torch.full((20, 2, 16), -7.0), torch.full((20, 2, 12), -7.0)
        places = slots if kernels is KERNELS else (4, 5, 19, 0)
        rotated = kernels.rotate_append(q, k, v, (angle.cos(), angle.sin()), Slots(pools[0], pools[1], places))
        outputs.append((rotated, *pools))
    for found, wanted in zip(*outputs, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    empty = torch.empty(0, 2, 16)
    KERNELS.move_rows([Move(empty, pools[0], torch.empty(0, dtype=torch.int64))])


def test_slots_and_rows_beyond_32_bits() -> None:
    rows, angle = drawn(3, 2, 32), drawn(3, 1, 16, seed=1)
    near = [torch.empty(3, 2, 32) for _ in range(2)]
    KERNELS.move_rows([Move(rows, near[0], None, (angle.cos(), angle.sin())), Move(rows, near[1])])
    last = 2 * FAR // 64
    slots = torch.tensor([last, last // 2 + 1, 7])
    pools = [empty(BEFORE + (last + 1) * 64)[BEFORE:].view(last + 1, 2, 32) for _ in range(2)]
    cos, sin = apart(angle.cos()), apart(angle.sin())
    KERNELS.move_rows([Move(apart(rows), pools[0], slots, (cos, sin)), Move(apart(rows), pools[1], slots)])
    for pool, kept in zip(pools, near, strict=True):
        assert torch.equal(torch.stack([pool[slot] for slot in slots.tolist()]), kept)


# ------------------------------------------------------------------------------------------------------------- the norm


def norm_is_right(width: int, dtype: torch.dtype, weights: torch.dtype) -> None:
    x = 3 * drawn(4, 2 * 3 * width, dtype=dtype)
    heads = guarded(x)[:, 3 * width :].view(4, 3, width)  # of a joined product
    weight = guarded(drawn(width, seed=1, dtype=weights))
    wide = heads.double()
    wanted = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt()
    found = KERNELS.rms_norm(heads, weight, 1e-2)
    assert found.dtype == dtype and found.is_contiguous()
    close(found, wanted)
    rows = heads.reshape(12, width)
    for other in (rows, rows.T.contiguous().T, rows.view(2, 2, 3, width)):  # any strides, any dimensions
        assert torch.equal(KERNELS.rms_norm(other, weight, 1e-2).view(4, 3, width), found)
    assert torch.equal(KERNELS.rms_norm(rows[3:4], weight, 1e-2), found[1, :1])
    assert torch.equal(KERNELS.rms_norm(rows[3], weight, 1e-2), found[1, 0])


@pytest.mark.parametrize(("dtype", "weights"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("width", [1, 7, 32, 72])
def test_the_norm(width: int, dtype: torch.dtype, weights: torch.dtype) -> None:
    norm_is_right(width, dtype, weights)


def test_a_weight_multiplies_before_or_after_the_cast() -> None:
    """Bit for bit as the definition rounds, in half precision."""
    x, weight = 3 * drawn(4, 64, dtype=torch.bfloat16), drawn(64, seed=1)
    found = [KERNELS.rms_norm(x, w, 1e-6) for w in (weight.bfloat16(), weight.bfloat16().float())]
    wanted = [Kernels("reference").rms_norm(x, w, 1e-6) for w in (weight.bfloat16(), weight.bfloat16().float())]
    assert not torch.equal(wanted[0], wanted[1])
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


# ------------------------------------------------------------------------------------------------------------- the gate


def gate_is_right(gate: Literal["silu", "gelu"], dtype: torch.dtype) -> None:
    joined = guarded(torch.cat([8 * drawn(3, 1100), drawn(3, 1100, seed=1)], 1).to(dtype))
    joined[0, :8] = torch.tensor([0.0, -0.0, 90.0, -90.0, 200.0, -200.0, 1e-4, -1e-4])
    x, up = joined.split(1100, 1)
    wide = x.double()
    if gate == "silu":
        wanted = wide * torch.sigmoid(wide)
    else:
        wanted = 0.5 * wide * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
    found = KERNELS.silu_mul(x, up) if gate == "silu" else KERNELS.gelu_mul(x, up)
    assert found.dtype == dtype
    close(found, wanted * up.double())
    for columns in (slice(1, 5), slice(1030, 1080)):  # small beside the rest
        close(found[:, columns], wanted[:, columns] * up[:, columns].double())
    assert torch.equal(KERNELS._gate_mul(x[1:2], up[1:2], "silu" if gate == "silu" else "gelu_tanh"), found[1:2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_the_gate(gate: Literal["silu", "gelu"], dtype: torch.dtype) -> None:
    gate_is_right(gate, dtype)


# -------------------------------------------------------------------------------------------------------------- mutants

Check = Callable[[], None]


def partial_moves() -> None:
    moves_are_right(CASES["partial"], torch.float32)


def norms() -> None:
    norm_is_right(7, torch.float32, torch.float32)


def both_gates() -> None:
    gate_is_right("silu", torch.float32)
    gate_is_right("gelu", torch.float32)


# what is changed, into what, and the case above that shows it
WRONG: list[tuple[types.ModuleType, str, str, Check]] = [
    (triton_kernels, "tl.where(low, -s, s)", "tl.where(low, s, -s)", partial_moves),
    (triton_kernels, "tl.where(low, -s, s)", "s", partial_moves),
    (triton_kernels, "turns = place < 2 * HALVES[i]", "turns = place < WIDTHS[i]", partial_moves),
    (triton_kernels, "other=1.0", "other=0.0", partial_moves),
    (triton_kernels, "tl.where(low, place + HALVES[i], place - HALVES[i])", "place ^ 1", partial_moves),
    (triton_kernels, "row * cos_step", "head * cos_step", partial_moves),
    (triton_kernels, "row * sin_step", "0 * sin_step", partial_moves),
    (triton_kernels, "slots[i] + row).to(tl.int64)", "slots[i] + row).to(tl.int64) + 1", partial_moves),
    (triton_kernels, "mask=seen)\n        head", "mask=place < BLOCK)\n        head", partial_moves),
    (triton_kernels, "head -= HEADS[i]", "head -= HEADS[0]", partial_moves),
    (triton_kernels, "row * row_step", "(row * row_step).to(tl.int32)", test_slots_and_rows_beyond_32_bits),
    (triton_kernels, "row).to(tl.int64)", "row).to(tl.int32)", test_slots_and_rows_beyond_32_bits),
    (rms_norm_kernels, "/ WIDTH", "/ BLOCK", norms),
    (rms_norm_kernels, "+ eps", "", norms),
    (rms_norm_kernels, "row % inner * inner_step", "row % inner * outer_step", norms),
    (rms_norm_kernels, "seen, other=0.0).to(tl.float32)", "place < BLOCK, other=0.0).to(tl.float32)", norms),
    (
        rms_norm_kernels,
        "normed.to(w.dtype).to(tl.float32)",
        "normed",
        test_a_weight_multiplies_before_or_after_the_cast,
    ),
    (gate_mul_kernels, "if GELU:", "if not GELU:", both_gates),
    (gate_mul_kernels, "row * up_step", "row * width", both_gates),
    (gate_mul_kernels, "tl.program_id(1) * BLOCK", "tl.program_id(1) * width", both_gates),
    (gate_mul_kernels, "0.044715", "0.0044715", both_gates),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_mutants_are_found(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new, check = WRONG[number]
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, "a mutant changes one place"
    path = tmp_path / f"mutant_{number}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    name = module.__name__.split(".")[-2]
    name = "move_rows" if name == "rotate_append" else name
    monkeypatch.setattr(module, name, getattr(mutant, name))
    with pytest.raises(AssertionError):
        check()
