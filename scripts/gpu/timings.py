"""What single kernels take, replayed from a CUDA graph, beside the bytes that they must read, SDPA and flash-attn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from foldspec.errors import FoldspecError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import flash, triton
from foldspec.kernels.multi_read_attention.device import DeviceRead, facts_of
from foldspec.kernels.multi_read_attention.splits import Splits
from foldspec.kernels.rotate_append.device import Move
from gpu.right_verify import large_blocks, verifier
from gpu.rows import Numbers, Row
from gpu.setting import Setting

__all__ = ["LENGTHS", "Ceiling", "copy_ceiling", "rows"]

LENGTHS = (131_072, 32_768, 8_192)
COLD = 300_000_000  # bytes that calls in turn read, more than a GPU's caches hold


class Shape(NamedTuple):
    """A layer: query heads, kv heads, head size, rows of a block, and FOLD's window."""

    name: str
    heads: int
    kv_heads: int
    width: int
    block: int
    window: int


LLAMA = Shape("Llama-3.1-8B", 32, 8, 128, 10, 2048)
OTHERS = (
    Shape("Qwen3.5-9B", 16, 4, 256, 16, 4096),
    Shape("Gemma-4-12B sliding", 16, 8, 256, 7, 4096),
    Shape("Gemma-4-12B", 16, 1, 512, 7, 4096),
)
TINY = Shape("tiny", 4, 2, 16, 5, 16)


class Ceiling:
    """The rate at which memory is copied, bytes a second, once it is measured."""

    rate: float | None = None

    def floor(self, moved: float) -> float | None:
        """Seconds that so many bytes take at least."""
        return None if self.rate is None else moved / self.rate


def rows(setting: Setting, ceiling: Ceiling) -> list[Row]:
    found = [copy_ceiling(setting, ceiling, 1)]
    llama, lengths = (TINY, (60, 40)) if setting.dry else (LLAMA, LENGTHS)
    attention = partial(_attention_rows, setting, ceiling)
    found += [row for length in lengths for row in attention(llama, length)]
    found += list(_small_rows(setting, ceiling))
    if not setting.dry:
        found += [row for shape in OTHERS for row in attention(shape, LENGTHS[0])]
    return found


def copy_ceiling(setting: Setting, ceiling: Ceiling, part: int) -> Row:
    def run() -> Numbers:
        size = 1 << (20 if setting.dry else 31)
        x = torch.zeros(size, dtype=torch.uint8, device=setting.device)
        y = torch.empty_like(x)
        ceiling.rate = 2 * size / setting.clock(lambda: y.copy_(x))
        return {"bytes_per_second": ceiling.rate}

    return Row(f"ceiling/copy, part {part}", part, 10.0, run)


def result(ceiling: Ceiling, seconds: float, moved: float, **more: Any) -> Numbers:
    """``share``: of the copy ceiling that these bytes, each counted once, come to."""
    floor = ceiling.floor(moved)
    return {
        "us": 1e6 * seconds,
        "bytes": moved,
        "floor_us": None if floor is None else 1e6 * floor,
        "share": None if floor is None else floor / seconds,
        **more,
    }


# ------------------------------------------------------------------------------------------------------------ attention


def _attention_rows(setting: Setting, ceiling: Ceiling, shape: Shape, length: int) -> Iterator[Row]:
    for what in ("fold", "whole", "one row"):
        name = f"time/attention {shape.name} {what} {length}"
        run = partial(attention, setting, ceiling, shape, what, length)
        yield Row(name, 1, 15.0, run, ("right/attention triton", "right/merge triton"))


def attention(setting: Setting, ceiling: Ceiling, shape: Shape, what: str, length: int) -> Numbers:
    """``fold``: both branches of a drafter's block; ``whole``: all entries for a block, as the original drafter and
    verification read them; ``one row``: as plain decoding does."""
    sets = made(setting, shape, what, length)
    splits = _splits(setting, sets[0])
    sets = [[replace(read, splits=n) for read, n in zip(reads, splits, strict=True)] for reads in sets]
    seconds = setting.clock(_in_turn(triton.device_attention, sets))
    rows = 1 if what == "one row" else shape.block
    each = shape.kv_heads * 2 * shape.width * setting.dtype.itemsize
    # of FOLD's far read [0, n - W) and near read [n - W - B + 1, n + B) a part is read twice
    entries = length + rows + (shape.block - 1 if what == "fold" else 0)
    numbers = result(ceiling, seconds, entries * each, splits=splits, sets=len(sets))
    if what != "fold":
        numbers |= beside(setting, shape, rows, length, sets[0][0])
    return numbers


def _splits(setting: Setting, reads: Sequence[DeviceRead]) -> list[int]:
    """As an engine chooses them while it warms up; dry, where no clock could say, two of each."""
    if setting.dry:
        return [2] * len(reads)
    splits = Splits(None, setting.clock)
    with splits.tuning():
        return [read.splits for read in splits.filled(reads, triton.device_attention)]


