"""Triton kernels: the tests of ``interpreted/``, in a process where kernels are interpreted, and the operator's own
tests for them there; when they are chosen, and what they say where they are not."""

from __future__ import annotations

import sys

import pytest
import torch
from tritons import interpreted

from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import Facts, triton


def test_interpreted() -> None:
    interpreted("not slow", "tests/interpreted")


@pytest.mark.slow
def test_interpreted_at_length() -> None:
    interpreted("slow", "tests/interpreted")


def test_the_operators_own_tests() -> None:
    files = "tests/kernels/test_multi_read_attention.py", "tests/kernels/test_offsets.py"
    interpreted("not slow", *files, "-k", "triton or every_version")


GPU = Facts("cuda", torch.bfloat16, 128, 128)


def test_it_comes_first_on_a_gpu_and_nowhere_else() -> None:
    for operator in ("multi_read_attention", "device_attention"):
        for facts in (GPU, GPU._replace(dtype=torch.float32), GPU._replace(key_width=24)):
            kernels = Kernels()
            kernels.choose(operator, facts)
            assert kernels.choices[0].name == "triton"
        kernels.choose(operator, GPU._replace(device="cpu"))
        assert kernels.choices[-1].name != "triton"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (GPU._replace(device="cpu"), "runs on a GPU, not on cpu"),
        (GPU._replace(dtype=torch.float64), "computes in float32 and in half precision, not in float64"),
        (GPU._replace(key_width=576), "has heads of up to 512, not 576 and 128"),
    ],
)
def test_what_it_does_not_do(facts: Facts, reason: str) -> None:
    assert triton.supports(facts) == reason
    with pytest.raises(UsageError, match=f"triton: {reason}"):
        Kernels("triton").choose("multi_read_attention", facts)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_what_is_compiled_ahead_is_all_there_is(arch: int) -> None:
    """Every argument has its type or its value, and no variant is made for what a number happens to be."""
    known = triton.configurations(arch)
    assert len({configuration.name for configuration in known}) == len(known)
    for one in known:
        assert [name for name in one.kernel.arg_names if name not in one.constants] == list(one.signature)
        for parameter in one.kernel.params:
            free = parameter.name in one.aligned or parameter.is_constexpr
            assert parameter.do_not_specialize == (not free), parameter.name


def test_it_may_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton.supports(GPU) == "triton is not installed"
    kernels = Kernels()
    kernels.choose("multi_read_attention", GPU)
    assert kernels.choices[0].name == "reference"
    assert dict(kernels.choices[0].refused)["triton"] == "triton is not installed"
