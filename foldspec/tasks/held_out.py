"""Which source files belong to the bench: what a drafter is trained on must not come from them."""

from __future__ import annotations

import hashlib

__all__ = ["held_out"]


def held_out(name: str) -> bool:
    """Whether a file is the bench's, by its name relative to its root (``stdlib/json/decoder.py``): one in four is."""
    return hashlib.sha256(name.encode()).digest()[3] % 4 == 0