def made(setting: Setting, shape: Shape, what: str, length: int) -> list[list[DeviceRead]]:
    """Calls that read different pages, so that none finds in a cache what the one before it read."""
    dtype, to = setting.dtype, setting.device
    page = 16 if setting.dry else 256
    rows = 1 if what == "one row" else shape.block
    pages = -(-(length + rows) // page)
    size = length * shape.kv_heads * shape.width * 2 * dtype.itemsize
    count = 1 if setting.dry else max(1, min(8, -(-COLD // size)))
    draw = setting.draw()

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=draw, device=to, dtype=dtype)

    keys, values = (random(count * pages * page, shape.kv_heads, shape.width) for _ in range(2))
    tables = torch.randperm(count * pages, generator=draw, device=to).int().view(count, 1, pages)
    row = torch.arange(rows, device=to, dtype=torch.int32)[None]
    zero, end = torch.zeros_like(row), torch.full_like(row, length + rows)
    scale = shape.width**-0.5
    found = []
    for table in tables:
        q = random(1, rows, shape.heads, shape.width)
        if what != "fold":
            found.append([DeviceRead(q, keys, values, table, table, zero, length + 1 + row, scale, page=page)])
            continue
        reach = shape.window + shape.block
        ring = reach + shape.block
        window, place = random(ring, shape.kv_heads, shape.width), torch.zeros(1, 1, dtype=torch.int32, device=to)
        first = (length + row - reach + 1).clamp(min=0)
        near = DeviceRead(q, window, values, place, table, first, end, scale, page=page, ring=ring)
        far = DeviceRead(random(1, rows, shape.heads, shape.width), keys, values, table, table, zero, first,
                         2 * scale, exponent=0.5, page=page)  # fmt: skip
        found.append([near, far])
    return found


def _in_turn(call: Callable[[Any], object], sets: list[Any]) -> Callable[[], object]:
    turns = itertools.cycle(sets)
    return lambda: call(next(turns))


def beside(setting: Setting, shape: Shape, rows: int, length: int, read: DeviceRead) -> Numbers:
    """The same bytes by torch, keys and values in one piece, query heads packed into rows or not; and by flash-attn."""
    q = read.q.transpose(1, 2)
    k, v = (x[:length].transpose(0, 1)[None].contiguous() for x in (read.keys, read.values))
    packed = q.reshape(1, shape.kv_heads, -1, shape.width)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found: Numbers = {}
    for name, call in (
        ("sdpa_us", lambda: sdpa(q, k, v, enable_gqa=True)),
        ("sdpa_packed_us", lambda: sdpa(packed, k, v)),
        ("flash_us", lambda: flash.device_part(read, -1, 0)),
    ):
        reason = flash.supports(facts_of(read)) if name == "flash_us" else None
        try:
            found[name] = 1e6 * setting.clock(call) if reason is None else reason
        except (RuntimeError, FoldspecError) as error:  # not ours: what ours takes is told all the same
            found[name] = f"failed: {error}".splitlines()[0][:200]
    return found


# --------------------------------------------------------------------------------------------------- everything smaller


def _small_rows(setting: Setting, ceiling: Ceiling) -> Iterator[Row]:
    versions = ("triton",) if setting.dry else ("triton", "reference")
    for version in versions:
        kernels = setting.kernels(version)
        for name, operator, call in (
            ("norm of 10 rows", "rms_norm", _norm),
            ("gate of 10 rows", "gate_mul", _gate),
            ("a block's rows", "rotate_append", _moves),
        ):
            run = partial(_small, setting, ceiling, kernels, call)
            yield Row(f"time/{operator} {version} {name}", 1, 8.0, run, (f"right/{operator} {version}",))
    for version in ("cuda", *versions):
        for greedy in (True, False):
            name = f"time/verify {version} {'greedy' if greedy else 'sampled'}"
            run = partial(_verify, setting, ceiling, version, greedy)
            yield Row(name, 1, 10.0, run, (f"right/verify {version}",))


Prepared = tuple[Callable[[], object], int]  # a call, and the bytes that it reads and writes


def _small(
    setting: Setting, ceiling: Ceiling, kernels: Kernels, prepare: Callable[[Setting, Kernels], Prepared]
) -> Numbers:
    call, moved = prepare(setting, kernels)
    return result(ceiling, setting.clock(call), moved)


def _random(setting: Setting, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device=setting.device, dtype=setting.dtype)


def _norm(setting: Setting, kernels: Kernels) -> Prepared:
    width = 72 if setting.dry else 4096
    x, weight = _random(setting, 10, width), _random(setting, width)
    return (lambda: kernels.rms_norm(x, weight, 1e-5)), (2 * x.numel() + width) * x.itemsize


def _gate(setting: Setting, kernels: Kernels) -> Prepared:
    joined = _random(setting, 10, 2 * (72 if setting.dry else 14_336))
    gate, up = joined.chunk(2, 1)
    return (lambda: kernels.silu_mul(gate, up)), 3 * gate.numel() * gate.itemsize


def _moves(setting: Setting, kernels: Kernels) -> Prepared:
    shape = TINY if setting.dry else LLAMA
    q = _random(setting, shape.block, shape.heads, shape.width)
    k, v = (_random(setting, shape.block, shape.kv_heads, shape.width) for _ in range(2))
    pools = [_random(setting, 4096, shape.kv_heads, shape.width) for _ in range(2)]
    slots = torch.arange(shape.block, device=setting.device)
    table = torch.rand(shape.block, 2, shape.width // 2, device=setting.device)
    angles, into = (table[:, :1], table[:, 1:]), [torch.empty_like(q) for _ in range(2)]
    block = [Move(q, place, None, angles) for place in into]
    block += [Move(k, pools[0], slots, angles), Move(v, pools[1], slots)]
    return (lambda: kernels.move_rows(block)), 2 * sum(x.numel() * x.itemsize for x in (q, q, k, v))


def _verify(setting: Setting, ceiling: Ceiling, version: str, greedy: bool) -> Numbers:
    rows, vocabulary = (3, 5000) if setting.dry else (LLAMA.block, 128_256)
    blocks = large_blocks(setting, rows, vocabulary, greedy, rows - 2)
    verify = verifier(setting, version)
    # in a round, too, the head has just written them
    return result(ceiling, setting.clock(lambda: verify(blocks)), blocks.logits.numel() * blocks.logits.itemsize)
