"""Triton kernels: the tests of ``interpreted/``, in a process where kernels are interpreted, and the operator's own
tests for them there; when they are chosen, and what they say where they are not."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tritons import TRITONS, environment, interpreted

from foldspec.errors import UsageError
from foldspec.kernels import rms_norm
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.kernels.multi_read_attention import Facts, triton

ATTENTION = "tests/interpreted/test_device_attention.py", "tests/interpreted/test_attention_mutants.py"


def test_interpreted() -> None:
    interpreted("not slow", *ATTENTION)


@pytest.mark.slow
def test_interpreted_at_length() -> None:
    interpreted("slow", *ATTENTION)


def test_the_operators_own_tests() -> None:
    files = "tests/kernels/test_multi_read_attention.py", "tests/kernels/test_offsets.py"
    interpreted("not slow", *files, "-k", "triton or every_version")


GPU = Facts("cuda", torch.bfloat16, 128, 128)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A triton that interprets nothing. (Which kernels run is decided without one.)"""
    found = SimpleNamespace(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)))
    monkeypatch.setitem(sys.modules, "triton", found)


@pytest.mark.usefixtures("installed")
def test_it_comes_first_on_a_gpu_and_nowhere_else() -> None:
    for operator in ("multi_read_attention", "device_attention"):
        for facts in (GPU, GPU._replace(dtype=torch.float32), GPU._replace(key_width=24)):
            kernels = Kernels()
            kernels.choose(operator, facts)
            assert kernels.choices[0].name == "triton"
            kernels.choose(operator, facts._replace(device="cpu"))
            assert kernels.choices[1].name != "triton"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (GPU._replace(device="cpu"), "runs on an NVIDIA GPU, not on cpu"),
        (GPU._replace(dtype=torch.float64), "computes in float32, bfloat16 or float16, not in float64"),
        (GPU._replace(key_width=576), "has heads of up to 512, not 576 and 128"),
    ],
)
def test_what_it_does_not_do(facts: Facts, reason: str) -> None:
    assert triton.supports(facts) == reason
    with pytest.raises(UsageError, match=f"triton: {reason}"):
        Kernels("triton").choose("multi_read_attention", facts)


def test_it_may_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels = Kernels()
    kernels.choose("multi_read_attention", GPU)
    assert kernels.choices[0].name == "reference"
    assert dict(kernels.choices[0].refused)["triton"] == "triton is not installed"


COUNTED = """
from foldspec.kernels.dispatch import Kernels
before = Kernels().prepared
from foldspec.kernels.rms_norm import triton_kernels
kernels = [kernel for kernel in vars(triton_kernels).values() if hasattr(kernel, "device_caches")]
assert kernels, "Triton keeps what it made elsewhere"
assert Kernels().prepared == before
for kernel in kernels:
    kernel.device_caches = {device: ({"one": 1, "another": 2}, {}, None, None, None) for device in (0, 1)}
assert Kernels().prepared == before + 4 * len(kernels)
"""


@pytest.mark.parametrize("version", TRITONS)
def test_what_triton_has_made_is_counted(version: str) -> None:
    """The bench asks before and after each run: a kernel that is compiled within one costs what no round costs."""
    command = [sys.executable, "-c", COUNTED]
    done = subprocess.run(command, env=environment(version), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_library_that_is_loaded_is_counted() -> None:
    kernels = Kernels("auto", Library(None))
    before = kernels.prepared
    assert kernels.choose("rms_norm", rms_norm.Facts("cpu", torch.float32)) and kernels.prepared == before + 1
    assert kernels.choose("rms_norm", rms_norm.Facts("cpu", torch.float64)) and kernels.prepared == before + 1
