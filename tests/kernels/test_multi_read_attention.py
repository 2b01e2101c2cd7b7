"""The attention operator: its reference against loops over single entries, the fast versions against the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import brute
import numpy as np
import pytest
import tiny
import torch
from interpreting import INTERPRETED

from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.kernels.multi_read_attention import Entries, Facts, Output, ReadArgs, candidates

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
KERNELS: tuple[str, ...] = ("reference", "cpu")
WIDE = torch.float64
if INTERPRETED:  # this process is for Triton's kernels (test_triton.py), which know no float64
    KERNELS, WIDE = ("triton",), torch.float32
    del TOLERANCE[torch.float64]


@dataclass(frozen=True)
class Dense:
    """One read over entries that lie in order; ``k`` and ``v`` [entries, kv heads, width]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    first: tuple[int, ...]
    last: tuple[int, ...]
    scale: float
    exponent: float = 1.0

    def to(self, dtype: torch.dtype) -> Dense:
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))


def by_hand(reads: Sequence[Dense]) -> Output:
    """The definition, entry by entry, in float64. A row that sees nothing in any read gives zeros."""
    rows, heads, _ = reads[0].q.shape
    out = torch.zeros(rows, heads, reads[0].v.shape[-1], dtype=torch.float64)
    lse = torch.full((len(reads), rows, heads), -math.inf, dtype=torch.float64)
    for r, h in itertools.product(range(rows), range(heads)):
        parts = []
        for i, read in enumerate(reads):
            g = h // (heads // read.k.shape[1])
            q, k, v = read.q[r, h].double().numpy(), read.k[:, g].double().numpy(), read.v[:, g].double().numpy()
            seen = range(read.first[r], read.last[r])
            if not seen:
                continue
            s = [read.scale * float(q @ k[j]) for j in seen]
            peak = max(s)
            e = [math.exp(x - peak) for x in s]
            mass = math.log(sum(e)) + peak
            lse[i, r, h] = mass
            parts.append((read.exponent * mass, sum(x * v[j] for x, j in zip(e, seen, strict=True)) / sum(e)))
        if parts:
            top = max(mass for mass, _ in parts)
            weights = [math.exp(mass - top) for mass, _ in parts]
            o = sum(w * x for w, (_, x) in zip(weights, parts, strict=True)) / sum(weights)
            out[r, h] = torch.from_numpy(o)
    return Output(out, lse)


