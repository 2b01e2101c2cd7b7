"""A GPU that is not there: tensors with shapes and no numbers (the device ``meta``), and a driver that says which
architecture it is. Rounds of a pair run on it as far as one can see, so that every kernel is asked for as it would be.

    python tests/fake_gpu.py kernels|PAIR ...     what gpu_check's rows ask for and the ahead-of-time gate does not know
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from gpu import right, timings
from gpu.known import Unknown, gate
from gpu.rounds import PLAN
from gpu.rows import Absent, Wrong
from gpu.setting import Setting

from foldspec import Engine, SamplingParams, loading
from foldspec.kernels import jit
from foldspec.kernels.multi_read_attention import triton as attention
from foldspec.kernels.verify import triton as verify
from foldspec.memory import SHARE
from foldspec.resources import BUDGETS, CHUNKS

SM = 90
ELSEWHERE = ("right/races", "right/verify", "ceiling/")  # rows that ask for nothing new, or for nothing at all


class Driver:
    """As much of Triton's as a launch asks before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", SM, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Pointer:
    """What Triton asks of a tensor: its dtype, and an address, here one at which all memory begins."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self._at = tensor.dtype, 256 + int(tensor.storage_offset()) * tensor.itemsize

    def data_ptr(self) -> int:
        return self._at


def _told(shape: torch.Size) -> Any:
    """Numbers that make sense wherever the host looks: no draft stood, all is sound, one token is committed."""
    return [_told(shape[1:]) if shape[1:] else int(i > 0) for i in range(shape[0])] if shape else 1


def _loaded(load: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Weights without numbers look as if they had never been read."""
    with contextlib.suppress(RuntimeError):
        load(*arguments, **options)


def _pointers(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_pointers, x))
    return Pointer(x) if isinstance(x, torch.Tensor) else x


@contextlib.contextmanager
def there() -> Iterator[list[str]]:
    """Within this, there is a GPU of 140 GB. Gives what was asked for and is not known to the gate, in words."""
    import triton
    from triton.runtime.jit import JITFunction

    run, missed = JITFunction.run, list[str]()

    def fake_run(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        try:
            args, more = tuple(map(_pointers, args)), {name: _pointers(value) for name, value in more.items()}
            return run(self, *args, grid=grid, warmup=warmup, **more)
        except Unknown as unknown:
            if str(unknown) not in missed:
                missed.append(str(unknown))
            return None

    with pytest.MonkeyPatch.context() as patch, gate(SM, compiling=False):
        triton.runtime.driver.set_active(Driver())
        patch.setattr(JITFunction, "run", fake_run)
        patch.setattr("foldspec.engine.pick_device", lambda name: torch.device("meta"))
        for table in (CHUNKS, BUDGETS, SHARE):
            patch.setitem(table, "meta", table["cuda"])
        for module in (attention, verify, jit):
            name = "refusal" if module is jit else "supports"
            patch.setattr(module, name, lambda *facts: None)
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(torch.Tensor, "__int__", lambda self: 1)
        patch.setattr(torch.Tensor, "item", lambda self: 1)
        patch.setattr(torch.Tensor, "tolist", lambda self: _told(self.shape))
        patch.setattr(torch.Tensor, "cpu", lambda self: torch.zeros(self.shape, dtype=self.dtype))
        patch.setattr(Setting, "draw", lambda self: None)
        patch.setattr("gpu.setting.device_seconds", lambda call: float(call() is None) + 1)
        patch.setattr(timings, "_splits", lambda setting, reads: [8] * len(reads))
        patch.setattr(loading, "load_into", partial(_loaded, loading.load_into))
        yield missed


def rounds(pair: str, length: int = 4096) -> None:
    """Rounds of a pair by every method that gpu_check has, after a filled context; recorded or not."""
    options: dict[str, Any] = {"load_format": "dummy", "dummy_layers": 2, "max_batch": 1, "kernels": "triton"}
    engine = Engine.load(pair, max_context=length + 512, **options)
    methods = {name: changes for cells in PLAN if cells.pair == pair for name, changes in cells.methods.items()}
    for changes in methods.values():
        done = engine.using(**changes).generate([7] * length, SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(done.rounds) == 3


def kernels() -> None:
    """The rows of single kernels: what they compare is wrong here, but not what they ask for."""
    setting = Setting(torch.device("meta"), dry=False)
    for row in right.rows(setting) + timings.rows(setting, timings.Ceiling()):
        if not row.name.startswith(ELSEWHERE) and " cuda" not in row.name:
            with contextlib.suppress(Wrong, Absent):
                row.run()


if __name__ == "__main__":
    with there() as missed:
        for name in sys.argv[1:]:
            kernels() if name == "kernels" else rounds(name)
    print("\n".join(missed))
    sys.exit(bool(missed))
