"""How many programs share a read's entries on a GPU: tried on the device, once for each device and shape.

More splits fill a GPU where requests and heads are few; each costs the merge a partial result. :meth:`Splits.tuning`,
while something warms up, measures calls that were not measured yet; any other call takes what was found, and a guess
where nothing was. The count changes the order of sums and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch

from foldspec.kernels.multi_read_attention.device import DeviceRead

__all__ = ["MOST_PLACES", "SPLITS", "Clock", "Splits", "device_seconds", "fastest", "guess"]

SPLITS = (1, 8, 16, 32, 64)
MOST_PLACES = 128  # splits of all reads of a call together: as many as the merge takes
FEWEST_ENTRIES = 256  # a split of fewer is not worth its merge
RUNS, REPEATS = 10, 5  # of a measurement
SOURCES = ("device.py", "splits.py", "triton.py", "triton_kernels.py")

Clock: TypeAlias = Callable[[Callable[[], object]], float]  # the seconds that a call takes on the device


def guess(entries: int, programs: int, processors: int, most: int = MOST_PLACES) -> int:
    """Splits of a read of so many entries, each of ``programs`` programs: as few as put two programs on each processor
    of the GPU, none of less than 256 entries, and ``most`` at most."""
    most = max(1, min(most, entries // FEWEST_ENTRIES))
    fitting = [count for count in SPLITS if count <= most]
    return next((count for count in fitting if count * programs >= 2 * processors), fitting[-1])


def fastest(lengths: Sequence[int], seconds: Callable[[tuple[int, ...]], float]) -> tuple[int, ...]:
    """Splits of each read, found read by read, the longest first: the count with which all reads together take least,
    the smallest of those that tie."""
    found = [1] * len(lengths)
    best = seconds(tuple(found))
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for count in SPLITS[1:]:
            tried = (*found[:i], count, *found[i + 1 :])
            if sum(tried) <= MOST_PLACES and (taken := seconds(tried)) < best:
                best, found[i] = taken, count
    return tuple(found)


def device_seconds(run: Callable[[], object]) -> float:
    """Of one call, replayed from a CUDA graph: what the GPU takes, and not what the host takes to ask for it."""
    run()  # compiles, if that has not been done
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            run()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / RUNS)
    return min(times[1:])


class Splits:
    """Choices of this process, and those kept in ``file`` (None: nowhere) for later ones; a file that is damaged or was
    made by other kernels counts for nothing, and one that cannot be written is left. ``device_name`` tells devices
    apart."""

    def __init__(
        self,
        file: Path | None = None,
        clock: Clock = device_seconds,
        device_name: Callable[[torch.device], str] = torch.cuda.get_device_name,
    ) -> None:
        self._file, self._clock, self._device_name = file, clock, device_name
        self._chosen: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._tuning = False

    @contextmanager
    def tuning(self) -> Iterator[None]:
        """Within this, and never in a round, :meth:`filled` measures what has not been measured."""
        before, self._tuning = self._tuning, True
        try:
            yield
        finally:
            self._tuning = before

    def filled(
        self, reads: Sequence[DeviceRead], launch: Callable[[Sequence[DeviceRead]], object]
    ) -> Sequence[DeviceRead]:
        """The reads of a call with their splits, as far as they are known; ``launch`` runs such a call. Outside of
        :meth:`tuning` it reads no number on the host."""
        key = tuple(_shape(read) for read in reads)
        if self._tuning:
            self._chosen[key] = self._tuned(reads, launch)
        if key not in self._chosen:
            return reads
        return [replace(read, splits=read.splits or n) for read, n in zip(reads, self._chosen[key], strict=True)]

    def _tuned(self, reads: Sequence[DeviceRead], launch: Callable[[Sequence[DeviceRead]], object]) -> tuple[int, ...]:
        longest = [_longest(read) for read in reads]
        lengths = [length for _, length in longest]
        shape = " + ".join(f"{_words(read)} {length}" for read, length in zip(reads, lengths, strict=True))
        device, kept = self._device_name(reads[0].q.device), self._load()
        known = kept.get(device, {}).get(shape)
        if known is not None and len(known) == len(reads):
            return tuple(known)

        def seconds(splits: tuple[int, ...]) -> float:
            call = [replace(read, splits=count) for (read, _), count in zip(longest, splits, strict=True)]
            return self._clock(lambda: launch(call))

        found = fastest(lengths, seconds)
        kept = self._load()  # another process may have written meanwhile
        kept.setdefault(device, {})[shape] = list(found)
        self._save(kept)
        return found

    def _load(self) -> dict[str, dict[str, list[int]]]:
        """device -> shape -> splits of each read."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8")) if self._file else {}
            fits = found["source"] == _source() and all(
                set(splits) <= set(SPLITS) and sum(splits) <= MOST_PLACES
                for shapes in found["choices"].values()
                for splits in shapes.values()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        choices: dict[str, dict[str, list[int]]] = found["choices"] if fits else {}
        return choices

    def _save(self, choices: dict[str, dict[str, list[int]]]) -> None:
        if self._file is None:
            return
        unfinished = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            try:
                text = json.dumps({"source": _source(), "choices": choices}, indent=1, sort_keys=True)
                unfinished.write_text(text, encoding="utf-8")
                os.replace(unfinished, self._file)
            finally:
                unfinished.unlink(missing_ok=True)


def _shape(read: DeviceRead) -> tuple[Any, ...]:
    """What is known of a read without a look at the device."""
    return (*read.q.shape, *read.values.shape[1:], read.q.dtype, read.page, read.ring, read.entries)


def _words(read: DeviceRead) -> str:
    requests, rows, heads, width = read.q.shape
    kv_heads, value_width = read.values.shape[1:]
    dtype = str(read.q.dtype).removeprefix("torch.")
    where = f"ring {read.ring}" if read.ring else f"page {read.page}"
    return f"{requests}x{rows}x{heads}/{kv_heads}x{width}/{value_width} {dtype} {where} over"


def _longest(read: DeviceRead) -> tuple[DeviceRead, int]:
    """A read as it may come to be, and its entries. One from the first entry on grows, to all that its tables have room
    for: a choice for what it has today would outlive that. A window stays what it is."""
    width = int((read.last - read.first).amax())
    if read.ring or int(read.first.amin()) > 0 or width < 1:
        return read, width
    pages = read.value_table.shape[1]
    # over pages all over the pool, so that none of it is read out of a cache
    table = torch.arange(read.value_table.numel(), device=read.q.device) % (len(read.values) // read.page)
    table = table.int().view(-1, pages)
    first, last = torch.zeros_like(read.first), torch.full_like(read.last, read.entries)
    return replace(read, key_table=table, value_table=table, first=first, last=last), read.entries


def _source() -> str:
    """What stands for the kernels that were measured: their source, and the compiler's version."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    with suppress(metadata.PackageNotFoundError):
        digest.update(metadata.version("triton").encode())
    return digest.hexdigest()[:24]
