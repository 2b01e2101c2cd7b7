"""Device attention on a GPU: which tiles, how many splits, and the launch of the two kernels of ``triton_kernels.py``.

The operator's own form, with runs of slots, is turned into tables of single entries and goes the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from foldspec.kernels.jit import power_of_two, refusal
from foldspec.kernels.multi_read_attention import Facts, Output, ReadArgs
from foldspec.kernels.multi_read_attention.device import DeviceOutput, DeviceRead
from foldspec.kernels.multi_read_attention.splits import MOST_PLACES, guess

__all__ = [
    "Configuration",
    "Tiles",
    "configurations",
    "device_attention",
    "merge",
    "multi_read_attention",
    "supports",
    "tiles",
]

WIDEST = 512  # of a head
MOST_READS = 3
PROCESSORS = 132  # of the GPU that the interpreter stands for


def supports(facts: Facts) -> str | None:
    if max(facts.key_width, facts.value_width) > WIDEST:
        return f"has heads of up to {WIDEST}, not {facts.key_width} and {facts.value_width}"
    return refusal(facts.device, facts.dtype)


class Tiles(NamedTuple):
    """``rows`` and ``entries`` of a tile, ``warps`` and pipeline ``stages`` of the kernel."""

    rows: int
    entries: int
    warps: int
    stages: int


# Entries of a tile, warps and stages, by head size: of the shapes tried, large ones without spilled registers.
HALF = {64: (64, 4, 3), 128: (32, 4, 3), 256: (32, 8, 3), 512: (32, 8, 2)}
HOPPER = {**HALF, 128: (64, 4, 3)}  # sm_90 with 64 rows
SINGLE = {64: (32, 8, 1), 128: (32, 8, 1), 256: (16, 8, 1), 512: (16, 8, 1)}  # for checks, not for speed


def tiles(width: int, rows: int, dtype: torch.dtype, arch: int) -> Tiles:
    """For heads of ``width`` and so many query rows a kv head, on architecture ``arch`` (80, 90, ...)."""
    size = next(size for size in HALF if width <= size)
    single = dtype == torch.float32
    roomy = 90 <= arch < 120  # what comes before and after has less shared memory
    tallest = 32 if single or (size == WIDEST and not roomy) else 64
    tall = next((tall for tall in (16, 32) if rows <= tall), tallest)
    return Tiles(tall, *(SINGLE if single else HOPPER if arch == 90 and tall == 64 else HALF)[size])


def _parts(value_width: int) -> tuple[int, int]:
    """Columns of values in a program's tile, and the programs that share a tile's columns."""
    block = power_of_two(min(max(value_width, 16), 256))
    return block, -(-value_width // block)


def _constants(width: int, value_width: int, tile: Tiles, aligned: bool) -> dict[str, int]:
    block, parts = _parts(value_width)
    return {
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.entries,
        "BLOCK_D": power_of_two(max(width, 16)),
        "BLOCK_V": block,
        "PARTS": parts,
        "ALIGN": 16 if aligned else 1,
    }


def _merge_constants(value_width: int, reads: int, rows: int = 1) -> dict[str, int]:
    block = power_of_two(min(max(value_width, 16), 128))
    return {
        "READS": reads,
        "VALUE_WIDTH": value_width,
        "MOST": MOST_PLACES,
        "ROWS": rows,
        "CHUNK": 32,
        "BLOCK_V": block,
        "PARTS": -(-value_width // block),
    }


def _options(warps: int, stages: int) -> dict[str, Any]:
    """As launches and the gate have them. Without a number, the compiler may keep to 128 registers and spill the rest;
    whether products and sums are fused does not change with a version of Triton."""
    return {"num_warps": warps, "num_stages": stages, "maxnreg": 255, "enable_fp_fusion": True}


def _aligned(reads: Sequence[DeviceRead]) -> bool:
    """Whether all rows of q, keys and values begin at multiples of 16 bytes, and 16 elements apart."""
    return all(
        x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:-1])
        for read in reads
        for x in (read.q, read.keys, read.values)
    )


def device_attention(reads: Sequence[DeviceRead], out: torch.Tensor | None = None) -> DeviceOutput:
    """As :func:`device.device_reference` defines it, of at most three reads."""
    from foldspec.kernels.multi_read_attention import triton_kernels as kernels

    assert 1 <= len(reads) <= MOST_READS, "the merge knows three reads"
    q = reads[0].q
    requests, block, heads, width = q.shape
    kv_heads, value_width = reads[0].values.shape[1:]
    group = heads // kv_heads
    tile = tiles(max(width, value_width), block * group, q.dtype, _arch(q.device))
    constants = _constants(width, value_width, tile, _aligned(reads))
    across = -(-block * group // tile.rows) * kv_heads * constants["PARTS"]
    most = MOST_PLACES // len(reads)
    splits = [
        read.splits or guess(read.ring or read.entries, across * requests, _processors(q.device), most)
        for read in reads
    ]
    places = sum(splits)
    assert places <= MOST_PLACES, "too many splits for one merge"

    shape = requests, kv_heads, places, block * group
    o_part = torch.empty(*shape, value_width, dtype=torch.float32, device=q.device)
    lse_part = torch.empty(*shape, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        for i in range(0, len(reads), 2):
            a, b = reads[i], reads[min(i + 1, len(reads) - 1)]
            here = sum(splits[i : i + 2])
            pair = list(zip(*(_numbers(read, constants["ALIGN"]) for read in (a, b)), strict=True))
            kernels.split[here, across, requests](
                o_part,
                *_tensors(a),
                *_tensors(b),
                lse_part,
                a.scale * math.log2(math.e),
                b.scale * math.log2(math.e),
                splits[i],
                here,
                sum(splits[:i]),
                places,
                block,
                group,
                *(number for numbers in pair for number in numbers),
                kv_heads,
                **constants,
                **_options(tile.warps, tile.stages),
            )
    return _merge(reads, o_part, lse_part, splits, out)


def merge(
    reads: Sequence[DeviceRead], parts: Sequence[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor | None = None
) -> DeviceOutput:
    """As :func:`device.merge` defines it, of at most three reads whose parts come from elsewhere."""
    q = reads[0].q
    requests, block, heads, _ = q.shape
    kv_heads, value_width = reads[0].values.shape[1:]
    shape = requests, kv_heads, len(parts), block * (heads // kv_heads)
    o_part = torch.empty(*shape, value_width, dtype=torch.float32, device=q.device)
    lse_part = torch.empty(*shape, dtype=torch.float32, device=q.device)
    for i, (o, lse) in enumerate(parts):
        # [R, B, heads, ...] -> [R, kv heads, rows, ...], as the kernel counts rows
        for to, x in ((o_part, o), (lse_part, lse * math.log2(math.e))):
            to[:, :, i].unflatten(2, (block, -1)).copy_(x.unflatten(2, (kv_heads, -1)).transpose(1, 2))
    return _merge(reads, o_part, lse_part, [1] * len(parts), out)


def _merge(
    reads: Sequence[DeviceRead],
    o_part: torch.Tensor,
    lse_part: torch.Tensor,
    splits: Sequence[int],
    out: torch.Tensor | None,
) -> DeviceOutput:
    from foldspec.kernels.multi_read_attention import triton_kernels as kernels

    assert 1 <= len(reads) <= MOST_READS, "the merge knows three reads"
    q = reads[0].q
    requests, block, heads, _ = q.shape
    kv_heads, value_width = reads[0].values.shape[1:]
    if out is None:
        out = torch.empty(requests, block, heads, value_width, dtype=q.dtype, device=q.device)
    assert out.stride(-1) == 1, "rows lie in one piece"
    lse = torch.empty(len(reads), requests, block, heads, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    ends = [sum(splits[: i + 1]) for i in range(MOST_READS)]
    exponents = [read.exponent for read in reads] + [1.0] * (MOST_READS - len(reads))
    # interpreted, a program costs much and its size nothing
    merging = _merge_constants(value_width, len(reads), 1 if q.is_cuda else 64)
    with torch.cuda.device_of(q):
        kernels.merge[-(-block * group // merging["ROWS"]), kv_heads * merging["PARTS"], requests](
            o_part,
            lse_part,
            out,
            lse,
            *ends,
            *exponents,
            sum(splits),
            block,
            group,
            *out.stride()[:3],
            kv_heads,
            **merging,
            **_options(4, 1),
        )
    return DeviceOutput(out, lse)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


def _arch(device: torch.device) -> int:
    if device.type != "cuda":  # interpreted
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _tensors(read: DeviceRead) -> tuple[torch.Tensor, ...]:
    return read.q, read.keys, read.values, read.key_table, read.value_table, read.first, read.last


def _numbers(read: DeviceRead, align: int) -> tuple[int, ...]:
    """Page bits, ring, and strides, as the kernel lists them."""
    tables = read.key_table.stride(0), read.value_table.stride(0)
    strides = *read.q.stride()[:3], *read.keys.stride()[:2], *read.values.stride()[:2]
    return read.page.bit_length() - 1, read.ring, *tables, *(stride // align for stride in strides)


# ---------------------------------------------------------------------------------------------- the operator's own form


def multi_read_attention(batch: Sequence[Sequence[ReadArgs]]) -> list[Output]:
    """Requests whose reads have the same shape and pools go together."""
    groups: dict[Any, list[int]] = {}
    for i, reads in enumerate(batch):
        groups.setdefault((len(reads[0].first), *map(_kind, reads)), []).append(i)
    outputs: list[Output | None] = [None] * len(batch)
    for members in groups.values():
        columns = zip(*(batch[i] for i in members), strict=True)
        found = device_attention([_together(column) for column in columns])
        for place, i in enumerate(members):
            outputs[i] = Output(found.out[place], found.lse[:, place])
    return [output for output in outputs if output is not None]


def _kind(read: ReadArgs) -> tuple[Any, ...]:
    """What reads of different requests must have in common to be one device read."""
    pools = [(x.data_ptr(), x.shape, x.stride()) for x in (read.keys.data, read.values.data)]
    return *pools, read.scale, read.exponent


def _together(column: Sequence[ReadArgs]) -> DeviceRead:
    """The reads of several requests as one; a page is a single entry."""
    device = column[0].q.device
    spans = [_spans(read.first, read.last) for read in column]
    first, last = (
        torch.stack([_bounds(read.first, read.last, span, device)[i] for read, span in zip(column, spans, strict=True)])
        for i in range(2)
    )
    longest = max(1, *(sum(last - first for first, last in span) for span in spans))
    key_table, value_table = (
        torch.stack([_slots(e.runs, span, longest, device) for e, span in zip(each, spans, strict=True)])
        for each in ([read.keys for read in column], [read.values for read in column])
    )
    return DeviceRead(
        torch.stack([read.q for read in column]),
        column[0].keys.data,
        column[0].values.data,
        key_table,
        value_table,
        first,
        last,
        scale=column[0].scale,
        exponent=column[0].exponent,
        page=1,
    )


@lru_cache(maxsize=64)
def _spans(first: tuple[int, ...], last: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The entries that any row sees, as spans: what lies between them may be anything, and is left out."""
    found: list[tuple[int, int]] = []
    for f, l in sorted((f, l) for f, l in zip(first, last, strict=True) if f < l):
        if found and f <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], l)
        else:
            found.append((f, l))
    return tuple(found)


