"""A crew in this process, for the tests of benches that several devices measure: who is done first, and who dies, is
as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foldspec.bench.crew import Gone, Reply
from foldspec.bench.protocol import Place
from foldspec.errors import FoldspecError

Measure = Callable[[Place], Reply | FoldspecError]


class Band:
    """``first`` names, of the devices that run, the one that is done; ``dies`` says whether a device does, over what it
    runs. ``handed`` has who was given what, in order."""

    def __init__(
        self,
        members: Sequence[Measure],
        *,
        first: Callable[[Sequence[int]], int] = min,
        dies: Callable[[int, Place], bool] = lambda device, place: False,
    ) -> None:
        self.devices: list[dict[str, Any]] = [
            {"name": "simulated", "cores": 1, "machine": 0, "requests": 0, "peak_mem_bytes": 0} for _ in members
        ]
        self.handed: list[tuple[int, Place]] = []
        self.most = 0  # that ran at once
        self._members, self._first, self._dies = members, first, dies
        self._running: dict[int, Place] = {}
        self._dead: set[int] = set()

    def hand(self, device: int, place: Place) -> None:
        assert device not in self._running and device not in self._dead
        self._running[device] = place
        self.handed.append((device, place))
        self.most = max(self.most, len(self._running))

    def wait(self) -> tuple[int, Reply | FoldspecError | Gone]:
        device = self._first(sorted(self._running))
        place = self._running.pop(device)
        if self._dies(device, place):
            self._dead.add(device)
            return device, Gone("it was shot")
        return device, self._members[device](place)
