"""How fast the device was clocked beside each run: read just before it and just after, never within.

Of a GPU the clock of its multiprocessors, its temperature and why it was slowed down, by ``nvidia-ml-py`` or
``nvidia-smi``; of a CPU the fastest clock among the cores that this process may use, where Linux tells. What cannot be
read is None, and :meth:`Clocks.facts` says why. A request is flagged where the clock fell by more than 10% from one
reading to a later one, or something slowed the device down; it stays in every figure.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["FALL", "Clocks", "Reading", "as_fields", "find", "flagged"]

FALL = 0.10
# bits of NVML's reasons why a clock is lower than it could be; those that a user chose, and idleness, slow nothing down
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat, by software",
    0x40: "heat, by hardware",
    0x80: "power brake",
}
SETTING = 0x02  # the clock is held by a setting
SECONDS = 5  # that nvidia-smi may take
QUERY = "clocks.sm,temperature.gpu,clocks_throttle_reasons.active"
CORES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Reading:
    """``mhz``; ``celsius``; what slows the device down, in words; ``locked``: whether the driver says that a setting
    holds the clock. None: not known."""

    mhz: float | None = None
    celsius: float | None = None
    throttle: tuple[str, ...] = ()
    locked: bool | None = None


class Clocks:
    """``ask`` gives a :class:`Reading`; whatever it raises is told and ends nothing. ``by``: who is asked, in a word;
    ``unit``: the field of a line that its clock stands in; ``why_not``: why nobody is asked."""

    def __init__(
        self, ask: Callable[[], Reading] | None = None, by: str | None = None, unit: str = "sm_mhz", why_not: str = ""
    ) -> None:
        self._ask, self._by, self.unit, self.why_not = ask, by, unit, why_not
        self._locked: set[bool] = set()

    def read(self) -> Reading:
        """What is there to be known now."""
        if self._ask is None:
            return Reading()
        try:
            reading = self._ask()
        except Exception as error:  # a driver's library raises classes of its own
            self.why_not = f"{self._by}: {type(error).__name__}: {error}".rstrip(": ")
            return Reading()
        if reading.locked is not None:
            self._locked.add(reading.locked)
        return reading

    def facts(self) -> dict[str, Any]:
        """For the result. ``clocks_locked``: whether any reading so far said so; None: no reading could."""
        locked = None if not self._locked else True in self._locked
        return {"clocks_locked": locked, "clocks": {"by": self._by, "why_not": self.why_not}}


def as_fields(unit: str, before: Reading, after: Reading) -> dict[str, Any]:
    """What the line of a run keeps of its two readings."""
    mhz = None if before.mhz is None or after.mhz is None else [before.mhz, after.mhz]
    celsius = None if before.celsius is None or after.celsius is None else [before.celsius, after.celsius]
    reasons = sorted({*before.throttle, *after.throttle})
    return {"sm_mhz": None, "core_mhz": None} | {unit: mhz, "celsius": celsius, "throttle": reasons}


def flagged(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what was read beside the runs of one request casts doubt on their times. The lines of an older foldspec
    have no readings."""
    fastest = 0.0
    for line in sorted(lines, key=lambda line: int(line["order"])):
        if line.get("throttle"):
            return True
        for mhz in line.get("sm_mhz") or line.get("core_mhz") or ():
            fastest = max(fastest, mhz)
            if mhz < (1 - FALL) * fastest:
                return True
    return False


def find(device: torch.device) -> Clocks:
    """Who can be asked about a device."""
    if device.type != "cuda":
        return of_cores()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return of_gpu(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def of_gpu(uuid: str) -> Clocks:
    """NVML's library, else the command that comes with the driver: both know the GPU by its UUID, whatever number it
    has in this process."""
    ask, why_not = _library(uuid)
    if ask is not None:
        return Clocks(ask, "nvidia-ml-py")
    command = shutil.which("nvidia-smi")
    if command is not None:
        return Clocks(lambda: _said(command, uuid), "nvidia-smi", why_not=why_not)
    return Clocks(why_not=f"{why_not}; nvidia-smi is not on the path")


def _library(uuid: str) -> tuple[Callable[[], Reading] | None, str]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception as error:  # NVMLError, of the library itself
        return None, f"nvidia-ml-py: {error}"
    # its first name is known to all drivers, its second will outlive it
    name = "nvmlDeviceGetCurrentClocks{}Reasons"
    reasons = getattr(nvml, name.format("Throttle"), None) or getattr(nvml, name.format("Event"))

    def ask() -> Reading:
        mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        celsius = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        return _reading(float(mhz), float(celsius), int(reasons(handle)))

    return ask, ""


def _said(command: str, uuid: str) -> Reading:
    """Raises :class:`OSError`, ValueError and what subprocess has for a command that does not answer."""
    words = [command, f"--id={uuid}", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=True)
    mhz, celsius, bits = (part.strip() for part in done.stdout.split(","))
    return _reading(float(mhz), float(celsius), int(bits, 16))


def _reading(mhz: float, celsius: float, bits: int) -> Reading:
    words = tuple(word for bit, word in REASONS.items() if bits & bit)
    return Reading(mhz, celsius, words, locked=bool(bits & SETTING))


def of_cores(root: Path = CORES) -> Clocks:
    """The cores that this process may use, as the kernel scales them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    paths = [root / f"cpu{core}" / "cpufreq" / "scaling_cur_freq" for core in cores]
    there = [path for path in paths if path.exists()]
    if not there:
        return Clocks(unit="core_mhz", why_not="this system shows no scaling_cur_freq")

    def ask() -> Reading:  # the fastest: cores without work are slow
        return Reading(max(int(path.read_text()) for path in there) / 1e3)

    return Clocks(ask, "scaling_cur_freq", "core_mhz")
