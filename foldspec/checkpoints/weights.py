"""Read a checkpoint's tensors into a module: every parameter assigned exactly once, nothing held twice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import BinaryIO, NamedTuple

import torch
from torch import nn

from foldspec.checkpoints.headers import Entry, Rename, Weights, check, read_headers
from foldspec.errors import CheckpointError, ResourceError

__all__ = ["Entry", "Layout", "Weights", "check", "load_into", "read_headers"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}
# Bytes read at a time: straight to their place; into a buffer that stays in the caches, where they are cast or laid out
# anew; into one on the way to a device. Beside the weights that buffer is all the memory that loading takes.
# Files are read, not mapped: that is as fast, and a file that is cut short or cannot be read is an error then, and no
# signal that ends the process.
_STRAIGHT, _CACHED, _SENT = 64 << 20, 1024 << 10, 4 << 20
_TOLD = 4 << 20  # bytes from one report of progress to the next


class Layout(NamedTuple):
    """How the rows of a matrix lie in memory, if not as in the file: ``place(rows, to)`` casts and writes contiguous
    rows to theirs. It is given whole multiples of ``step`` rows, but for the last. Of several matrices in one tensor
    [matrices, rows, width] each is laid out by itself."""

    step: int
    place: Callable[[torch.Tensor, torch.Tensor], None]


def load_into(
    module: nn.Module,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    held: torch.dtype | None = None,
    matrices: Collection[str] = (),
    wide: Collection[str] = (),
    layouts: Mapping[str, Layout] | None = None,
    rename: Rename = lambda name: name,
    integer: Collection[str] = (),
    fill: Callable[[str, torch.Tensor], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Fill ``module``, built on the meta device, from ``weights``. What has a place already is read into it.

    The keys of ``module.state_dict()`` (parameters and persistent buffers) must each be met exactly once by a tensor of
    the file, of the same shape, whose name ``rename`` maps to the key (None: the tensor is left unread). Floats are
    cast to ``dtype``, those of keys in ``matrices`` to ``held`` if that is given, those in ``wide`` to at least fp32;
    the keys in ``integer`` take integer tensors and keep the module's own integer dtype. ``layouts`` names the matrices
    that do not lie as in the file. With ``fill`` no file is opened: it is given each key and its tensor, to be filled.
    ``progress("load", bytes done, bytes)`` is called every few megabytes. Raises :class:`CheckpointError` before a
    tensor is read if anything does not fit, and :class:`ResourceError` when memory runs out.
    """
    state = module.state_dict()
    found = check(weights, {key: tuple(t.shape) for key, t in state.items()}, rename=rename, integer=integer)
    total, done, told = sum(entry.size for entry in found.values()), 0, -_TOLD
    layouts, buffer = layouts or {}, bytearray(max(_CACHED, _SENT))

    def report(count: int) -> None:
        nonlocal done, told
        done += count
        if progress and (done - told >= _TOLD or done == total):
            told = done
            progress("load", done, total)

    report(0)
    for key, entry in sorted(found.items(), key=lambda item: (item[1].file, item[1].start)):  # as they lie on the disk
        if key in integer:
            held_as = state[key].dtype
        elif key in wide:
            held_as = torch.promote_types(dtype, torch.float32)
        else:
            held_as = held if held is not None and key in matrices else dtype
        placed = not state[key].is_meta and state[key].dtype == held_as
        try:
            tensor = state[key] if placed else torch.empty(entry.shape, dtype=held_as, device=device)
        except RuntimeError as error:  # torch has no one class for it on all devices
            raise ResourceError(
                f"no memory for the weights on {device} ({total / 1e9:.2f} GB in the file; {key} failed)",
                where=str(weights.folder),
                do="use a smaller --dtype, another --device or a smaller checkpoint",
            ) from error
        if fill is None:
            _read(entry, tensor, layouts.get(key), buffer, report)
        else:
            fill(key, tensor)
            report(entry.size)
        if not placed:
            _assign(module, key, tensor)
    left = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    if left:  # a mistake in the module's code: a buffer that no checkpoint holds was built on the meta device
        raise RuntimeError(f"never assigned: {', '.join(left[:3])}")


def _copy(rows: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(rows)


def _read(
    entry: Entry, tensor: torch.Tensor, layout: Layout | None, buffer: bytearray, report: Callable[[int], None]
) -> None:
    """Read one tensor to its place, through ``buffer`` where it is cast, laid out anew or lies on a device: no second
    copy of it ever exists. ``report`` hears of the bytes of each piece."""
    if not entry.size:
        return
    source, on_cpu = _DTYPES[entry.dtype], tensor.device.type == "cpu"
    straight = layout is None and tensor.dtype == source and on_cpu
    parts = [tensor.view(-1)] if layout is None else [tensor] if tensor.dim() == 2 else list(tensor)  # of experts
    step, place = layout or Layout(1, _copy)
    unit = step * parts[0][0].numel() * source.itemsize  # bytes that stay together
    count = step * max(1, (_STRAIGHT if straight else _CACHED if on_cpu else _SENT) // unit)
    if unit > len(buffer):
        buffer = bytearray(unit)
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.start)
            for piece in (piece for part in parts for piece in part.split(count)):
                size = piece.numel() * source.itemsize
                if straight:
                    _read_exactly(file, piece.view(torch.uint8).numpy().data)
                else:
                    _read_exactly(file, memoryview(buffer)[:size])
                    place(torch.frombuffer(buffer, dtype=source, count=piece.numel()).view_as(piece), piece)
                report(size)
    except OSError as error:
        what = f"cannot be read ({error.strerror or error})"
        raise CheckpointError(what, where=str(entry.file), do="fetch the file again") from None


def _read_exactly(file: BinaryIO, view: memoryview) -> None:
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError("the file became shorter while it was read")
        view = view[count:]


def _assign(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    path, _, name = key.rpartition(".")
    owner = module.get_submodule(path)
    if name in owner._parameters:
        owner._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[name] = tensor