def stored(x: torch.Tensor, layout: str, *, seed: int, hidden: Sequence[int] = ()) -> Entries:
    """Entries x spread over a pool whose every other slot, and the entries in ``hidden``, hold NaN."""
    count, page = len(x), 4
    pages = -(-count // page) or 1
    if layout == "one run":
        chosen = list(range(1, pages + 1))
    else:  # pages out of order, some of them neighbours
        draw = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(2 * pages + 1, generator=draw)[:pages].tolist()
        if pages > 2:
            chosen[1] = next(p for p in range(2 * pages + 3) if p not in chosen)
    slots = [chosen[i // page] * page + i % page for i in range(count)]
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and sum(runs[-1]) == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    pool = torch.full((page * (2 * pages + 4), *x.shape[1:]), torch.nan, dtype=x.dtype)
    pool[slots] = x
    pool[[slots[j] for j in hidden]] = torch.nan
    return Entries(pool, tuple(runs))


def arguments(read: Dense, layout: str, seed: int = 0) -> ReadArgs:
    """The read as an operator takes it. What no row sees is NaN; K and V lie in different runs under ``K unlike V``."""
    hidden = [j for j in range(len(read.k)) if not any(f <= j < l for f, l in zip(read.first, read.last, strict=True))]
    key_layout = "one run" if layout == "K unlike V" else layout
    keys = stored(read.k, key_layout, seed=seed, hidden=hidden)
    values = stored(read.v, layout, seed=seed + 1 if layout == "K unlike V" else seed, hidden=hidden)
    return ReadArgs(read.q, keys, values, read.first, read.last, read.scale, read.exponent)


def run(kernel: str, reads: Sequence[Dense], layout: str = "one run") -> Output:
    reads = [read.to(WIDE) if read.q.dtype == torch.float64 else read for read in reads]
    (output,) = Kernels(kernel).multi_read_attention([[arguments(read, layout) for read in reads]])
    return output


def bounds(pattern: str, rows: int, entries: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which entries each row sees."""
    clip = [max(0, min(entries, entries - rows + r + 1)) for r in range(rows)]
    return {
        "all": ((0,) * rows, (entries,) * rows),
        "causal": ((0,) * rows, tuple(clip)),
        "window": (tuple(min(entries, max(0, r + entries // 2)) for r in range(rows)), (entries,) * rows),
        "causal window": (tuple(max(0, c - 3) for c in clip), tuple(clip)),
        "last row only": ((0,) * rows, (0,) * (rows - 1) + (entries,)),
        "few at the end": ((0,) * rows, tuple(max(0, r - rows // 2) for r in range(rows))),
        "none": ((0,) * rows, (0,) * rows),
        "none, elsewhere": ((entries,) * rows, (entries,) * rows),
        "far apart": (  # with entries between that no row sees
            tuple(0 if r < rows // 2 else entries - 1 for r in range(rows)),
            tuple(1 if r < rows // 2 else entries for r in range(rows)),
        ),
    }[pattern]


PATTERNS = ("all", "causal", "window", "causal window", "last row only", "few at the end", "none", "none, elsewhere")
PATTERNS += ("far apart",)
LAYOUTS = ("one run", "pages", "K unlike V")
# rows, query heads a kv head, kv heads, width, entries
SHAPES = [
    (1, 1, 1, 2, 1),
    (1, 7, 1, 16, 40),
    (2, 3, 2, 5, 9),
    (3, 7, 1, 6, 33),
    (5, 3, 2, 10, 64),
    (6, 1, 3, 24, 31),
    (7, 4, 1, 64, 17),
    (16, 4, 2, 8, 50),
]


def made(shape: tuple[int, int, int, int, int], pattern: str, *, scale: float, exponent: float, seed: int) -> Dense:
    rows, group, kv, width, entries = shape
    draw = torch.Generator().manual_seed(seed)
    shapes = (rows, group * kv, width), (entries, kv, width), (entries, kv, width)
    # rounded to bf16, so that one oracle serves every dtype
    q, k, v = (torch.randn(*shape, generator=draw).bfloat16().double() for shape in shapes)
    first, last = bounds(pattern, rows, entries)
    last = tuple(min(entries, l) for l in last)
    return Dense(q, k, v, first, last, scale / math.sqrt(width), exponent)


def check(output: Output, wanted: Output, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    assert output.out.dtype == dtype and output.out.shape == wanted.out.shape
    torch.testing.assert_close(output.out.double(), wanted.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(output.lse.double(), wanted.lse, atol=5 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_version_gives_the_numbers_of_the_definition(shape: tuple[int, int, int, int, int], pattern: str) -> None:
    """One read alone, and as the sharpened read beside a plain one over other entries: FOLD's two."""
    alone = [made(shape, pattern, scale=1.0, exponent=1.0, seed=1)]
    alpha = 2.5
    other = (*shape[:4], shape[4] // 2 + 1)
    pair = [
        made(other, "all", scale=1.0, exponent=1.0, seed=2),
        made(shape, pattern, scale=alpha, exponent=1 / alpha, seed=3),
    ]
    ways = list(itertools.product(TOLERANCE, LAYOUTS, KERNELS))
    for i, reads in enumerate((alone, pair, pair[::-1]), start=SHAPES.index(shape) + PATTERNS.index(pattern)):
        wanted = by_hand(reads)
        # interpreted, all ways would take minutes
        for dtype, layout, kernel in ways if not INTERPRETED else [ways[i % len(ways)]]:
            check(run(kernel, [read.to(dtype) for read in reads], layout), wanted, dtype)
        half = [read.to(torch.bfloat16) for read in reads]
        rounded = run("eager", half, "pages")  # each of its scores to 8 bits, and each probability
        torch.testing.assert_close(rounded.out.double(), wanted.out, atol=3e-2, rtol=3e-2)
        torch.testing.assert_close(rounded.lse.double(), wanted.lse, atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_three_reads_and_any_exponent(kernel: str) -> None:
    reads = [
        made((4, 2, 2, 8, 20), "all", scale=1.0, exponent=1.0, seed=5),
        made((4, 2, 2, 8, 11), "causal", scale=3.0, exponent=0.25, seed=6),
        made((4, 2, 2, 8, 7), "few at the end", scale=0.5, exponent=1.7, seed=7),
    ]
    check(run(kernel, reads, "pages"), by_hand(reads), WIDE)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_see_nothing_weigh_nothing(kernel: str) -> None:
    """Neither alone (zeros, mass -inf) nor beside a read that sees something, which then decides alone, bit for bit."""
    shape = (3, 2, 1, 8, 12)
    nothing = made(shape, "none", scale=2.0, exponent=0.5, seed=1).to(torch.float32)
    alone = run(kernel, [nothing])
    assert torch.equal(alone.out, torch.zeros_like(alone.out)) and bool((alone.lse == -math.inf).all())
    both = run(kernel, [nothing, nothing])
    assert torch.equal(both.out, torch.zeros_like(both.out))
    near = made(shape, "all", scale=1.0, exponent=1.0, seed=2).to(torch.float32)
    partly = replace(nothing, last=(0, 0, 5))
    plain, merged = run(kernel, [near]), run(kernel, [near, partly])
    assert torch.equal(merged.lse[1, :2], torch.full((2, 2), -math.inf))
    torch.testing.assert_close(merged.out[:2], plain.out[:2], atol=1e-6, rtol=0)
    assert (merged.out[2] - plain.out[2]).abs().max() > 1e-2


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_entries_at_all(kernel: str) -> None:
    """A read over an empty sequence, whose runs are an empty list."""
    q, pool = torch.randn(2, 4, 6), torch.full((8, 2, 6), torch.nan)
    empty = ReadArgs(q, Entries(pool, ()), Entries(pool, ()), (0, 0), (0, 0), 1.0)
    (output,) = Kernels(kernel).multi_read_attention([[empty]])
    assert torch.equal(output.out, torch.zeros(2, 4, 6)) and bool((output.lse == -math.inf).all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_bounds_that_cross_mean_nothing(kernel: str) -> None:
    """last < first is an empty row, like last == first."""
    read = replace(made((3, 1, 1, 4, 9), "all", scale=1.0, exponent=1.0, seed=0), first=(5, 0, 9), last=(2, 4, 3))
    output = run(kernel, [read])
    assert bool((output.out[0] == 0).all()) and bool((output.out[2] == 0).all())
    check(output, by_hand([read]), WIDE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [1e3, 1e4])
def test_huge_logits_stay_finite(kernel: str, size: float) -> None:
    """Masses of e^(10^7): only their logarithms can be handled."""
    pair = [
        made((3, 2, 1, 8, 20), "all", scale=size, exponent=1.0, seed=1),
        made((3, 2, 1, 8, 20), "causal", scale=4 * size, exponent=0.25, seed=2),
    ]
    if kernel != "triton":  # in float32 a logit of 10^4 is known to 10^-3
        check(run(kernel, pair), by_hand(pair), WIDE)
    assert bool(run(kernel, [read.to(torch.float32) for read in pair]).out.isfinite().all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_requests_of_a_batch_do_not_meet(kernel: str) -> None:
    ragged = [
        [made((3, 2, 1, 8, 20), "all", scale=1.0, exponent=1.0, seed=1)],
        [made((3, 2, 1, 8, 5), "causal", scale=1.0, exponent=1.0, seed=2)],
        [
            made((3, 2, 1, 8, 33), "window", scale=1.0, exponent=1.0, seed=3),
            made((3, 2, 1, 8, 9), "few at the end", scale=2.0, exponent=0.5, seed=4),
        ],
    ]
    batch = [[arguments(read.to(WIDE), "pages") for read in reads] for reads in ragged]
    together = Kernels(kernel).multi_read_attention(batch)
    for reads, output in zip(ragged, together, strict=True):
        assert torch.equal(output.out, run(kernel, reads, "pages").out)
        check(output, by_hand(reads), WIDE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_rotated_reads_depend_on_distances_alone(kernel: str, group: int) -> None:
    """Keys rotated at their positions and queries at theirs, far keys never: as loops over relative distances."""
    block, d, n, window, alpha = 4, 8, 23, 6, 2.0
    distance, inverse = window + block, brute.frequencies(d)
    draw = torch.Generator().manual_seed(group)
    q = torch.randn(block, 2 * group, d, generator=draw, dtype=torch.float64)
    k, v = (torch.randn(n + block, 2, d, generator=draw, dtype=torch.float64) for _ in range(2))

    def turned(x: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
        each = [[brute.rotate(head.numpy(), p, inverse) for head in row] for row, p in zip(x, at, strict=True)]
        return torch.from_numpy(np.array(each))

    everything = (n + block,) * block
    near = Dense(
        turned(q, range(n, n + block)),
        turned(k, range(n + block)),
        v,
        tuple(n + r - distance + 1 for r in range(block)),
        everything,
        1 / math.sqrt(d),
    )
    far = Dense(
        turned(q, range(distance, distance + block)),
        k,
        v,
        (0,) * block,
        tuple(n + r - distance + 1 for r in range(block)),
        alpha / math.sqrt(d),
        1 / alpha,
    )
    wanted = brute.fold(
        q,
        k,
        v,
        inverse,
        near=lambda r, j: n + r - j < distance,
        block=lambda r, m: True,
        far=lambda r, j: n + r - j >= distance,
        far_at=lambda r: distance + r,
        alpha=alpha,
    )
    output = run(kernel, [near, far], "pages")
    found = output.out, output.lse[0], output.lse[1] / alpha
    for each, true in zip(found, (wanted.out, wanted.near, wanted.far), strict=True):
        torch.testing.assert_close(each.double(), true, atol=TOLERANCE[WIDE], rtol=0)


def test_keys_wider_than_values() -> None:
    """Only the reference takes them; dispatch says so."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 8, generator=draw, dtype=torch.float64)
    k = torch.randn(11, 2, 8, generator=draw, dtype=torch.float64)
    v = torch.randn(11, 2, 5, generator=draw, dtype=torch.float64)
    read = Dense(q, k, v, (0, 1, 2), (9, 10, 11), 0.3)
    kernels = Kernels()
    (output,) = kernels.multi_read_attention([[arguments(read, "pages")]])
    check(output, by_hand([read]), WIDE)
    (choice,) = kernels.choices
    assert (choice.operator, choice.name) == ("multi_read_attention", "reference")
    assert choice.refused[1] == ("cpu", "needs keys and values of one width, not 8 and 5")


# ------------------------------------------------------------------------------------------------------------- dispatch

FITS = Facts("cpu", torch.float32, 8, 8)
HALF = Facts("cpu", torch.bfloat16, 8, 8)


# these two are for a GPU: test_triton.py and test_flash_attention.py
NAMES = [name for name, _, _ in candidates(Library(None)) if name not in ("triton", "flash-attn")]


@pytest.mark.parametrize("name", NAMES)
def test_a_version_can_be_forced(name: str) -> None:
    kernels = tiny.kernels_of(name)
    function = kernels.choose("multi_read_attention", HALF if name == "eager" else FITS)
    found = {n: run for n, _, run in candidates(tiny.library())}[name]
    assert function is found or type(function) is type(found)
    (choice,) = kernels.choices
    assert choice.name == name
    assert all(reason == f"--kernels {name} was asked for" for _, reason in choice.refused)


def test_the_first_that_fits_runs_and_is_chosen_once() -> None:
    kernels = Kernels()
    read = made((2, 1, 1, 4, 3), "all", scale=1.0, exponent=1.0, seed=0)
    for _ in range(3):
        kernels.multi_read_attention([[arguments(read, "one run")]])
    assert [choice.name for choice in kernels.choices] == ["cpu"]  # float64: not compiled
    kernels.multi_read_attention([[arguments(read.to(torch.float32), "one run")]])  # other facts: chosen anew
    assert len(kernels.choices) == 2


def test_the_one_that_rounds_more_runs_only_when_it_is_asked_for() -> None:
    for facts in (FITS, HALF, HALF._replace(value_width=4)):
        kernels = Kernels()
        kernels.choose("multi_read_attention", facts)
        assert kernels.choices[0].name != "eager"
    with pytest.raises(UsageError, match="eager: is the reference in float32: for half precision alone"):
        Kernels("eager").choose("multi_read_attention", FITS)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown kernels 'fast'.*known: auto, chunked, cpu, cuda, eager, flash-attn"):
        Kernels("fast")


def test_a_forced_version_that_does_not_fit_is_refused_with_its_reason() -> None:
    with pytest.raises(UsageError, match="cpu: needs keys and values of one width"):
        Kernels("cpu").choose("multi_read_attention", Facts("cpu", torch.float32, 8, 4))
    with pytest.raises(UsageError, match="cpu: runs on a CPU, not on cuda"):
        Kernels("cpu").choose("multi_read_attention", Facts("cuda", torch.bfloat16, 8, 8))


def test_a_torch_without_the_operator_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        pass

    monkeypatch.setattr("foldspec.kernels.multi_read_attention.cpu.torch.ops", Without())
    monkeypatch.setattr(Without, "aten", Without(), raising=False)
    kernels = Kernels()
    kernels.choose("multi_read_attention", FITS)
    (choice,) = kernels.choices
    assert choice.name == "reference" and choice.refused[1] == ("cpu", "this torch has no CPU flash attention")
