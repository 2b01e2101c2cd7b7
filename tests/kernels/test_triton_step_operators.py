"""The tests of ``tests/interpreted/step_operators.py``, in a process in which Triton interprets kernels."""

from __future__ import annotations

import pytest
from tritons import NEWEST, TRITONS, interpreted


@pytest.mark.parametrize(
    "version", [pytest.param(version, marks=() if version == NEWEST else pytest.mark.slow) for version in TRITONS]
)
def test_step_operators(version: str) -> None:
    interpreted("step_operators.py", version)
