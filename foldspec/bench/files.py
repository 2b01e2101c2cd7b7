"""Files that are written whole, or not at all."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from foldspec.errors import ResourceError

__all__ = ["replace", "sync", "write_json"]


def write_json(path: Path, value: Any, rows: str | None = None) -> None:
    """The whole file or, after a kill, what was there before. ``rows`` names a part that has rows, to be written a line
    each. Raises :class:`ResourceError`."""
    text = json.dumps(value, indent=1, allow_nan=False)
    if rows is not None:
        table = value[rows]
        lines = ",\n".join(f"   {json.dumps(row, allow_nan=False)}" for row in table["rows"])
        short = json.dumps({**value, rows: {**table, "rows": "HERE"}}, indent=1, allow_nan=False)
        text = short.replace('"rows": "HERE"', f'"rows": [\n{lines}\n  ]')
    try:
        replace(path, (text + "\n").encode())
    except OSError as error:
        raise ResourceError(f"cannot be written ({error.strerror})", where=str(path)) from None


def replace(path: Path, data: bytes) -> None:
    """Write a file whole, or not at all. Raises :class:`OSError`."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    sync(path.parent)


def sync(folder: Path) -> None:
    """What has a name in this folder keeps it through a crash of the machine. Raises :class:`OSError`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
