"""Tests of Triton kernels, for a process in which they are interpreted; in any other there is nothing to collect."""

from __future__ import annotations

import interpreting

collect_ignore_glob = [] if interpreting.INTERPRETED else ["test_*.py"]
