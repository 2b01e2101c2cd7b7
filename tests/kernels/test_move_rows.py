"""The definition of rotate_append's moves, and which implementation of an operator a GPU or a CPU gets."""

from __future__ import annotations

from typing import Any

import brute
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from foldspec.errors import UsageError
from foldspec.kernels import gate_mul, jit, rms_norm, rotate_append
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.rotate_append.device import Move, page_slots, ring_slots


def moves(rows: torch.Tensor, pool: torch.Tensor, out: torch.Tensor, at: torch.Tensor) -> None:
    """Rows [4, 2, 10] of two requests, turned by their positions into pages, and as they are beside them."""
    inverse = torch.from_numpy(brute.frequencies(6)).to(at.device)
    angle = at.flatten().double()[:, None, None] * inverse
    tables = torch.tensor([[1, 3], [2, 0]], dtype=torch.int32, device=at.device)
    angles = angle.cos().float(), angle.sin().float()
    Kernels().move_rows([Move(rows, pool, page_slots(tables, at, 4), angles), Move(rows, out)])


def test_rows_are_turned_and_lie_where_tables_say() -> None:
    rows = torch.randn(4, 2, 10, generator=torch.Generator().manual_seed(0))
    pool, out, at = (
        torch.full((16, 2, 10), torch.nan),
        torch.full((4, 2, 10), torch.nan),
        torch.tensor([[3, 4], [0, 1]]),
    )
    moves(rows, pool, out, at)
    inverse, slots = brute.frequencies(6), [1 * 4 + 3, 3 * 4, 2 * 4, 2 * 4 + 1]
    for r, (slot, position) in enumerate(zip(slots, at.flatten().tolist(), strict=True)):
        wanted = [brute.rotate(head.double().numpy(), position, inverse) for head in rows[r]]
        np.testing.assert_allclose(pool[slot].double().numpy(), np.stack(wanted), atol=2e-6)
    assert int(pool.isnan().all(-1).all(-1).sum()) == 12 and torch.equal(out, rows)


def test_slots_of_rings() -> None:
    slots = ring_slots(torch.tensor([10, 0], dtype=torch.int32), torch.tensor([[4, 5], [11, 12]]), 5)
    assert slots.dtype == torch.int64 and slots.tolist() == [14, 10, 1, 2]


def test_the_host_is_not_asked_and_shapes_stay() -> None:
    """As a recorded round needs it: a look at a number would raise."""
    with FakeTensorMode():
        pool, out = torch.empty(16, 2, 10), torch.empty(4, 2, 10)
        moves(torch.empty(4, 2, 10), pool, out, torch.empty(2, 2, dtype=torch.int64))


FACTS: dict[str, Any] = {
    "rms_norm": rms_norm.Facts("cpu", torch.float32),
    "gate_mul": gate_mul.Facts("cpu", torch.float32),
    "rotate_append": rotate_append.Facts("cpu", torch.float32, torch.float32),
    "move_rows": rotate_append.Facts("cpu", torch.float32, torch.float32),
}


@pytest.mark.parametrize("operator", FACTS)
def test_triton_says_why_it_does_not_run(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = FACTS[operator]
    monkeypatch.delitem(jit.sys.modules, "triton", raising=False)
    with pytest.raises(UsageError, match="triton: runs on an NVIDIA GPU, not on cpu"):
        Kernels("triton").choose(operator, facts)
    assert "triton" not in jit.sys.modules, "nobody imports it to be told no"
    kernels, there = Kernels(), facts._replace(device="cuda")
    monkeypatch.setattr(jit, "find_spec", lambda name: object())
    kernels.choose(operator, there)
    assert kernels.choices[0].name == "triton"
    with pytest.raises(UsageError, match="triton: computes in float32, bfloat16 or float16, not in float64"):
        Kernels("triton").choose(operator, there._replace(dtype=torch.float64))
    monkeypatch.setattr(jit, "find_spec", lambda name: None)
    kernels = Kernels()
    kernels.choose(operator, there)
    assert kernels.choices[0].name == "reference"
    assert ("triton", "triton is not installed") in kernels.choices[0].refused
