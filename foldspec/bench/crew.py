"""Requests of one bench on several devices: each has one at a time, and they come back in any order.

A request runs whole on one device, all its methods and both of plain decoding's runs, so that what is compared was
measured side by side. What a device died over is tried once more on another; the others go on.
"""

from __future__ import annotations

import os
import platform
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from foldspec.bench.machine import peak_memory
from foldspec.bench.protocol import Measured, Place, WarmUp
from foldspec.bench.session import Session
from foldspec.bench.store import differences
from foldspec.errors import FoldspecError, UsageError

__all__ = ["Crew", "Gone", "Hand", "Reply", "admitted", "run", "spread"]

TRIES = 2


@dataclass(frozen=True)
class Reply:
    """What a device sends back: ``lines`` as :meth:`Bench.request` makes them, what was ``warmed`` up before, and the
    most memory that its process has held, in bytes."""

    lines: list[dict[str, Any]]
    warmed: list[WarmUp]
    peak_mem_bytes: int


@dataclass(frozen=True)
class Gone:
    """A device that works no more, and why."""

    why: str


class Crew(Protocol):
    """The devices, by number. ``devices`` says of each what a result does; ``hand`` gives one a request; ``wait`` is
    for the first that is done with its own."""

    devices: list[dict[str, Any]]

    def hand(self, device: int, place: Place) -> None: ...

    def wait(self) -> tuple[int, Reply | FoldspecError | Gone]: ...


def run(session: Session, crew: Crew, tell: Callable[[str], None]) -> None:
    """Let the crew measure what the session has not yet. ``tell`` hears what the result says besides: of devices that
    are gone and requests that were given up."""

    def lost(why: str, places: Sequence[Place]) -> None:
        if len(places) == 1:
            item = places[0].item(session.cells)
            why = f"{item.task} {item.length} {item.id} was not measured: {why}"
        elif places:
            why = f"{len(places)} requests were not measured: {why}"
        session.notices.append(why)
        tell(why)

    session.devices = crew.devices
    session.run(lambda places: spread(crew, places, lost))


def spread(crew: Crew, places: Sequence[Place], lost: Callable[[str, Sequence[Place]], None]) -> Iterator[Measured]:
    """Requests as they are done. ``lost`` hears of each device that is gone, and of requests that were given up. Raises
    what a device raised of foldspec's own: as in a serial run, that ends the bench."""
    free, waiting, tries = deque(range(len(crew.devices))), deque(places), Counter[Place]()
    running: dict[int, Place] = {}
    while waiting or running:
        while free and waiting:
            device = free.popleft()
            running[device] = waiting.popleft()
            crew.hand(device, running[device])
        if not running:
            break
        device, reply = crew.wait()
        place = running.pop(device)
        if isinstance(reply, FoldspecError):
            raise reply
        if isinstance(reply, Gone):
            tries[place] += 1
            lost(f"device {device} is gone ({reply.why})", ())
            if tries[place] < TRIES:
                waiting.appendleft(place)
            else:
                lost(f"{TRIES} devices died over it", (place,))
            continue
        free.append(device)
        told = crew.devices[device]
        told["requests"] += 1
        told["peak_mem_bytes"] = reply.peak_mem_bytes
        yield Measured(place, [line | {"device": device} for line in reply.lines], reply.warmed)
    if waiting:
        lost("no device is left", tuple(waiting))


def admitted(told: Mapping[str, Any] | FoldspecError, plan: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """What a device told of itself (:meth:`Hand.begin`), if its plan is the bench's own. Raises its error, if it told
    one, and :class:`UsageError` for another plan."""
    if isinstance(told, FoldspecError):
        told.where = f"{where}: {told.where}" if told.where else where
        raise told
    differing = list(differences(plan, told["plan"]))
    if differing:
        do = "each machine needs the same foldspec, torch, kind of device, weights and data"
        raise UsageError(f"is not as this process: {'; '.join(differing[:3])}", where=where, do=do)
    return told


@dataclass
class Hand:
    """What runs on a device: a session of its own, made there by the same code from the same words, which keeps
    nothing. Of foldspec's own errors none is raised, but returned: they then survive any transport."""

    build: Callable[..., Session]
    words: Mapping[str, Any]
    _session: Session | None = field(default=None, init=False)

    def begin(self) -> dict[str, Any] | FoldspecError:
        """Load. ``plan``: what must be the bench's own (``Session.plan``); ``device``, ``cores``, ``machine``: where
        this runs."""
        try:
            self._session = self.build(**self.words)
        except FoldspecError as error:
            return error
        plan = self._session.plan
        return {
            "plan": plan,
            "device": plan["machine"]["device"],
            "cores": os.cpu_count(),
            "machine": platform.node(),
        }

    def measure(self, place: Place) -> Reply | FoldspecError:
        """One request, after the warm-up of its length if there was none here."""
        assert self._session is not None
        bench = self._session.bench
        before = len(bench.warmed)
        try:
            lines = bench.measure(self._session.cells, place)
        except FoldspecError as error:
            return error
        return Reply(lines, bench.warmed[before:], peak_memory())
