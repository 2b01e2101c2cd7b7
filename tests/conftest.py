"""Settings of every test. The network is closed by pytest-socket's options in pyproject.toml."""

from __future__ import annotations

import os

import interpreting
import pytest
import torch
from hypothesis import settings

# The same examples on every run, and no time limit on a busy machine.
settings.register_profile("foldspec", derandomize=True, deadline=None, database=None)
settings.load_profile("foldspec")
os.environ["FOLDSPEC_DEBUG"] = "1"  # caches and bookkeeping are checked after every step

if interpreting.INTERPRETED:
    interpreting.repair()


@pytest.fixture(autouse=True)
def threads() -> None:
    """A fixed count keeps sums in the same order on every machine. Tiny networks gain nothing from a second thread, and
    lose much to it where another process of tests is busy."""
    torch.set_num_threads(1)
