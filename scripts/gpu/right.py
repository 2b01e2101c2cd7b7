"""Every kernel in every version against float64, on a small grid, with buffers that are NaN before anybody writes them.
The oracles are those of the tests. And one case of each under a tool that looks for races.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ahead_of_time
from folded import Case

from gpu.compare import FLOAT
from gpu.right_attention import attention, attention_cases, by_flash, merged
from gpu.right_steps import gate_cases, gate_mul, move_cases, moves, norm, norm_cases
from gpu.right_verify import large_blocks, verifier, verify_large, verify_rules
from gpu.rows import Absent, Numbers, Row, Wrong
from gpu.setting import Setting

__all__ = ["rows", "small_case"]

VERSIONS = ("triton", "reference")


def rows(setting: Setting) -> list[Row]:
    found: list[Row] = []

    def add(operator: str, version: str, what: str, run: Callable[[], Numbers], seconds: float = 20.0) -> None:
        found.append(Row(f"right/{operator} {version} {what}".rstrip(), 1, seconds, run))

    for version in VERSIONS:
        kernels = setting.kernels(version)
        for name, case, splits in attention_cases(setting):
            add("attention", version, name, partial(attention, setting, kernels, case, splits))
        for name, sizes in move_cases(setting):
            add("rotate_append", version, name, partial(moves, setting, kernels, *sizes))
        for name, width, heads, dtype, wide in norm_cases(setting):
            add("rms_norm", version, name, partial(norm, setting, kernels, width, heads, dtype, wide))
        for gate, dtype in gate_cases(setting):
            name = f"{gate} {'fp32' if dtype == FLOAT else 'bf16'}"
            add("gate_mul", version, name, partial(gate_mul, setting, kernels, gate, dtype))
    add("merge", "triton", "of parts from elsewhere", partial(merged, setting))
    add("attention", "flash-attn", "", partial(by_flash, setting))
    for version in ("cuda", *VERSIONS):
        seconds = 20.0 if version == "reference" else 60.0  # nvcc, or some 30 variants in Triton
        add("verify", version, "every rule", partial(verify_rules, setting, version), seconds)
        add("verify", version, "a large vocabulary", partial(verify_large, setting, version))
    add("races", "compute-sanitizer", "", partial(races, setting), 90.0)
    return found


def small_case(setting: Setting) -> None:
    """One of each kernel, small enough for a tool that watches every access."""
    case = Case(
        (40,), 7, 4, 16 if setting.dry else 128, window=16, page=16 if setting.dry else 256, dtype=setting.dtype
    )
    kernels = setting.kernels("triton")
    attention(setting, kernels, case, (1, 2))
    _, sizes = move_cases(setting)[0]
    moves(setting, kernels, *sizes)
    versions = ["triton", *([] if ahead_of_time.find_nvcc() is None else ["cuda"])]
    for version in versions:
        verifier(setting, version)(large_blocks(setting, 3, 8192, False, 1))


def races(setting: Setting) -> Numbers:
    """compute-sanitizer's racecheck over :func:`small_case`; dry, the case by itself."""
    if setting.dry:
        small_case(setting)
        return {"tool": None}
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        raise Absent("no compute-sanitizer: it comes with the CUDA toolkit")
    program = str(Path(__file__).parents[1] / "gpu_check.py")
    command = [tool, "--tool", "racecheck", "--error-exitcode", "9", sys.executable, program, "--small-case"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=85)
    said = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode == 9:
        raise Wrong(next((line for line in said if "hazard" in line.lower()), "racecheck found something")[:300])
    if done.returncode:
        raise RuntimeError(f"racecheck ended with {done.returncode}: {said[-1] if said else ''}")
    return {"tool": tool, "says": said[-1] if said else ""}
