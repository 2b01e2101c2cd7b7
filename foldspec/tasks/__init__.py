"""The tasks of the bench by name. A task is one file and one line here.

They need no download and are nobody's published sets: figures of theirs compare methods here, and with no paper.
"""

from __future__ import annotations

from importlib import import_module

from foldspec.errors import UsageError
from foldspec.tasks.base import Task

__all__ = ["TASKS", "make_task"]

# name -> "module:class"; imported when it is asked for
TASKS = {
    "docs": "foldspec.tasks.docs:Docs",
    "code": "foldspec.tasks.code:Code",
    "kv": "foldspec.tasks.kv:KeyValue",
}


def make_task(name: str) -> Task:
    """Raises :class:`UsageError` for an unknown name."""
    if name not in TASKS:
        raise UsageError(f"unknown task {name!r}", do=f"known: {', '.join(TASKS)}")
    module, _, attribute = TASKS[name].partition(":")
    task: Task = getattr(import_module(module), attribute)()
    return task
