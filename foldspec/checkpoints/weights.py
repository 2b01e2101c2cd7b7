"""Read a checkpoint's tensors into a module: every parameter assigned exactly once, nothing held twice."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import BinaryIO

import torch
from torch import nn

from foldspec.checkpoints.headers import Entry, Rename, Weights, check, read_headers
from foldspec.errors import CheckpointError, ResourceError

__all__ = ["Entry", "Weights", "check", "load_into", "read_headers"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}
_CHUNK = 4 << 20  # bytes read at a time; beside the weights themselves, all the memory that loading takes


def load_into(
    module: nn.Module,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    held: torch.dtype | None = None,
    matrices: Collection[str] = (),
    wide: Collection[str] = (),
    rename: Rename = lambda name: name,
    integer: Collection[str] = (),
    fill: Callable[[str, torch.Tensor], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Fill ``module``, built on the meta device, from ``weights``. What has a place already is read into it.

    The keys of ``module.state_dict()`` (parameters and persistent buffers) must each be met exactly once by a tensor of
    the file, of the same shape, whose name ``rename`` maps to the key (None: the tensor is left unread). Floats are
    cast to ``dtype``, those of keys in ``matrices`` to ``held`` if that is given, those in ``wide`` to at least fp32;
    the keys in ``integer`` take integer tensors and keep the module's own integer dtype. With ``fill`` no file is
    opened: it is given each key and its tensor, to be filled.
    ``progress("load", bytes done, bytes)``. Raises :class:`CheckpointError` before a tensor is read if anything does
    not fit, and :class:`ResourceError` when memory runs out.
    """
    state = module.state_dict()
    found = check(weights, {key: tuple(t.shape) for key, t in state.items()}, rename=rename, integer=integer)
    total, done = sum(entry.size for entry in found.values()), 0
    buffer = bytearray(_CHUNK)
    for key, entry in sorted(found.items(), key=lambda item: (item[1].file, item[1].start)):  # as they lie on the disk
        if progress:
            progress("load", done, total)
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
            _read(entry, tensor, buffer)
        else:
            fill(key, tensor)
        if not placed:
            _assign(module, key, tensor)
        done += entry.size
    if progress:
        progress("load", done, total)
    left = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    if left:  # a mistake in the module's code: a buffer that no checkpoint holds was built on the meta device
        raise RuntimeError(f"never assigned: {', '.join(left[:3])}")


def _read(entry: Entry, tensor: torch.Tensor, buffer: bytearray) -> None:
    """Read one tensor through ``buffer``, casting on the way: no second copy of it ever exists."""
    source = _DTYPES[entry.dtype]
    flat, view = tensor.view(-1), memoryview(buffer)
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.start)
            done = 0
            while done < entry.size:
                count = min(len(buffer), entry.size - done)
                _read_exactly(file, view[:count])
                first, last = done // source.itemsize, (done + count) // source.itemsize
                flat[first:last].copy_(torch.frombuffer(buffer, dtype=source, count=last - first))
                done += count
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
