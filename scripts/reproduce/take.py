"""From the options to requests: measured now, or read where they lie."""

from __future__ import annotations

import argparse

from foldspec.errors import UsageError
from reproduce import live, offline, options
from reproduce.requests import Taken


def take(chosen: argparse.Namespace) -> list[Taken]:
    """One :class:`Taken` a way. Without ``--work`` and ``--bench``, what OUT/work lacks is measured first."""
    if chosen.bench:
        return [live.read(chosen.bench, chosen.tasks)]
    ways = ("offline", "live") if chosen.way == "both" else (chosen.way,)
    work = chosen.work or chosen.out / "work"
    if chosen.work is None:
        engine = options.load(chosen)
        for task in chosen.tasks:
            for way in ways:
                (offline if way == "offline" else live).measure(engine, chosen, work, task)
    elif not work.is_dir():
        raise UsageError("is no folder", where=f"--work {work}")
    found = []
    for way in ways:
        if way == "offline":
            found.append(offline.read(work, chosen.tasks))
        else:
            folders = [work / f"live-{task}" for task in chosen.tasks]
            found.append(live.read([folder for folder in folders if folder.is_dir()], chosen.tasks))
    return found
