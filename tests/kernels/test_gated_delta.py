"""The gated delta rule: its definition against float64 sums written out, faster ways against the definition, and the
promise that splitting rows over calls, and taking some back between, changes no bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import native
import numpy as np
import pytest
import torch

from foldspec.kernels.gated_delta import GatedDelta, State, chunked, reference
from foldspec.kernels.gated_delta.native import NativeGatedDelta

# key heads, value heads, key width, value width: ratios 1, 2, 3 and 5, widths that no vector divides
SHAPES = [(2, 4, 16, 24), (1, 3, 5, 7), (3, 3, 12, 33), (2, 10, 64, 16)]
ROOM = 17


class Input(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def part(self, a: int, b: int) -> Input:
        return Input(*(x[a:b] for x in self))


@functools.cache
def rows(shape: tuple[int, int, int, int], n: int, seed: int = 0) -> Input:
    """q, k and v as parts of wider rows, as a layer cuts them; decays from nearly none to nearly all."""
    key_heads, value_heads, key_width, value_width = shape
    draw = torch.Generator().manual_seed(seed)
    sizes = (key_heads * key_width, key_heads * key_width, value_heads * value_width)
    q, k, v = torch.randn(n, sum(sizes), generator=draw).split(sizes, 1)
    g = -torch.exp(2 * torch.randn(n, value_heads, generator=draw) - 2)
    beta = torch.sigmoid(2 * torch.randn(n, value_heads, generator=draw))
    keys = (x.unflatten(1, (key_heads, key_width)) for x in (q, k))
    return Input(*keys, v.unflatten(1, (value_heads, value_width)), g, beta)


def fresh(shape: tuple[int, int, int, int], room: int = ROOM) -> State:
    """A state with a past of its own, whose records hold NaN."""
    key_heads, value_heads, key_width, value_width = shape
    matrix = torch.randn(value_heads, key_width, value_width, generator=torch.Generator().manual_seed(9))
    sizes = [(room, key_heads, key_width), (room, value_heads, value_width), (room, value_heads)]
    return State(matrix, *(torch.full(size, math.nan) for size in sizes), kept=0)


def copied(state: State) -> State:
    return State(*(x.clone() for x in state[:4]), kept=state.kept)


def brute(x: Input, matrix: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and the last matrix, in float64, number by number."""
    q, k, v, g, beta = (t.double().numpy() for t in x)
    s = matrix.double().numpy().copy()
    heads, key_width, value_width = s.shape
    y = np.zeros(v.shape)
    for t in range(len(v)):
        for h in range(heads):
            served_by = h * k.shape[1] // heads
            key = k[t, served_by] / math.sqrt(sum(a * a for a in k[t, served_by]) + 1e-6)
            query = q[t, served_by] / math.sqrt(sum(a * a for a in q[t, served_by]) + 1e-6) / math.sqrt(key_width)
            s[h] *= math.exp(g[t, h])
            for b in range(value_width):
                error = beta[t, h] * (v[t, h, b] - sum(s[h, a, b] * key[a] for a in range(key_width)))
                for a in range(key_width):
                    s[h, a, b] += key[a] * error
                y[t, h, b] = sum(s[h, a, b] * query[a] for a in range(key_width))
    return y, s


def implementations() -> list[tuple[str, GatedDelta]]:
    compiled = [(name, NativeGatedDelta(native.library(name))) for name in native.INSTRUCTIONS]
    return [("reference", reference.gated_delta), ("chunked", chunked.gated_delta), *compiled]


WAYS = dict(implementations())


def way(name: str) -> GatedDelta:
    if name in native.INSTRUCTIONS:
        native.kernels(name)  # skips what this CPU does not run
    return WAYS[name]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64_sums(shape: tuple[int, int, int, int], name: str) -> None:
    x, state = rows(shape, 9), fresh(shape)
    wanted, _ = brute(x, state.matrix)
    before = state.matrix.clone()
    found = way(name)(*x, state)
    assert found.shape == x.v.shape and abs(found.double().numpy() - wanted).max() < 2e-6 * abs(wanted).max()
    assert torch.equal(state.matrix, before)  # all of these may be taken back
    assert not state.keys[:9].isnan().any() and state.keys[9:].isnan().all()


