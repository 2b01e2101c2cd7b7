"""The small operators between products, compiled: RMSNorm and rotate_append, and how loaded weights are laid out."""

from __future__ import annotations

import ctypes
from pathlib import Path

import brute
import native
import numpy as np
import pytest
import tiny
import torch
from native import INSTRUCTIONS, ROWS, guarded, kernels, margins

from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.rotate_append import Slots
from foldspec.models.layers import Embedding, Linear, Projections, SwiGLU


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 7, 16, 33, 576])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_norm_is_right_and_a_row_has_the_same_bits_among_others(instructions: str, width: int) -> None:
    run = kernels(instructions)
    x, weight = guarded(3 * drawn(33, width)), guarded(drawn(width, seed=1))
    y = run.rms_norm(x, weight, 1e-5)
    wide = x.double()
    wanted = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(y.double(), wanted, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(Kernels().rms_norm(x, weight, 1e-5), y)
    alone = torch.cat([run.rms_norm(x[i : i + 1], weight, 1e-5) for i in range(33)])
    for rows in ROWS:
        assert torch.equal(run.rms_norm(x[:rows], weight, 1e-5), alone[:rows])
    heads = run.rms_norm(x.view(11, 3, width).transpose(0, 1), weight, 1e-5)  # of each head, and not contiguous
    assert torch.equal(heads, alone.view(11, 3, width).transpose(0, 1))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_norm_writes_nothing_outside(instructions: str) -> None:
    kernels(instructions)
    library = native.library(instructions)
    run = library.function("rms_norm", [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float, ctypes.c_int])
    for rows, width in ((1, 1), (3, 17), (2, 64)):
        x, weight, y = guarded(drawn(rows, width)), guarded(drawn(width)), guarded(torch.zeros(rows, width), -7.0)
        run(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, width, 1e-5, library.isa)
        assert bool((margins(y) == -7.0).all()) and bool(y.isfinite().all())


@pytest.mark.parametrize("width", [2, 6, 10, 32, 64, 128])
@pytest.mark.parametrize("instructions", [*INSTRUCTIONS, "reference"])
def test_rows_are_rotated_and_stored(instructions: str, width: int) -> None:
    """Against brute force; q, k and v are parts of one wider row, as a joined product leaves them."""
    run = Kernels() if instructions == "reference" else kernels(instructions)
    rows, heads, kv_heads = 5, 3, 2
    whole = guarded(drawn(rows, (heads + 2 * kv_heads) * width))
    parts = whole.split_with_sizes([n * width for n in (heads, kv_heads, kv_heads)], 1)
    q, k, v = (part.view(rows, -1, width) for part in parts)
    inverse = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    positions = (0, 3, 4, 100, 7)
    angle = torch.tensor(positions, dtype=torch.float64)[:, None, None] * inverse
    table = torch.stack([angle.cos(), angle.sin()]).float()
    pools = [guarded(torch.full((20, kv_heads, width), -7.0), -7.0) for _ in range(2)]
    slots = (4, 5, 6, 19, 0)
    rotated = run.rotate_append(q, k, v, (table[0], table[1]), Slots(pools[0], pools[1], slots))
    for r, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        for found, given in ((rotated[r], q[r]), (pools[0][slot], k[r])):
            wanted = [brute.rotate(head.double().numpy(), position, inverse.numpy()) for head in given]
            np.testing.assert_allclose(found.double().numpy(), np.stack(wanted), atol=3e-6)
        assert torch.equal(pools[1][slot], v[r])
    for pool in pools:
        assert bool((margins(pool) == -7.0).all())
        assert bool((pool[[s for s in range(20) if s not in slots]] == -7.0).all())
    again = [torch.zeros_like(pool) for pool in pools]
    for r in range(rows):  # one by one: the same bits
        one = slice(r, r + 1)
        into = Slots(again[0], again[1], slots[one])
        out = run.rotate_append(q[one], k[one], v[one], (table[0][one], table[1][one]), into)
        assert torch.equal(out, rotated[one])
    assert torch.equal(again[0][list(slots)], pools[0][list(slots)])


# -------------------------------------------------------------------------------------------- how weights are laid out

WIDE = tiny.changed(tiny.TARGET, head_dim=16)  # every part of a joined product ends with a panel


@pytest.mark.parametrize("config", [WIDE, tiny.changed(tiny.TARGET, head_dim=10, intermediate_size=53)])
def test_settled_weights_give_the_same_logits_and_are_held_once(config: dict[str, object], tmp_path: Path) -> None:
    """Joined and packed beside as the checkpoint has them, on torch."""
    folder = tiny.write_target(tmp_path, config)
    outputs = []
    for name in ("reference", "auto"):
        model = tiny.load_target(folder, name)
        packed = {part.packed for part in model.modules() if isinstance(part, (Linear, Embedding))}
        assert packed == {name == "auto"}
        joined = [bool(part.stack._joined) for part in model.modules() if isinstance(part, (Projections, SwiGLU))]
        assert set(joined) == {config is WIDE}
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        for part in model.modules():
            for weight, _ in part.stack._joined if isinstance(part, (Projections, SwiGLU)) else ():
                assert weight.untyped_storage().data_ptr() in storages
        assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())
        assert set(model.state_dict()) == set(tiny.load_target(folder, "reference").state_dict())
        cache = tiny.paged_cache(model)
        cache.open(0)
        outputs.append(tiny.forward(model, cache, [tiny.prompt(9)], [0]).logits)
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=0)


def test_a_part_of_a_packed_matrix(tmp_path: Path) -> None:
    ids = torch.tensor([5, 100, 3, 99, 7])
    x = drawn(4, 32)
    found = []
    for name in ("reference", "auto"):
        model = tiny.load_target(tiny.write_target(tmp_path), name)
        found.append((model.head(x)[:, ids], model.head(x, model.head_matrix.part(ids)), model.embed(ids)))
        torch.testing.assert_close(found[-1][0], found[-1][1])
    assert torch.equal(found[0][2], found[1][2])
