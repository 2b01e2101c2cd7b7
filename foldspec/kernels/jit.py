"""What the Triton kernels share: where they run, and the form of a launch.

An operator's ``triton_kernels.py`` holds its ``@triton.jit`` functions and is imported inside functions alone: triton
is not there on every machine. Beside it, ``triton.py`` makes a :class:`Launch` of tensors. Given tensors of the meta
device it makes the same launch of shapes alone, which the ahead-of-time gate compiles (``tests/ahead_of_time.py``):
what a GPU will be asked to run is what was checked without one.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

__all__ = ["Configurations", "Launch", "compiled", "power_of_two", "refusal"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Launch(NamedTuple):
    """One call of a kernel. ``arguments`` by name, constants included; ``stages`` of its software pipeline; ``fusion``
    of a product and a sum into one instruction, which rounds once: off where bits must be those of a definition.

    ``product`` is the number of rows of the products in it, 0 where it has none: from 64 on, Hopper multiplies with its
    warpgroup instructions, and the gate looks for them.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int = 1
    product: int = 0
    fusion: bool = True

    @property
    def options(self) -> dict[str, Any]:
        # fusion is said and not left to a default, which is about to change: numbers and registers must not move
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fusion}

    def __call__(self) -> None:
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, **self.options)


# Of ``configurations(arch)`` in a ``triton.py``: what the gate compiles for architecture 80, 90 or 100, by a name that
# the budget file knows.
Configurations = dict[str, Launch]


def refusal(device: str, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel serves this device and this arithmetic; None if one may."""
    # only tests have triton interpreted on a CPU, and they have imported it: nobody waits half a second to be told no
    triton = sys.modules.get("triton")
    if device != "cuda" and (triton is None or not triton.knobs.runtime.interpret):
        return f"runs on an NVIDIA GPU, not on {device}"
    if dtype not in DTYPES:
        return f"computes in float32, bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    return None if triton is not None or find_spec("triton") is not None else "triton is not installed"


def compiled() -> int:
    """How many of foldspec's kernels Triton has made ready in this process, one for each set of constants."""
    count = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("foldspec.kernels.") and name.endswith(".triton_kernels"):
            for kernel in vars(module).values():
                count += sum(len(cache[0]) for cache in getattr(kernel, "device_caches", {}).values())
    return count


def power_of_two(n: int) -> int:
    """The smallest that is at least n: blocks of a kernel have such lengths."""
    return 1 << (n - 1).bit_length()
