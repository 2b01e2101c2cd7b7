"""The Tritons that kernels are tested with, each in a process of its own: without a GPU they can be interpreted, and
compiled ahead of time.

``scripts/test`` has put them into folders of its environment, beside what is installed there: a CUDA build of torch
insists on a version of its own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from _environment import TRITONS

__all__ = ["NEWEST", "TRITONS", "environment", "interpreted"]

ROOT = Path(__file__).parents[1]
NEWEST = TRITONS[0]


def environment(version: str, **more: str) -> dict[str, str]:
    """Variables of a process that imports this Triton, and foldspec and what tests share. Where it is missing, a test
    under scripts/test fails; others are skipped."""
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]
    folder = Path(sys.prefix) / f"triton-{version}"
    if folder.is_dir():
        paths.insert(0, str(folder))
    elif _installed() != version:
        reason = f"Triton {version} is not in {folder}"
        if platform.system() == "Linux" and os.environ.get("FOLDSPEC_SCRIPTS_TEST"):
            pytest.fail(f"{reason}: scripts/test could not install it, see its first lines")
        pytest.skip(f"{reason}: scripts/test installs it, on Linux")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}


def interpreted(marker: str, *arguments: str) -> None:
    """Run pytest with kernels that the newest Triton interprets, which it decides as it reads them: hence the process.
    ``marker`` chooses everyday or slow tests. Fails with what pytest says."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider", *arguments]
    variables = environment(NEWEST, TRITON_INTERPRET="1")
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout


def _installed() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