@pytest.mark.parametrize("room", [3, 17, 64])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 65, 128, 200])
@pytest.mark.parametrize("name", [name for name in WAYS if name != "reference"])
def test_long_stretches_against_the_definition(name: str, n: int, room: int) -> None:
    """Outputs, the matrix, and what is recorded: after it, a continuation from any kept count gives the same."""
    shape = SHAPES[0]
    x, more = rows(shape, n), rows(shape, 5, seed=1)
    mine, theirs = fresh(shape, room), fresh(shape, room)
    found, wanted = way(name)(*x, mine), reference.gated_delta(*x, theirs)
    assert (found - wanted).abs().max() < 1e-5
    for a, b in zip(mine[:4], theirs[:4], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0, equal_nan=True)
    for kept in sorted({0, 1, min(n, room) // 2, min(n, room, 33), min(n, room)}):
        after = [copied(state)._replace(kept=kept) for state in (mine, theirs)]
        outputs = way(name)(*more, after[0]), reference.gated_delta(*more, after[1])
        assert (outputs[0] - outputs[1]).abs().max() < 1e-5
        assert (after[0].matrix - after[1].matrix).abs().max() < 1e-5


def in_pieces(run: GatedDelta, x: Input, state: State, cuts: Sequence[int], wasted: int = 0) -> torch.Tensor:
    """The rows cut here, with ``wasted`` other rows behind each piece that are taken back again."""
    found, at, kept = [], 0, 0
    waste = rows(SHAPES[0], max(1, wasted), seed=7)
    for end in (*cuts, len(x.v)):
        piece = Input(*(torch.cat([a[at:end], b[:wasted]]) for a, b in zip(x, waste, strict=True)))
        found.append(run(*piece, state._replace(kept=kept))[: end - at])
        at, kept = end, end - at
    return torch.cat(found)


@pytest.mark.parametrize("name", WAYS)
def test_no_bit_depends_on_how_rows_are_split_or_on_rows_that_were_taken_back(name: str) -> None:
    run, shape = way(name), SHAPES[0]
    x = rows(shape, 34)
    alone = in_pieces(run, x, fresh(shape, 40), range(1, 34))
    for cuts in ([17], [1, 2, 19], [5, 6, 13, 30], [16, 32], range(3, 34, 3), *([n, 17 + n] for n in range(1, 17))):
        for wasted in (0, 1, 4, 9):
            torch.set_num_threads(1 + wasted % 3)
            found = in_pieces(run, x, fresh(shape, 40), cuts, wasted)
            assert torch.equal(found, alone), (list(cuts), wasted)
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", native.INSTRUCTIONS)
def test_compiled_rows_do_not_change_their_bits_in_a_prompt_either(name: str) -> None:
    run, shape = way(name), SHAPES[2]
    x = rows(shape, 150)
    alone, whole = fresh(shape), fresh(shape)
    one_by_one = torch.cat([run(*x.part(i, i + 1), alone._replace(kept=min(i, 1))) for i in range(150)])
    assert torch.equal(run(*x, whole), one_by_one)


@pytest.mark.parametrize("name", native.INSTRUCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_read_or_written_outside(shape: tuple[int, int, int, int], name: str) -> None:
    run = way(name)
    for n, kept in ((1, 0), (4, 2), (ROOM, ROOM), (ROOM + 3, 1)):
        x, start = rows(shape, n), fresh(shape)
        run(*rows(shape, ROOM, seed=3), start)
        plain = copied(start)._replace(kept=kept)
        wanted = run(*x, plain)
        inside = State(*(native.guarded(t) for t in start[:4]), kept=kept)
        args = Input(*(native.guarded(t) for t in x))
        assert torch.equal(run(*args, inside), wanted)
        for mine, theirs in zip(inside[:4], plain[:4], strict=True):
            assert torch.equal(mine, theirs) and native.margins(mine).isnan().all()


def near_nothing() -> Input:
    """Queries and keys so small that what is added to their squares shows."""
    x = rows(SHAPES[0], 9)
    return x._replace(q=1e-3 * x.q, k=1e-3 * x.k)


@pytest.mark.parametrize("name", WAYS)
def test_against_float64_sums_near_nothing(name: str) -> None:
    state = fresh(SHAPES[0])
    wanted, _ = brute(near_nothing(), state.matrix)
    assert abs(way(name)(*near_nothing(), state).double().numpy() - wanted).max() < 2e-6 * abs(wanted).max()


def unscaled(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) * x.shape[-1] ** 0.25


MISTAKES: dict[str, tuple[str, object]] = {
    "nothing added to the squares": ("EPS", 0.0),
    "added to their root": ("normalised", lambda x, dtype: x / ((x * x).sum(-1, keepdim=True).sqrt() + 1e-6)),
    "their mean": ("normalised", lambda x, dtype: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)),
    "a scale on q and on k": ("normalised", unscaled),
    "heads tiled": ("spread", lambda x, heads: x.repeat(heads // len(x), 1)[:, :, None]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_definition_are_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, *MISTAKES[mistake])
    with pytest.raises(AssertionError):
        test_against_float64_sums_near_nothing("reference")


def test_decays_that_leave_nothing_are_no_overflow() -> None:
    """Sums of log decays of a chunk beyond what an exponential holds, in both directions."""
    shape = SHAPES[0]
    x = rows(shape, 64)._replace(g=torch.full((64, 4), -40.0))
    found, wanted = (f(*x, fresh(shape)) for f in (chunked.gated_delta, reference.gated_delta))
    assert wanted.isfinite().all() and (found - wanted).abs().max() < 1e-5


def test_half_precision_is_computed_in_fp32() -> None:
    shape = SHAPES[0]
    x = rows(shape, 40)
    q, k, v = (t.bfloat16() for t in x[:3])
    for run in (reference.gated_delta, chunked.gated_delta):
        found = run(q, k, v, x.g, x.beta, fresh(shape))
        wanted = run(q.float(), k.float(), v.float(), x.g, x.beta, fresh(shape))
        assert found.dtype == torch.bfloat16 and torch.equal(found, wanted.bfloat16())
