"""The compiled attention: right to the definition in float64 over odd shapes, blind to whatever a row does not see, and
a row's bits the same whatever the other rows, the cut of its entries into runs, and the threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from native import INSTRUCTIONS, ROWS, guarded, kernels

from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import Entries, Facts, Output, ReadArgs

BLOCK, CHUNK = 64, 1024  # as csrc/multi_read_attention.cpp has them: bounds of a row's partial sums
# heads, kv heads, key width, value width
SHAPES = [(9, 3, 64, 64), (4, 4, 12, 12), (6, 2, 17, 5), (8, 1, 8, 33), (2, 2, 100, 128)]


def entries(x: torch.Tensor, runs: Sequence[tuple[int, int]]) -> Entries:
    """x [n, kv heads, width] laid out by these runs (slot, count), NaN in every other slot."""
    slots = max((slot + count for slot, count in runs), default=1) + 3
    pool = guarded(torch.full((slots, *x.shape[1:]), torch.nan))
    done = 0
    for slot, count in runs:
        pool[slot : slot + count] = x[done : done + count]
        done += count
    assert done == len(x)
    return Entries(pool, tuple(runs))


def one_run(n: int) -> list[tuple[int, int]]:
    return [(2, n)] if n else []


def pieces(n: int, size: int, step: int = 7) -> list[tuple[int, int]]:
    """Runs of ``size`` entries, out of order, with gaps between them."""
    count = -(-n // size)
    order = [(i * step) % count if count % step else i for i in range(count)]
    return [(at * (size + 1), min(size, n - i * size)) for i, at in enumerate(order)]


def drawn(
    rows: int, shape: tuple[int, int, int, int], n: int, bounds: str, seed: int = 0, cut: str = "one", **more: float
) -> ReadArgs:
    """A random read of n entries. ``bounds``: causal, all, window, ragged (some rows see nothing) or none."""
    heads, kv, wide, value = shape
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, wide, generator=draw)
    k, v = torch.randn(n, kv, wide, generator=draw), torch.randn(n, kv, value, generator=draw)
    first, last = {
        "causal": ((0,) * rows, tuple(max(0, n - rows + r + 1) for r in range(rows))),
        "all": ((0,) * rows, (n,) * rows),
        "window": (tuple(min(n, max(0, n - 70 + r)) for r in range(rows)), (n,) * rows),
        "ragged": (tuple(min(n, 3 * r) for r in range(rows)), tuple(min(n, 40 * r) for r in range(rows))),
        "none": ((5,) * rows, (5,) * rows),
    }[bounds]
    cuts = {"one": (one_run(n), one_run(n)), "pages": (pieces(n, 16), pieces(n, 48, 5))}[cut]
    scale = more.pop("scale", wide**-0.5)
    return ReadArgs(guarded(q), entries(k, cuts[0]), entries(v, cuts[1]), first, last, scale, **more)


def wide(read: ReadArgs) -> ReadArgs:
    """The read in float64, with zeros in place of NaN: the definition multiplies what it has masked."""
    keys, values = (Entries(e.data.nan_to_num().double(), e.runs) for e in (read.keys, read.values))
    return dataclasses.replace(read, q=read.q.double(), keys=keys, values=values)


def row(read: ReadArgs, r: int) -> ReadArgs:
    one = slice(r, r + 1)
    return dataclasses.replace(read, q=read.q[one].clone(), first=read.first[one], last=read.last[one])


def some(read: ReadArgs, rows: int) -> ReadArgs:
    return dataclasses.replace(read, q=read.q[:rows], first=read.first[:rows], last=read.last[:rows])


def run(instructions: str, reads: Sequence[ReadArgs]) -> Output:
    (output,) = kernels(instructions).multi_read_attention([reads])
    return output


def check(output: Output, reads: Sequence[ReadArgs]) -> None:
    """Within what rounding the scores to fp32 does to them."""
    sharp = max(1.0, *(read.scale * read.q.shape[-1] ** 0.5 for read in reads))
    (wanted,) = Kernels("reference").multi_read_attention([[wide(read) for read in reads]])
    torch.testing.assert_close(output.out.double(), wanted.out, atol=3e-6 * sharp, rtol=0)
    torch.testing.assert_close(output.lse.double(), wanted.lse, atol=5e-6 * sharp, rtol=1e-6)  # -inf equals -inf


def same(a: Output, b: Output) -> bool:
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


@pytest.mark.parametrize("bounds", ["causal", "all", "window", "ragged", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_one_read(instructions: str, shape: tuple[int, int, int, int], bounds: str) -> None:
    lengths = (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 200) if bounds != "none" else (8,)
    for n in lengths:
        for rows, cut in ((1, "one"), (5, "pages"), (7, "one"), (33, "pages")):
            read = drawn(rows, shape, n, bounds, seed=n + rows, cut=cut)
            output = run(instructions, [read])
            check(output, [read])
            for r in range(rows):
                if read.first[r] >= read.last[r]:
                    assert not output.out[r].any() and bool((output.lse[:, r] == -torch.inf).all())


@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 65])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_entries_beyond_one_chunk(instructions: str, n: int) -> None:
    for bounds in ("causal", "window"):
        read = drawn(6, SHAPES[0], n, bounds, seed=n, cut="pages")
        check(run(instructions, [read]), [read])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_reads_are_merged_by_mass_and_exponent(instructions: str) -> None:
    for seed, (shape, rows) in enumerate(((SHAPES[0], 7), (SHAPES[2], 4), (SHAPES[3], 16))):
        near = drawn(rows, shape, 300, "window", seed=seed)
        far = drawn(rows, shape, 1200, "causal", seed=seed + 10, cut="pages", scale=0.7, exponent=0.5)
        some_empty = drawn(rows, shape, 90, "ragged", seed=seed + 20, exponent=2.0)
        nothing = drawn(rows, shape, 8, "none", seed=seed)
        for reads in ([near, far], [some_empty, near], [near, far, some_empty], [nothing, near], [nothing, nothing]):
            check(run(instructions, reads), reads)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_huge_logits_and_sharp_reads(instructions: str) -> None:
    for scale in (1e-3, 1.0, 30.0, 1e4):
        read = drawn(5, SHAPES[0], 150, "causal", scale=scale)
        check(run(instructions, [read]), [read])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_what_one_row_sees_cannot_harm_another(instructions: str) -> None:
    """NaN in an entry that only the later rows see reaches them alone, by keys or by values."""
    for which in ("keys", "values"):
        read = drawn(6, SHAPES[0], 130, "causal")
        clean = run(instructions, [read])
        getattr(read, which).data[2 + 127] = torch.nan  # the entry at column 127: rows 3 and later see it
        output = run(instructions, [read])
        assert torch.equal(output.out[:3], clean.out[:3]) and bool(output.out[3:].isnan().all())


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("n", [90, 1100])
def test_a_row_has_the_same_bits_alone_and_among_others(instructions: str, n: int) -> None:
    for shape in SHAPES:
        reads = [
            drawn(33, shape, n, "causal", seed=1),
            drawn(33, shape, n, "window", seed=2, exponent=0.5, cut="pages"),
        ]
        for chosen in ([reads[0]], reads):
            torch.set_num_threads(1)
            alone = [run(instructions, [row(read, r) for read in chosen]) for r in range(33)]
            out, lse = torch.cat([o.out for o in alone]), torch.cat([o.lse for o in alone], dim=1)
            for rows in ROWS if n < CHUNK else (2, 8, 33):
                for threads in (1, 3):
                    torch.set_num_threads(threads)
                    output = run(instructions, [some(read, rows) for read in chosen])
                    assert same(output, Output(out[:rows], lse[:, :rows]))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_how_entries_are_cut_into_runs_changes_no_bit(instructions: str) -> None:
    for n in (63, 200, 1100):
        one, pages = (drawn(8, SHAPES[0], n, "causal", cut=cut) for cut in ("one", "pages"))
        assert same(run(instructions, [one]), run(instructions, [pages]))


def test_later_entries_change_no_bit_of_rows_that_do_not_see_them() -> None:
    """What plain decoding computed when the cache was shorter is what a verification computes now."""
    long = drawn(4, SHAPES[0], 1300, "all")
    for n in (1, 64, 100, 1024, 1100):
        keys, values = (Entries(e.data, ((2, n),)) for e in (long.keys, long.values))
        short = dataclasses.replace(long, keys=keys, values=values, last=(n,) * 4)
        assert same(run("portable", [dataclasses.replace(long, last=(n,) * 4)]), run("portable", [short]))


def test_other_arithmetic_is_left_to_torch() -> None:
    chosen = Kernels("auto")
    chosen.choose("multi_read_attention", Facts("cpu", torch.bfloat16, 8, 8))
    assert chosen.choices[-1].refused[0] == ("native", "computes in float32, not in bfloat16")
