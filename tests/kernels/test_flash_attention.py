"""The flash-attn adapter over a stand-in of the released module: the operator's numbers where its reads can be said to
flash-attn, else a refusal with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flash_stand_in
import pytest
import tiny
import torch
from flash_stand_in import Calls
from kernels.test_multi_read_attention import PATTERNS, Dense, by_hand, made
from output_laws import mutant
from reading import Reading, draw

from foldspec import Engine, SamplingParams
from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import Entries, Facts, Output, ReadArgs, flash

PAGE = 256
# rows, query heads a kv head, kv heads, width, entries
SHAPES = [
    (1, 1, 1, 8, 1),
    (2, 3, 2, 8, 9),
    (3, 7, 1, 24, 33),
    (5, 3, 1, 16, 517),
    (7, 4, 1, 64, 270),
    (16, 4, 2, 8, 50),
    (16, 1, 2, 256, 60),
    (10, 4, 1, 128, 12),
]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    yield flash_stand_in.install(monkeypatch)


def stored(read: Dense, *, offset: int, seed: int, dtype: torch.dtype) -> ReadArgs:
    """A read in pages of 256 out of order, the first entry at ``offset`` of its page: what no row sees, and what is
    before it in its page, is wrong but a number; every other slot holds NaN."""
    count = len(read.k)
    used = -(-(offset + count) // PAGE)
    pages = torch.randperm(used + 3, generator=torch.Generator().manual_seed(seed))[:used].tolist()
    slots = [pages[(offset + e) // PAGE] * PAGE + (offset + e) % PAGE for e in range(count)]
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and sum(runs[-1]) == slot:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((slot, 1))
    unseen = [e for e in range(count) if not any(f <= e < l for f, l in zip(read.first, read.last, strict=True))]
    end = max((l for f, l in zip(read.first, read.last, strict=True) if f < l), default=0)
    entries = []
    for x in (read.k, read.v):
        pool = torch.full(((used + 3) * PAGE, *x.shape[1:]), torch.nan, dtype=dtype)
        pool[pages[0] * PAGE : pages[0] * PAGE + offset] = 300.0
        pool[slots] = x.to(dtype)
        pool[[slots[e] for e in unseen]] = 300.0
        pool[[slots[e] for e in unseen if e >= end]] = torch.nan
        entries.append(Entries(pool, tuple(runs)))
    return ReadArgs(read.q.to(dtype), *entries, read.first, read.last, read.scale, read.exponent)


def check(found: Output, wanted: Output, dtype: torch.dtype) -> None:
    assert found.out.dtype == dtype and found.out.shape == wanted.out.shape
    torch.testing.assert_close(found.out.double(), wanted.out, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(found.lse.double(), wanted.lse, atol=1e-5, rtol=1e-5)


def run(reads: Sequence[Dense], dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> Output:
    stored_reads = [stored(read, offset=offset, seed=i, dtype=dtype) for i, read in enumerate(reads)]
    (output,) = Kernels("flash-attn").multi_read_attention([stored_reads])
    return output


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_gives_the_numbers_of_the_definition(shape: tuple[int, int, int, int, int], pattern: str) -> None:
    """One read alone, and as the sharpened read beside a plain one: FOLD's two."""
    rows, _, _, _, entries = shape
    alone = [made(shape, pattern, scale=1.0, exponent=1.0, seed=1)]
    alpha, other = 2.5, (*shape[:4], shape[4] // 2 + 1)
    pair = [
        made(other, "all", scale=1.0, exponent=1.0, seed=2),
        made(shape, pattern, scale=alpha, exponent=1 / alpha, seed=3),
    ]
    # the only reads of these that are no band: two kinds of rows, and a window that begins behind the diagonal
    odd = (pattern == "far apart" and rows > 1) or (pattern == "window" and rows > entries - entries // 2)
    for reads in (alone, pair, pair[::-1]):
        if odd:
            with pytest.raises(UsageError, match="flash-attn: rows must see a band of entries along the diagonal"):
                run(reads)
            continue
        wanted = by_hand(reads)
        for dtype in (torch.bfloat16, torch.float16):
            check(run(reads, dtype), wanted, dtype)


@pytest.mark.parametrize("rows", [1, 7])
def test_entries_that_begin_within_a_page(rows: int) -> None:
    """A window whose oldest entry is in the middle of a page; a read of everything cannot begin there."""
    window = Dense(
        *made((rows, 2, 1, 16, 400), "all", scale=1.0, exponent=1.0, seed=4).__dict__.values()  # type: ignore[arg-type]
    )
    first = tuple(range(rows))
    for offset in (1, 100, 255):
        read = Dense(window.q, window.k, window.v, first, (400,) * rows, window.scale)
        if rows == 1:
            first = (0,)
        check(run([read], offset=offset), by_hand([read]), torch.bfloat16)
    if rows > 1:
        with pytest.raises(UsageError, match="a band of entries along the diagonal"):
            run([window], offset=100)


def fold_reads(n: int, rows: int, window: int, alpha: float, shape: tuple[int, int, int]) -> list[Dense]:
    """FOLD's two reads of a full layer, by its definition."""
    group, kv, width = shape
    reach, draw = window + rows, torch.Generator().manual_seed(n)
    q, q_far, k, v = (
        torch.randn(count, heads, width, generator=draw).bfloat16().double()
        for count, heads in ((rows, group * kv), (rows, group * kv), (n + rows, kv), (n + rows, kv))
    )
    last = tuple(max(0, n + r - reach + 1) for r in range(rows))
    near = Dense(q, k, v, last, (n + rows,) * rows, width**-0.5)
    return [near, Dense(q_far, k[:n], v[:n], (0,) * rows, last, alpha * width**-0.5, 1 / alpha)]


@pytest.mark.parametrize("alpha", [1.0, 2.0, 4.0])
@pytest.mark.parametrize(("rows", "shape"), [(7, (4, 2, 16)), (10, (3, 1, 64)), (16, (1, 2, 128))], ids=str)
def test_folds_reads_are_two_calls(rows: int, shape: tuple[int, int, int], alpha: float, calls: Calls) -> None:
    """Near: a window that is not causal, of D - 1 entries to the left; far: causal, over n - W entries, whose first
    rows see nothing while those are fewer than B."""
    window = 32
    for n in (1, window - 1, window, window + 1, window + rows - 1, window + rows, 300):
        reads = fold_reads(n, rows, window, alpha, shape)
        calls.clear()
        check(run(reads), by_hand(reads), torch.bfloat16)
        near, far = calls
        assert near["causal"] is False and near["window_size"][1] == -1
        if n >= window + rows:
            assert near["window_size"][0] == window + rows - 1
        assert near["cache_seqlens"].tolist() == [n + rows] and far["cache_seqlens"].tolist() == [max(0, n - window)]
        if n > window + 1:  # else at most one row sees anything, and bounds of the others are no matter
            assert far["causal"] is True and far["window_size"] == (-1, -1)
        assert far["softmax_scale"] == alpha * shape[2] ** -0.5


def test_requests_of_one_kind_are_one_call(calls: Calls) -> None:
    """Of any lengths, in one pool; another kind is another call."""
    rows, lengths = 4, (300, 70, 520)
    source, pools = [fold_reads(n, rows, 32, 2.0, (2, 1, 16))[1] for n in lengths], []
    for x in ([read.k for read in source], [read.v for read in source]):
        pool = torch.full((9 * PAGE, 1, 16), torch.nan, dtype=torch.bfloat16)
        for i, entries in enumerate(x):
            for page, piece in zip((5 - i, 6 + i, 0)[: -(-len(entries) // PAGE)], entries.split(PAGE), strict=True):
                pool[page * PAGE : page * PAGE + len(piece)] = piece.bfloat16()
        pools.append(pool)
    runs = [
        tuple(((5 - i, 6 + i, 0)[j] * PAGE, min(PAGE, n - j * PAGE)) for j in range(-(-n // PAGE)))
        for i, n in enumerate(lengths)
    ]
    batch = [
        [ReadArgs(r.q.bfloat16(), Entries(pools[0], at), Entries(pools[1], at), r.first, r.last, r.scale, r.exponent)]
        for r, at in zip(source, runs, strict=True)
    ]
    found = Kernels("flash-attn").multi_read_attention(batch)
    assert len(calls) == 1 and calls[0]["cache_seqlens"].tolist() == [n - 32 for n in lengths]
    for output, read in zip(found, source, strict=True):
        check(output, by_hand([read]), torch.bfloat16)
    everything = (0,) * rows, (300,) * rows
    batch[0] = [ReadArgs(batch[0][0].q, *(Entries(pool, runs[0]) for pool in pools), *everything, 0.25)]
    assert len(Kernels("flash-attn").multi_read_attention(batch)) == 3 and len(calls) == 3


# ------------------------------------------------------------------------------------------- a drafter, and an engine


def reading(kernel: str, page: int = PAGE, **options: Any) -> Reading:
    chosen = {"context": "fold", "window": 24, "alpha": 2.0, "layout": "paper"} | options
    return Reading(kernel, block=6, heads=2, width=16, dtype=torch.bfloat16, page=page, **chosen)


@pytest.mark.parametrize("name", ["fold", "rerope", "window", "full", "shared_window"])
def test_a_drafter_in_the_papers_layout(name: str) -> None:
    """In pages of 256, at lengths around every boundary: what the reference makes of the same reads."""
    for n in (0, 1, 23, 24, 25, 29, 30, 31, 200, 255, 256, 257, 290, 600):
        q, k, v = (x.bfloat16() for x in draw(n, 6, 4, 2, 16, seed=n))
        found, wanted = (reading(kernel, context=name).whole(q, k, v) for kernel in ("flash-attn", "reference"))
        torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)


def test_what_it_cannot_read_is_refused_with_the_reason() -> None:
    q, k, v = (x.bfloat16() for x in draw(100, 6, 4, 2, 16))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"layout": "single"}, "keys must lie where their values do; use --context-opt layout=paper"),
        ({"page": 64}, "entries must follow one another in pages of a multiple of 256; use --page-size 256"),
        ({"context": "streaming", "sinks": 4, "recents": 20}, "rows must see a band of entries along the diagonal"),
        (
            {"context": "infllm", "infllm_block": 8, "infllm_init": 6, "infllm_topk": 2},
            "entries must follow one another",
        ),
    ]
    for options, message in wrong:
        one = reading("flash-attn", **options)
        for a, b, request in ((0, 60, 0), (0, 60, 1), (60, 100, 0)):  # another request's page lies in between
            one.absorb(k[a:b], v[a:b], request)
        with pytest.raises(UsageError) as error:
            one.attend(q, k[100:], v[100:])
        assert str(error.value).startswith("--kernels: flash-attn: ") and message in str(error.value), options


def test_an_engine_runs_on_it_when_asked() -> None:
    folder = tiny.PAIRS / "a_llama_zlab"
    options: dict[str, Any] = {"kernels": "flash-attn", "dtype": "bfloat16", "window": 24, "max_context": 512}
    with Engine.load(
        target=str(folder / "target"), drafter=str(folder / "drafter"), device="cpu", layout="paper", **options
    ) as engine:
        done = engine.generate(list(range(4, 284)), SamplingParams(max_tokens=12, ignore_eos=True))
        assert len(done.token_ids) == 12 and engine.env()["kernels"]["multi_read_attention"]["runs"] == "flash-attn"
        with pytest.raises(UsageError, match="flash-attn: keys must lie where their values do"):
            engine.using(layout="single").generate(list(range(4, 284)))


# ------------------------------------------------------------------------------------------------ where it does not fit

FITS = Facts("cpu", torch.bfloat16, 128, 128)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (FITS, None),
        (FITS._replace(dtype=torch.float16, key_width=256, value_width=256), None),
        (FITS._replace(dtype=torch.float32), "computes in half precision alone, not in float32"),
        (FITS._replace(key_width=512, value_width=512), "has heads of a multiple of 8 up to 256, not of 512"),
        (FITS._replace(key_width=20, value_width=20), "has heads of a multiple of 8 up to 256, not of 20"),
        (FITS._replace(value_width=64), "needs keys and values of one width, not 128 and 64"),
        (FITS._replace(device="cuda"), "runs on a GPU, not on cuda"),  # the stand-in's GPU is the CPU
    ],
)
def test_limits(facts: Facts, reason: str | None) -> None:
    assert flash.supports(facts) == reason


def test_without_the_module_and_with_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_stand_in.install(monkeypatch, "3.0.0")
    assert flash.supports(FITS) == "is written for flash-attn 2, not 3.0.0"
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    assert flash.supports(FITS) == "flash-attn is not installed"
    monkeypatch.setattr(flash, "DEVICE", "cuda")
    assert flash.supports(FITS) == "runs on a GPU, not on cpu"
    with pytest.raises(UsageError, match="flash-attn: runs on a GPU, not on cpu"):
        Kernels("flash-attn").choose("multi_read_attention", FITS)


def test_it_runs_only_when_asked() -> None:
    for facts in (FITS, FITS._replace(device="cuda")):
        kernels = Kernels()
        kernels.choose("multi_read_attention", facts)
        assert kernels.choices[0].name != "flash-attn"


# -------------------------------------------------------------------------------------------------------------- mutants

MISTAKES = [
    ("window_size=(left, right or -1)", "window_size=(left - 1, right or -1)"),
    ("window_size=(left, right or -1)", "window_size=(left + 1, right or -1)"),
    ("causal=right == 0", "causal=False"),
    ("causal=right == 0", "causal=True"),
    ("lse.transpose(1, 2).masked_fill(empty[..., None], -torch.inf)", "lse.transpose(1, 2)"),
    (".masked_fill(empty[..., None], -torch.inf)", ".masked_fill(lse.transpose(1, 2) > 50, -torch.inf)"),
    ("read.last.masked_fill(empty, 0).amax(1)", "read.last.amax(1) - 1"),
    ("read.last.masked_fill(empty, 0).amax(1)", "read.last.masked_fill(empty, 0).amax(1) + 1"),
    ("softmax_scale=read.scale", "softmax_scale=None"),
    ("cache_seqlens=read.last", "cache_seqlens=read.last.long()"),
    ("(f + start, l + start) if f < l else (0, 0)", "(f, l) if f < l else (0, 0)"),
    ("_pages(read.keys.runs) != found or len(read.keys.data) != len(read.values.data)", "False"),
]


def numbers(adapter: Callable[..., list[Output]]) -> None:
    """What the tests above look at, once over."""
    for n, rows in ((300, 7), (35, 7), (33, 10)):
        reads = fold_reads(n, rows, 32, 2.0, (2, 1, 16))
        check(
            adapter([[stored(read, offset=0, seed=1, dtype=torch.bfloat16) for read in reads]])[0],
            by_hand(reads),
            torch.bfloat16,
        )
    window = fold_reads(300, 7, 32, 2.0, (2, 1, 16))[0]
    low = min(window.first)
    cut = Dense(window.q, window.k[low:], window.v[low:], tuple(f - low for f in window.first), (307 - low,) * 7, 0.25)
    check(adapter([[stored(cut, offset=low % PAGE, seed=1, dtype=torch.bfloat16)]])[0], by_hand([cut]), torch.bfloat16)
    huge = Dense(16 * window.q, window.k, window.v, window.first, window.last, 1.0)  # masses above any threshold
    check(adapter([[stored(huge, offset=0, seed=1, dtype=torch.bfloat16)]])[0], by_hand([huge]), torch.bfloat16)
    good = stored(cut, offset=low % PAGE, seed=1, dtype=torch.bfloat16)
    other = stored(cut, offset=low % PAGE, seed=2, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="keys must lie where"):
        adapter([[ReadArgs(good.q, good.keys, other.values, good.first, good.last, good.scale)]])


def test_the_checks_pass_without_a_mistake() -> None:
    numbers(flash.multi_read_attention)


@pytest.mark.parametrize(("old", "new"), MISTAKES)
def test_a_mistake_is_seen(old: str, new: str) -> None:
    adapter = mutant(flash, old, new)["multi_read_attention"]
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        numbers(adapter)
