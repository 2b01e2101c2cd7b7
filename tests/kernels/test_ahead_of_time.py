"""What GPUs would be asked to run, compiled for them without one: registers, spills, shared memory and instructions, of
what Triton makes of each kernel and nvcc of each CUDA source, within ``tests/golden/aot_budget.json``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ahead_of_time
import pytest
import tritons
from ahead_of_time import BUDGET, KEPT, ROOT, Table, complaints, cuda_measured, cuda_result, find_nvcc

# one of each version is compiled every day
EVERYDAY = "rotate_append/block-bf16-32-8-128"
ADVICE = """
If that is right, measure anew and look at what changed:
    PYTHONPATH=FOLDER_OF_TRITON:. python tests/ahead_of_time.py result.json         (--cuda for csrc/*.cu)
    PYTHONPATH=. python tests/ahead_of_time.py --update result.json
A spill needs a "reason" in the budget."""


def budget(version: str) -> Mapping[str, Any]:
    return dict(json.loads(BUDGET.read_text())[version])


def compiled(version: str, folder: Path, *arguments: str, script: Path | None = None) -> dict[str, Any]:
    """What ``tests/ahead_of_time.py`` measures with this Triton."""
    result = folder / "result.json"
    command = [sys.executable, str(script or ROOT / "tests" / "ahead_of_time.py"), str(result), *arguments]
    variables = tritons.environment(version, TRITON_CACHE_DIR=str(KEPT / "triton"))
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.read_text())
    assert found["version"] == f"triton {version}"
    return found


@pytest.mark.parametrize("version", tritons.TRITONS)
def test_a_kernel_is_within_its_budget(version: str, tmp_path: Path) -> None:
    found = compiled(version, tmp_path, "--only", EVERYDAY, "--sm", "90")["found"]
    wrong = complaints(found, budget(f"triton {version}"), set(), whole=False)
    assert not wrong, "\n".join(wrong) + ADVICE


@pytest.mark.slow
@pytest.mark.parametrize("version", tritons.TRITONS)
def test_every_kernel_is_within_its_budget(version: str, tmp_path: Path) -> None:
    result = compiled(version, tmp_path)
    wrong = complaints(result["found"], budget(f"triton {version}"), set(result["wide"]), whole=True)
    assert not wrong, "\n".join(wrong) + ADVICE


# -------------------------------------------------------------------------------------------- what the gate itself sees

PLANTED = '''
import sys

import ahead_of_time
import torch
import triton
import triton.language as tl

from foldspec.kernels.jit import Launch


@triton.jit
def heavy(x, y, BLOCK: tl.constexpr):
    """Holds more than registers can: every number is needed until the last is there."""
    place = tl.arange(0, BLOCK)
    held = tl.load(x + place)
    tl.store(y + place, held * tl.sum(held * held, 0))


@triton.jit
def product(x, y, ROWS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, 64)
    a = tl.load(x + row[:, None] * 64 + column[None, :])
    b = tl.load(x + column[:, None] * 64 + column[None, :])
    tl.store(y + row[:, None] * 64 + column[None, :], tl.dot(a, b))


x, y = torch.empty(1, device="meta"), torch.empty(1, device="meta")
launches = {
    "heavy": Launch(heavy, (1,), {"x": x, "y": y, "BLOCK": 8192}, warps=1),
    "wide": Launch(product, (1,), {"x": x.bfloat16(), "y": y, "ROWS": 64}, warps=4, product=64),
    "narrow": Launch(product, (1,), {"x": x.bfloat16(), "y": y, "ROWS": 16}, warps=4, product=64),
}
ahead_of_time.configurations = lambda sm: launches
ahead_of_time.main()
'''


@pytest.mark.slow
@pytest.mark.parametrize("version", tritons.TRITONS)
def test_spills_and_instructions_are_seen(version: str, tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    result = compiled(version, tmp_path, "--sm", "90", script=script)
    found = {name: numbers["sm_90"] for name, numbers in result["found"].items()}
    assert found["heavy"]["spills"] > 10
    assert found["wide"]["hgmma"] > 0 and found["wide"]["shared"] > 8192 and "spills" not in found["wide"]
    assert "hgmma" not in found["narrow"]
    wrong = complaints(result["found"], result["found"], set(result["wide"]), whole=True)
    assert [line.partition(":")[0] for line in wrong] == ["heavy on sm_90", "narrow on sm_90"]


LIGHT: Table = {"a": {"sm_90": {"registers": 100, "shared": 1000, "hgmma": 4}}}


@pytest.mark.parametrize(
    ("found", "allowed", "says"),
    [
        ({"registers": 110, "shared": 1100, "hgmma": 1}, {}, None),
        ({"registers": 111, "hgmma": 4}, {}, "111 registers, the budget has 100"),
        ({"registers": 90, "shared": 1101, "hgmma": 4}, {}, "1101 shared, the budget has 1000"),
        ({"registers": 100, "hgmma": 4, "spills": 1}, {}, "1 spills, the budget has 0"),
        ({"registers": 100, "hgmma": 4, "spills": 10}, {"spills": 10}, "10 spills in the budget, without a reason"),
        ({"registers": 100, "hgmma": 4, "spills": 11}, {"spills": 10, "reason": "measured"}, None),
        ({"registers": 100, "hgmma": 4, "spills": 12}, {"spills": 10, "reason": "measured"}, "12 spills"),
        ({"registers": 100, "hgmma": 4, "shared": 232449}, {"shared": 232449}, "cannot be launched"),
        ({"registers": 100}, {}, "no warpgroup instruction"),
    ],
)
def test_what_is_too_much(found: dict[str, Any], allowed: dict[str, Any], says: str | None) -> None:
    allowed = {"a": {"sm_90": LIGHT["a"]["sm_90"] | allowed}}
    wrong = complaints({"a": {"sm_90": found}}, allowed, {"a"}, whole=True)
    assert len(wrong) == (says is not None) and (says is None or says in wrong[0]), wrong


def test_the_budget_names_what_there_is() -> None:
    assert "not in the budget" in complaints(LIGHT, {}, set(), whole=True)[0]
    assert "not in the budget" in complaints({"a": {"sm_80": LIGHT["a"]["sm_90"]}}, LIGHT, set(), whole=True)[0]
    assert complaints({}, LIGHT, set(), whole=True) == ["a: in the budget, and no kernel has it"]
    assert complaints({}, LIGHT, set(), whole=False) == []
    kept = json.loads(BUDGET.read_text())
    assert ahead_of_time.written(kept) == BUDGET.read_text()
    spilling = {"a": {"sm_90": {"registers": 255, "spills": 9}}}
    reasoned = {"a": {"sm_90": {"registers": 255, "spills": 8, "reason": "measured"}}}
    new = ahead_of_time.updated({"triton 1": reasoned, "triton 2": LIGHT}, "triton 1", spilling)
    assert new["triton 1"]["a"]["sm_90"] == {"registers": 255, "spills": 9, "reason": "measured"}
    assert new["triton 2"] == LIGHT


# ------------------------------------------------------------------------------------------------------------ csrc/*.cu


@pytest.fixture
def nvcc() -> str:
    found = find_nvcc()
    if found is None:
        pytest.skip("no nvcc: it comes with the CUDA toolkit")
    return found


@pytest.mark.slow
def test_cuda_sources_are_within_their_budget(nvcc: str) -> None:
    """With another nvcc than the budget's, what was not measured before is its own measure: no spill, and it fits."""
    result = cuda_result((80, 90, 100))
    allowed = json.loads(BUDGET.read_text()).get(result["version"], result["found"])
    wrong = complaints(result["found"], allowed, set(), whole=True)
    assert not wrong, "\n".join(wrong) + ADVICE


SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) light(float *x) { x[threadIdx.x] *= 2; }
extern "C" __global__ void __launch_bounds__(1024, 2) heavy(float *x) {
    float held[96];
    for (int i = 0; i < 96; i++) held[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 96; i++) x[i * 1024 + threadIdx.x] = held[95 - i] * held[i];
}
"""


def test_spills_of_a_cuda_source_are_seen(nvcc: str, tmp_path: Path) -> None:
    source = tmp_path / "spilling.cu"
    source.write_text(SPILLING)
    found = cuda_measured(source, 90, nvcc, tmp_path)
    assert set(found) == {"spilling.cu/light", "spilling.cu/heavy"}
    assert found["spilling.cu/heavy"]["sm_90"]["spills"] > 100
    assert set(found["spilling.cu/light"]["sm_90"]) == {"registers"}
    assert cuda_measured(source, 90, nvcc, tmp_path) == found
    source.write_text("__global__ void wrong() { nothing(); }")
    with pytest.raises(RuntimeError, match="nothing"):
        cuda_measured(source, 90, nvcc, tmp_path)
