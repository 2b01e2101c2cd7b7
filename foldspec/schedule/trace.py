"""Where the time of a round goes: the round loop marks the end of each part, and a stopwatch may listen.

The parts: ``draft`` (propose, and absorb what was committed), ``verify`` (the target's pass), ``accept`` (the rule,
which also waits for the device), ``host`` (everything else).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import torch

__all__ = ["PARTS", "Mark", "Stopwatch", "unmarked", "waiting"]

Mark: TypeAlias = Callable[[str], None]  # called at the end of the named part
PARTS = ("draft", "verify", "accept", "host")


def unmarked(part: str) -> None:
    """Nobody listens."""


def waiting(device: torch.device) -> Callable[[], float]:
    """A clock in seconds that waits until the device has done all it was told: a GPU works while Python goes on."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


class Stopwatch:
    """Seconds by part. The time between two marks belongs to the part that the second one names."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._last = clock()

    def start(self) -> None:
        """Begin anew: nothing before this counts."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = self._clock()

    def __call__(self, part: str) -> None:
        now = self._clock()
        self.seconds[part] += now - self._last
        self._last = now
