"""Seconds of rounds by owner, attention apart: by the marks that the round loop sets, and around the operator."""

from __future__ import annotations

import time
from typing import Any

import torch

from foldspec.kernels.dispatch import Kernels

PARTS = ("target attention", "target, all else", "drafter attention", "drafter, all else", "other")
OWNERS = {"verify": "target", "draft": "drafter"}  # parts of a round


class Clock:
    """Seconds by part of :data:`PARTS`, and ``rounds``; hears of every attention, and where parts of a round end."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._cuda, self._run = device.type == "cuda", kernels.multi_read_attention
        kernels.multi_read_attention = self._attend  # type: ignore[method-assign]
        self.start()

    def start(self) -> None:
        self.seconds, self.rounds = dict.fromkeys(PARTS, 0.0), 0
        self._attention, self._last = 0.0, self._now()

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def _attend(self, batch: Any) -> Any:
        began = self._now()
        outputs = self._run(batch)
        self._attention += self._now() - began
        return outputs

    def __call__(self, part: str) -> None:
        now = self._now()
        self.rounds += part == "verify"
        owner, spent = OWNERS.get(part), now - self._last
        if owner is None:
            self.seconds["other"] += spent
        else:
            self.seconds[f"{owner} attention"] += self._attention
            self.seconds[f"{owner}, all else"] += spent - self._attention
        self._attention, self._last = 0.0, now
