"""Rows of a published data set: from a file or folder of the user's, else the hub's cache, else the hub.

The files are read as they are published (JSON, JSONL, CSV, parquet, one in a zip): no loading script ever runs. What is
not there is one line that says which file is wanted and which command fetches it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from foldspec.checkpoints.resolve import explain, quiet
from foldspec.errors import FoldspecError, ResourceError, UsageError

__all__ = ["Access", "Origin", "Row", "find", "read"]

Row = Mapping[str, Any]
TEXT = "utf-8-sig"  # the mark that some editors put first is no part of the data


@dataclass(frozen=True)
class Origin:
    """Where a data set is published: the hub's repository, the commit, and patterns of the paths in it, the first that
    there is counting. ``member`` is the file of a zip. A ``revision`` of None: nobody here has seen one, so main is
    taken, and its commit recorded."""

    repo: str
    files: tuple[str, ...]
    revision: str | None = None
    member: str = ""


@dataclass(frozen=True)
class Access:
    """Where to look: ``path``, the user's own file or folder, before anything else; the network unless ``offline``."""

    path: Path | None = None
    offline: bool = False


def find(task: str, origin: Origin, access: Access) -> tuple[list[Path], str | None]:
    """The files, in order of their paths, and the commit they are of (None for the user's own).

    Raises :class:`UsageError` for a path that holds none of them, :class:`ResourceError` and
    :class:`~foldspec.errors.CheckpointError` for what the hub does not give.
    """
    if access.path is not None:
        return _own(task, origin, access.path), None
    folder = _fetched(task, origin, access.offline)
    found = _matching(folder, origin.files)
    if not found:
        what = f"{origin.repo} at {folder.name} holds none of {', '.join(origin.files)}"
        raise ResourceError(what, where=task, do=f"give --data {task}=PATH")
    return found, folder.name


def read(paths: Sequence[Path], member: str = "", needed: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of all files, one after the other. Raises :class:`UsageError` for a file that cannot be read, and for a
    row that lacks one of the ``needed`` columns."""
    for path in paths:
        try:
            for number, row in enumerate(_rows(path, member), 1):
                missing = next((name for name in needed if not isinstance(row, dict) or name not in row), None)
                if missing is not None:
                    raise UsageError(f"row {number} has no {missing!r}", where=str(path), do="the official columns")
                yield row
        except (ValueError, RecursionError, zipfile.BadZipFile, zlib.error, KeyError, csv.Error, EOFError) as error:
            kind = path.suffix.lstrip(".") or "a table"
            raise UsageError(f"is not {kind} as it should be ({error})", where=str(path)) from None
        except OSError as error:
            raise UsageError(f"cannot be read ({error.strerror or error})", where=str(path)) from None


def _own(task: str, origin: Origin, path: Path) -> list[Path]:
    where = f"--data {task}={path}"
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError("no such file or folder", where=where)
    names = (*origin.files, origin.member) if origin.member else origin.files
    alone = [name for name in map(PurePosixPath, names) if not name.name.startswith("*")]  # a name that says enough
    found = _matching(path, names) or _matching(path, [name.name for name in alone])
    if not found:
        raise UsageError(f"holds none of {', '.join(filter(None, names))}", where=where, do="or name the file itself")
    return found


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of the first pattern that has any; a folder may hold only the lower part of the published paths."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for pattern in patterns:
        found = [path for path in files if fnmatch(f"/{path.relative_to(folder).as_posix()}", f"*/{pattern}")]
        if found:
            return found
    return []


def _fetched(task: str, origin: Origin, offline: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    offline = offline or constants.HF_HUB_OFFLINE
    disable_progress_bars()
    try:
        with quiet():
            return Path(
                snapshot_download(
                    origin.repo,
                    repo_type="dataset",
                    revision=origin.revision,
                    allow_patterns=list(origin.files),
                    local_files_only=offline,
                )
            )
    except Exception as error:  # the hub's errors have no common base, and differ between its versions
        at = f" at {origin.revision}" if origin.revision else ""
        revision = f" --revision {origin.revision}" if origin.revision else ""
        include = " ".join(f"--include '{name}'" for name in origin.files)
        command = f"hf download {origin.repo} --repo-type dataset{revision} {include}"
        if offline:
            what = f"its data, {origin.repo}{at}, is not in the hub's cache, and this is offline"
        else:
            why: FoldspecError = explain(error, f"datasets/{origin.repo}", origin.revision)
            what = f"its data is not there: {why}"
        raise ResourceError(what, where=task, do=f"give --data {task}=PATH, or fetch it: {command}") from None


def _rows(path: Path, member: str) -> Iterator[Any]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from _parquet(path)
    elif name.endswith(".zip"):
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            yield from _lines(io.TextIOWrapper(file, encoding=TEXT))
    elif name.endswith(".csv"):
        csv.field_size_limit(1 << 30)
        with path.open(encoding=TEXT, newline="") as file:
            yield from csv.DictReader(file)
    elif name.endswith(".json"):
        rows = json.loads(path.read_text(encoding=TEXT))
        yield from rows if isinstance(rows, list) else [rows]
    else:
        with gzip.open(path, "rt", encoding=TEXT) if name.endswith(".gz") else path.open(encoding=TEXT) as file:
            yield from _lines(file)


def _lines(file: Iterator[str]) -> Iterator[Any]:
    return (json.loads(line) for line in file if line.strip())


def _parquet(path: Path) -> Iterator[Any]:
    """Row by row: a file may be larger than memory."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError("parquet needs pyarrow", where=str(path), do="pip install 'foldspec[eval]'") from None
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=1):
        yield from batch.to_pylist()
