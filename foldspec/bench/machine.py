"""The machine and the checkout that a measurement ran on."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from foldspec.engine import Engine

__all__ = ["environment", "load", "peak_memory", "prepared"]


def environment(engine: Engine) -> dict[str, Any]:
    """What the engine says of versions, device, threads and kernels, and what surrounds it."""
    return engine.env() | {
        "device_type": engine.resources.device.type,
        "git": _git(),
        "os": platform.platform(),
        "cores": os.cpu_count(),
        "peak_mem_bytes": peak_memory(),
    }


def prepared(engine: Engine) -> int:
    """Kernels compiled, libraries loaded and rounds recorded so far for rounds of an engine."""
    graphs = engine.scheduler.rounds.graphs
    return engine.resources.kernels.prepared + (0 if graphs is None else graphs.prepared)


def peak_memory() -> int:
    """The most that this process has held, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def load() -> list[float] | None:
    """The system's load averages, where it has them."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def _git() -> str | None:
    """The commit of the checkout that runs, with ``-dirty`` if it was changed; None where there is none."""
    root = Path(__file__).parents[2]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    words = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