# The layers of a forward share tables and bounds.
@lru_cache(maxsize=64)
def _slots(
    runs: tuple[tuple[int, int], ...], spans: tuple[tuple[int, int], ...], length: int, device: torch.device
) -> torch.Tensor:
    """int32 [length]: the slots of the entries in ``spans``, one after another."""
    slots = torch.zeros(length, dtype=torch.int32)
    done = 0
    for first, last in spans:
        start = 0
        for slot, count in runs:
            a, b = max(first, start), min(last, start + count)
            if a < b:
                slots[done : done + b - a] = torch.arange(slot + a - start, slot + b - start)
                done += b - a
            start += count
    return slots.to(device)


@lru_cache(maxsize=64)
def _bounds(
    first: tuple[int, ...], last: tuple[int, ...], spans: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [rows] each: bounds that count along ``spans``."""
    found: list[tuple[int, int]] = []
    for f, l in zip(first, last, strict=True):
        before = 0
        for begin, end in spans if f < l else ():
            if begin <= f < end:
                found.append((before + f - begin, before + l - begin))
                break
            before += end - begin
        else:
            found.append((0, 0))
    low, high = zip(*found, strict=True)
    return torch.tensor(low, dtype=torch.int32, device=device), torch.tensor(high, dtype=torch.int32, device=device)


# -------------------------------------------------------------------------------------- what is compiled ahead of time


@dataclass(frozen=True)
class Configuration:
    """A kernel as it is launched: what ``triton.compile`` needs to make the very same code without a GPU.

    ``signature`` names the type of every argument that is no constant; ``aligned`` lists those that begin at multiples
    of 16 bytes (``tt.divisibility``), and nothing else is specialised. ``options`` are the compiler's.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, int]
    aligned: tuple[str, ...]
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        return _options(self.warps, self.stages)


def configurations(arch: int) -> list[Configuration]:
    """Everything of this file that a GPU of architecture ``arch`` (80, 90, 100) may be asked to run, for heads of 64,
    128, 256 and 512 whose rows are aligned."""
    from foldspec.kernels.multi_read_attention import triton_kernels as kernels

    found = []
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for width in (64, 128, 256, 512):
            for tile in dict.fromkeys(tiles(width, rows, dtype, arch) for rows in (16, 32, 64)):
                constants = _constants(width, width, tile, True)
                found.append(
                    _configuration(f"split {short} {width} x{tile.rows}", kernels.split, short, constants, tile)
                )
            for reads in (1, 2):
                constants = _merge_constants(width, reads)
                name = f"merge {short} {width} of {reads}"
                found.append(_configuration(name, kernels.merge, short, constants, Tiles(1, 1, 4, 1)))
    return found


def _configuration(name: str, kernel: Any, dtype: str, constants: dict[str, int], tile: Tiles) -> Configuration:
    def type_of(argument: str) -> str:
        if argument in ("q_a", "k_a", "v_a", "q_b", "k_b", "v_b", "out"):
            return f"*{dtype}"
        if argument in ("o_part", "lse_part", "lse"):
            return "*fp32"
        if "table" in argument or argument in ("first_a", "last_a", "first_b", "last_b"):
            return "*i32"
        return "fp32" if argument.startswith(("scale", "exponent")) else "i32"

    signature = {name: type_of(name) for name in kernel.arg_names if name not in constants}
    return Configuration(name, kernel, signature, constants, ("o_part",), tile.warps, tile.stages)
