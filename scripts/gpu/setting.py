"""Where the check runs: on the GPU, or, dry, on the CPU with kernels interpreted and everything tiny."""

from __future__ import annotations

import contextlib
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ahead_of_time
import interpreting
import torch

from foldspec.bench.machine import load
from foldspec.engine import cache_folder
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.kernels.multi_read_attention.splits import Clock, device_seconds

__all__ = ["Setting", "machine", "poisoned"]

ROOT = Path(__file__).parents[2]
NVIDIA = ("name", "driver_version", "vbios_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem",
          "power.limit", "temperature.gpu", "mig.mode.current")  # fmt: skip


@dataclass(frozen=True)
class Setting:
    device: torch.device
    dry: bool

    @classmethod
    def of(cls, dry: bool) -> Setting:
        if dry:
            interpreting.repair()
        return cls(torch.device("cpu" if dry else "cuda"), dry)

    @property
    def dtype(self) -> torch.dtype:
        """In which speed is measured."""
        return torch.float32 if self.dry else torch.bfloat16

    @property
    def clock(self) -> Clock:
        """Seconds of a call: replayed from a graph; dry, of one run on the CPU, which say nothing."""
        return _once if self.dry else device_seconds

    def draw(self) -> torch.Generator:
        """Random numbers on the device, the same each time."""
        return torch.Generator(self.device).manual_seed(0)

    def kernels(self, version: str) -> Kernels:
        """The operators, in this version where there is one."""
        folder = None if self.dry else cache_folder() / "kernels"
        return Kernels(version, Library(folder, nvcc=ahead_of_time.find_nvcc()))


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Whatever is allocated and not written is NaN."""
    before = torch.empty, torch.empty_like
    torch.empty, torch.empty_like = (partial(_nan, make) for make in before)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = before


def _nan(make: Callable[..., torch.Tensor], *shape: Any, **options: Any) -> torch.Tensor:
    made = make(*shape, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made


def machine(setting: Setting) -> dict[str, Any]:
    """What runs, on what, in which state."""
    import triton

    nvcc = ahead_of_time.find_nvcc()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if not setting.dry else f"none: dry on {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "nvcc": ahead_of_time.nvcc_version(nvcc) if nvcc else None,
        "os": platform.platform(),
        "load": load(),
        "commit": _commit(),
    }
    if not setting.dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "capability": list(torch.cuda.get_device_capability()),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return found | {"nvidia": _nvidia()}


def _says(*words: str) -> str | None:
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _commit() -> str | None:
    return _says("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _nvidia() -> dict[str, str] | None:
    """Of the first GPU, as its driver says it."""
    said = _says("nvidia-smi", f"--query-gpu={','.join(NVIDIA)}", "--format=csv,noheader", "--id=0")
    values = [] if said is None else said.split(", ")
    return dict(zip(NVIDIA, values, strict=True)) if len(values) == len(NVIDIA) else None
