"""Where a bench keeps what it measured: a folder with ``plan.json``, ``requests.jsonl`` and, last, ``bench.json``.

The lines of a request are written in one go and synced, so that a kill loses the request that was running. What a kill
tore is cut off when the bench is resumed; a bench is resumed only with the settings and inputs that it began with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from foldspec.bench.files import replace, sync, write_json
from foldspec.bench.lines import check_line
from foldspec.errors import MeasurementError, ResourceError, UsageError

__all__ = ["Store", "differences"]


class Store:
    """``lines`` of all requests that are whole, in the order in which they were measured."""

    def __init__(self, folder: Path | None = None, *, arms: Sequence[str] = ()) -> None:
        """Without a folder, nothing is kept but in memory."""
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self.resumed = 0  # requests that were there already
        self._arms = set(arms)
        self._keys: set[tuple[Any, ...]] = set()
        self._held = ExitStack()
        self._file: int | None = None

    def open(self, plan: Mapping[str, Any], *, resume: bool) -> None:
        """Begin, or go on. Raises :class:`UsageError` for a folder that is in use, or began with another ``plan``."""
        if self.folder is None:
            return
        try:
            self._open(self.folder, plan, resume)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path, plan: Mapping[str, Any], resume: bool) -> None:
        try:
            if folder.is_dir() and any(folder.iterdir()) and not resume:
                do = "choose another folder, or --resume to go on"
                raise UsageError("is not empty", where=f"--out {folder}", do=do)
            folder.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(FileLock(folder / "lock", timeout=0))
            self._begin(json.loads(json.dumps(plan)))
            path = folder / "requests.jsonl"
            if path.exists():
                self._read(path)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._held.callback(os.close, self._file)
            sync(folder)
        except Timeout:
            raise UsageError("another bench writes there", where=f"--out {folder}") from None
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
            why = error.strerror if isinstance(error, OSError) else error
            raise ResourceError(f"cannot be written ({why})", where=f"--out {folder}") from None

    def _begin(self, plan: dict[str, Any]) -> None:
        assert self.folder is not None
        path = self.folder / "plan.json"
        if not path.exists():
            if (self.folder / "requests.jsonl").exists():
                raise UsageError("has no plan.json", where=f"--out {self.folder}", do="choose another folder")
            write_json(path, plan)
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            raise UsageError("is not JSON", where=str(path), do="choose another folder") from None
        differing = list(differences(before, plan))
        if differing:
            what = f"began with other settings or inputs: {'; '.join(differing[:3])}"
            raise UsageError(what, where=f"--out {self.folder}", do="give the same ones, or another folder")

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        whole, _, torn = data.rpartition(b"\n")
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(whole.splitlines(), 1):
            where = f"{path}, line {number}"
            try:
                lines.append(json.loads(text))
            except (ValueError, RecursionError):
                raise UsageError("is not JSON", where=where, do="choose another folder") from None
            try:
                check_line(lines[-1], where)
            except MeasurementError as error:
                raise UsageError(error.what, where=where, do="choose another folder") from None
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for line in lines:
            groups.setdefault(_key(line), []).append(line)
        kept = [group for group in groups.values() if {line["method"] for line in group} >= self._arms]
        if torn or sum(map(len, kept)) < len(lines):
            replace(path, "".join(json.dumps(line) + "\n" for group in kept for line in group).encode())
        for group in kept:
            self._take(group)
        self.resumed = len(kept)

    def has(self, key: tuple[Any, ...]) -> bool:
        return key in self._keys

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Keep the lines of one request. Raises :class:`ResourceError` if the disk takes them not."""
        if self._file is not None:
            data = "".join(json.dumps(line) + "\n" for line in lines).encode()
            try:
                while data:
                    data = data[os.write(self._file, data) :]
                os.fsync(self._file)
            except OSError as error:
                raise ResourceError(f"cannot be written ({error.strerror})", where=f"--out {self.folder}") from None
        self._take(lines)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write ``bench.json``."""
        if self.folder is not None:
            write_json(self.folder / "bench.json", result, rows="requests")

    def close(self) -> None:
        self._file = None
        self._held.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, lines: Sequence[dict[str, Any]]) -> None:
        self.lines += lines
        self._keys.add(_key(lines[0]))


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return line["task"], line["length"], line["id"]


def differences(a: Any, b: Any, name: str = "") -> Iterable[str]:
    """What differs between two plans, in words."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            yield from differences(a.get(key), b.get(key), f"{name}.{key}" if name else key)
    elif a != b:
        short = [json.dumps(value) for value in (a, b)]
        yield (name or "all of it") if max(map(len, short)) > 60 else f"{name} was {short[0]}, is {short[1]}"
