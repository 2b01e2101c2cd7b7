"""What is in a checkpoint's safetensors files, known and checked before a tensor is read. Imports no torch.

A file is 8 bytes of header length (little endian), a JSON header ``{name: {dtype, shape, data_offsets}}`` and the
tensors' bytes. Every byte must belong to exactly one tensor; ``model.safetensors.index.json`` and the headers of the
shards it names must agree both ways.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foldspec.errors import CheckpointError

__all__ = ["Entry", "Weights", "check", "entries_of", "read_headers"]

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes an element
INTEGERS = {"I64": 8, "I32": 4}  # accepted only for tensors that hold ids, such as d2t
_SIZES = {**FLOATS, **INTEGERS}
_MAX_HEADER = 100 << 20  # as the safetensors library itself

Rename = Callable[[str], "str | None"]  # name in the file -> key of the module; None: not used
Reader = Callable[[str], "dict[str, Entry] | None"]  # name of a safetensors file -> its tensors; None: no such file


@dataclass(frozen=True)
class Entry:
    """One tensor: its file, type (a key of ``FLOATS`` or ``INTEGERS``), shape, and bytes ``[start, start + size)``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Weights:
    """All tensors of a checkpoint folder, by name, none of them read."""

    folder: Path
    entries: dict[str, Entry]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size for entry in self.entries.values())

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: entry.dtype for name, entry in self.entries.items()}


def read_headers(folder: Path, read: Reader | None = None, stem: str = "model") -> Weights:
    """Headers of ``model.safetensors``, or of the shards of ``model.safetensors.index.json``; or with another ``stem``.

    ``read`` gives the tensors of a file that lies elsewhere; the index is read from ``folder`` all the same.
    Raises :class:`CheckpointError`: no such files, truncated or trailing bytes, malformed or overlapping entries,
    unknown dtypes, index and shards at odds, a shard's name that is a path.
    """
    folder = Path(folder)
    read = read or _reader(folder)
    index = folder / f"{stem}.safetensors.index.json"
    single = read(f"{stem}.safetensors")
    if single is not None:
        return Weights(folder, single)
    if index.exists():
        return Weights(folder, _read_shards(folder, index, read))
    pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
    do = f"convert {pickles[0]} to safetensors (pickles are not read)" if pickles else "check the folder"
    raise CheckpointError(f"holds no {stem}.safetensors or {stem}.safetensors.index.json", where=str(folder), do=do)


def _reader(folder: Path) -> Reader:
    # os.path, because pathlib's exists raises for a name that is too long
    return lambda name: _read_file(folder / name) if os.path.exists(folder / name) else None


def check(
    weights: Weights,
    expected: Mapping[str, tuple[int, ...]],
    *,
    rename: Rename = lambda name: name,
    integer: Collection[str] = (),
) -> dict[str, Entry]:
    """Match the file's tensors to the keys and shapes that a module ``expected``; returns key -> entry.

    Each key must be met exactly once with its shape, by a float tensor or, for the keys in ``integer``, by an integer
    one. Raises :class:`CheckpointError` naming up to three offenders and their file. Reads no tensor.
    """
    found: dict[str, Entry] = {}
    twice: list[tuple[str, Entry]] = []
    unexpected, shapes, kinds = twice.copy(), twice.copy(), twice.copy()
    for name, entry in weights.entries.items():
        key = rename(name)
        if key is None:
            continue
        if key in found:
            twice.append((name, entry))
        elif key not in expected:
            unexpected.append((name, entry))
        elif entry.shape != tuple(expected[key]):
            shapes.append((f"{name} {list(entry.shape)}, not {list(expected[key])}", entry))
        elif (entry.dtype in INTEGERS) != (key in integer):
            kinds.append((f"{name} {entry.dtype}, not {'an integer' if key in integer else 'a float'}", entry))
        found[key] = entry
    missing = [key for key in expected if key not in found]
    if missing:
        raise CheckpointError(f"{len(missing)} missing tensors: {_some(missing)}", where=str(weights.folder))
    for what, faults in (
        ("unexpected tensors", unexpected),
        ("tensors of the wrong shape", shapes),
        ("tensors of the wrong dtype", kinds),
        ("tensors for a parameter that another tensor fills too", twice),
    ):
        if faults:
            names = _some([name for name, _ in faults])
            raise CheckpointError(f"{len(faults)} {what}: {names}", where=str(faults[0][1].file))
    return found


def _read_shards(folder: Path, index: Path, read: Reader) -> dict[str, Entry]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        items = list(weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"is not an index with a weight_map ({error})", where=str(index)) from None
    for name, shard in items:
        # a plain name only: a path could point at any file of this machine
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\:\0")
        if not plain:
            raise CheckpointError(
                f"{name} points outside the folder, to {shard!r}", where=str(index), do="do not use this checkpoint"
            )
    entries: dict[str, Entry] = {}
    for shard in sorted(set(weight_map.values())):
        inside = read(shard)
        if inside is None:
            raise CheckpointError(
                f"the shard {shard:.200} is missing", where=str(index), do="fetch the checkpoint again"
            )
        twice = [name for name in inside if name in entries]
        if twice:
            raise CheckpointError(f"tensors that another shard holds too: {_some(twice)}", where=str(folder / shard))
        extra = [name for name in inside if weight_map.get(name) != shard]
        if extra:
            what = f"tensors that the index does not place here: {_some(extra)}"
            raise CheckpointError(what, where=str(folder / shard))
        entries.update(inside)
    absent = [name for name in weight_map if name not in entries]
    if absent:
        raise CheckpointError(f"names tensors that their shards do not hold: {_some(absent)}", where=str(index))
    return entries


def _read_file(path: Path) -> dict[str, Entry]:
    def fault(what: str) -> CheckpointError:
        return CheckpointError(what, where=str(path), do="fetch the file again")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > _MAX_HEADER or 8 + length > size:
                raise fault(f"truncated or not safetensors: {size} bytes, a header of {length}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path)) from None
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise fault(f"malformed safetensors header ({error})") from None
    return entries_of(header, path, 8 + length, size)


def entries_of(header: Mapping[str, Any], path: Path, first: int, size: int) -> dict[str, Entry]:
    """The tensors that a header of ``path`` lists, ``{name: {dtype, shape, data_offsets}}``, where their bytes begin
    with the byte ``first`` and end with the file, of ``size`` bytes. Raises :class:`CheckpointError`."""

    def fault(what: str) -> CheckpointError:
        return CheckpointError(what, where=str(path), do="fetch the file again")

    try:
        entries = {name: _entry(name, value, path, first) for name, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise fault(f"malformed safetensors header ({error})") from None
    end = first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != end:
            raise fault(f"{name} begins at byte {entry.start}, not where the tensor before it ends ({end})")
        end += entry.size
    if end > size:
        raise fault(f"truncated: {size} bytes, the header asks for {end}")
    if end < size:
        raise fault(f"{size - end} trailing bytes that belong to no tensor")
    return entries


def _entry(name: str, value: Any, path: Path, base: int) -> Entry:
    dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if dtype not in _SIZES:
        raise ValueError(f"{name} has the dtype {dtype}; known: {', '.join(_SIZES)}")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError(f"{name} has no whole numbers for shape and offsets")
    size = math.prod(shape) * _SIZES[dtype]
    if end - start != size:
        raise ValueError(f"{name} has {end - start} bytes, its shape and dtype ask for {size}")
    return Entry(path, dtype, shape, base + start, end - start)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name is given twice")
    return names


def _some(names: Collection[str]) -> str:
    """Up to three names, and how many more there are."""
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
