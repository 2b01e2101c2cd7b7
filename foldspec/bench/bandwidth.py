"""How fast this machine reads memory, to set beside what a round reads: its weights, and the keys and values."""

from __future__ import annotations

import time

import torch

__all__ = ["SIZE", "read_bandwidth"]

SIZE = 1 << 29  # bytes: more than the caches of most machines hold


def read_bandwidth(device: torch.device | str = "cpu", *, size: int = SIZE, repeats: int = 5) -> float | None:
    """GB/s at which a buffer of ``size`` bytes is read (summed up), the best of some repeats, with torch's threads;
    None without the memory for it.

    A model that fits the last cache can be read faster than that: then the share is above 1.
    """
    try:
        buffer = torch.ones(size // 4, device=device)
    except RuntimeError:
        return None
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        buffer.sum().item()
        best = min(best, time.perf_counter() - start)
    return size / best / 1e9
