"""``tests/interpreted/test_step_operators.py``, in a process in which Triton interprets kernels."""

from __future__ import annotations

from tritons import interpreted


def test_step_operators() -> None:
    interpreted("not slow", "tests/interpreted/test_step_operators.py")
