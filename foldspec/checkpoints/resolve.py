"""From what the user named to a folder on this disk: a local folder, else the hub's cache, else the hub. No torch.

Downloads go through huggingface_hub into its cache, which other programs share. It shows a file under its name only
when all of it is there; this module adds the checks it lacks (disk space, completeness) and turns each of its many
failures into one line.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from foldspec.checkpoints.headers import Entry, Weights, entries_of, read_headers
from foldspec.errors import CheckpointError, FoldspecError, ResourceError, UsageError

__all__ = ["Resolved", "explain", "peek", "quiet", "resolve"]

# Of the repository's top folder only; never pickles (*.bin, *.pt), which run code when read.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]
_HEADER = ("dtype", "shape", "data_offsets")  # of a tensor in a safetensors header
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Resolved:
    """A checkpoint folder; for one of the hub also its repository and the commit it is a copy of."""

    path: Path
    repo: str | None = None
    revision: str | None = None


def resolve(
    ref: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Resolved:
    """Find or fetch the checkpoint ``ref``: a folder, or a hub id ``owner/name`` at ``revision`` (default: main).

    ``cache_dir`` None means huggingface_hub's own cache. With ``offline``, or when a revision that is a full commit is
    in the cache, no socket is opened. ``progress("download", bytes done, bytes)``. Raises :class:`CheckpointError` (no
    such folder, repository or revision; no access; offline and not cached) and :class:`ResourceError` (network, disk).
    """
    folder = _folder(ref, revision)
    if folder is not None:
        return Resolved(folder)
    from huggingface_hub import constants

    offline = offline or constants.HF_HUB_OFFLINE
    if offline or _COMMIT.fullmatch(revision or ""):
        found = _cached(ref, revision, cache_dir)
        if found:
            return found
        if offline:
            raise CheckpointError(
                f"not (or not wholly) in the cache at revision {revision or 'main'}",
                where=ref,
                do="run once without --offline (HF_HUB_OFFLINE), or give a local folder",
            )
    try:
        return _download(ref, revision, cache_dir, progress)
    except FoldspecError:
        raise
    except Exception as error:  # the hub's errors have no common base, and differ between its versions
        plain = explain(error, ref, revision)
        # a branch that cannot be looked up because the network is down: what it was last time will do
        found = _cached(ref, revision, cache_dir) if isinstance(plain, ResourceError) else None
        if found:
            return found
        raise plain from error


def peek(
    ref: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> tuple[Resolved, Weights | None]:
    """Like :func:`resolve`, without fetching weights: where they are not on this disk, the headers of their files are
    read on the hub, by ranges, and the small files come into the cache. ``Entry.file`` of such tensors does not exist.
    None in their place for a checkpoint that is on this disk, for :func:`read_headers`.

    Raises the errors of :func:`resolve` and of :func:`read_headers`.
    """
    from huggingface_hub import constants

    folder = _folder(ref, revision)
    if folder is not None or offline or constants.HF_HUB_OFFLINE:
        return resolve(ref, revision=revision, cache_dir=cache_dir, offline=True), None
    try:
        return _look(ref, revision, cache_dir, progress)
    except FoldspecError:
        raise
    except Exception as error:  # as above
        plain = explain(error, ref, revision)
        there = _cached(ref, revision, cache_dir) if isinstance(plain, ResourceError) else None
        if there is None:
            raise plain from error
        return there, None


def _look(
    repo: str, revision: str | None, cache_dir: Path | None, progress: Progress | None
) -> tuple[Resolved, Weights | None]:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    there = _cached(repo, revision, cache_dir) if _COMMIT.fullmatch(revision or "") else None
    if there is None:
        info, files = _files(repo, revision)
        commit, done = info.sha, 0
        there = _cached(repo, commit, cache_dir)
    if there is not None:
        return there, None
    disable_progress_bars()
    with quiet():
        small = [pattern for pattern in _WANTED if pattern != "*.safetensors"]
        path = snapshot_download(
            repo, revision=commit, cache_dir=cache_dir, allow_patterns=small, ignore_patterns=_UNWANTED
        )

        def read(name: str) -> dict[str, Entry] | None:
            nonlocal done
            if name not in files:
                return None
            if progress:
                progress("read headers on the hub", done, 0)
            done += 1
            parsed = HfApi().parse_safetensors_file_metadata(repo, name, revision=commit).tensors
            header = {key: {k: vars(each)[k] for k in _HEADER} for key, each in parsed.items()}
            size = files[name]
            first = size - max((each.data_offsets[1] for each in parsed.values()), default=0)
            # how long the header is, the library does not tell; shorter than this it cannot be
            if first < 8 + len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()):
                raise CheckpointError(f"truncated: {name} has {size} bytes, its header asks for more", where=repo)
            return entries_of(header, Path(path) / name, first, size)

        return Resolved(Path(path), repo, commit), read_headers(Path(path), read)


def _folder(ref: str, revision: str | None) -> Path | None:
    """The folder that ``ref`` names; None for a hub id."""
    folder = Path(os.path.expanduser(ref))  # pathlib's raises where there is no such user
    if os.path.isdir(folder) or ref.startswith((".", "/", "~")) or folder.is_absolute():
        if not os.path.isdir(folder):
            raise CheckpointError("no such folder", where=f"{ref:.200}")
        if revision:
            raise UsageError("a folder has no revision", where=ref, do="leave the revision out")
        return folder
    if not _HUB_ID.fullmatch(ref):
        what = "neither a folder nor a hub id (owner/name) nor a name of `foldspec models`"
        raise CheckpointError(what, where=f"{ref:.200}")
    return None


def _files(repo: str, revision: str | None) -> tuple[ModelInfo, dict[str, int]]:
    """What the hub says of a repository, and the files of it that are wanted, with their sizes."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=20)
    files = {file.rfilename: file.size or 0 for file in info.siblings or [] if _wanted(file.rfilename)}
    if not any(name.endswith(".safetensors") for name in files):
        raise CheckpointError("the repository holds no safetensors (pickles are not read)", where=repo)
    return info, files


def _cached(repo: str, revision: str | None, cache_dir: Path | None) -> Resolved | None:
    """The complete copy in the cache, if there is one. Opens no socket."""
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=True,
        )
    except (OSError, ValueError):  # not there, or only partly
        return None
    folder = Path(path)
    return Resolved(folder, repo, folder.name) if _complete(folder) else None


def _complete(folder: Path) -> bool:
    """Whether a download that was killed left nothing out. Older hub libraries keep no list that would tell."""
    if (folder / "adapter_config.json").exists():
        return (folder / "adapter_model.safetensors").exists()
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").exists():
        return False
    if not index.exists():
        return (folder / "model.safetensors").exists()
    try:
        shards = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # malformed, which read_headers explains
    return all((folder / shard).exists() for shard in shards)


def _download(repo: str, revision: str | None, cache_dir: Path | None, progress: Progress | None) -> Resolved:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    cache = Path(cache_dir or constants.HF_HUB_CACHE)
    _, files = _files(repo, revision)
    blobs = cache / f"models--{repo.replace('/', '--')}" / "blobs"
    there = _bytes_in(blobs)
    total = sum(files.values())
    free = shutil.disk_usage(_existing(cache)).free
    if total - there > free:
        raise ResourceError(
            f"{repo} takes {total / 1e9:.2f} GB of disk, {free / 1e9:.2f} GB are free", where=str(cache), do=_ROOM
        )
    disable_progress_bars()
    with quiet(), _watched(blobs, there, total, progress):
        path = snapshot_download(
            repo, revision=revision, cache_dir=cache_dir, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    folder = Path(path)
    if not _complete(folder):
        raise CheckpointError("config.json or a shard that its index names is not in the repository", where=repo)
    return Resolved(folder, repo, folder.name)


def _wanted(name: str) -> bool:
    return any(fnmatch(name, p) for p in _WANTED) and not any(fnmatch(name, p) for p in _UNWANTED)


def _existing(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        with suppress(OSError):  # renamed while we looked
            total += path.stat().st_size
    return total


@contextmanager
def _watched(blobs: Path, before: int, total: int, progress: Progress | None) -> Iterator[None]:
    """Report the growth of the cache while the hub library downloads (its own progress hooks change by version)."""
    if progress is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            progress("download", min(total, max(0, _bytes_in(blobs) - before)), total)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    progress("download", total, total)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the hub library's warnings (every retry) off stderr; what finally fails is raised and explained."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


_ROOM = "free some space or choose another cache folder"
_LOGIN = "set HF_TOKEN to a token that may read it, and check the spelling"


def explain(error: Exception, repo: str, revision: str | None) -> FoldspecError:
    """One line for a failure of the hub library, found in its chain of causes."""
    from huggingface_hub import errors

    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in chain:
        status = getattr(getattr(link, "response", None), "status_code", None)
        if isinstance(link, errors.GatedRepoError):
            do = f"accept its licence at https://huggingface.co/{repo} and set HF_TOKEN"
            return CheckpointError("the repository is gated", where=repo, do=do)
        if isinstance(link, errors.RevisionNotFoundError):
            return CheckpointError(f"the repository has no revision {revision or 'main'}", where=repo)
        if isinstance(link, errors.RepositoryNotFoundError) or status in (401, 403, 404):
            return CheckpointError(f"not on the hub, or private (HTTP {status})", where=repo, do=_LOGIN)
        if status is not None:
            return ResourceError(f"the hub answered HTTP {status}", where=repo, do="try again later")
    for link in chain:
        number = getattr(link, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT):
            return ResourceError("the disk is full", where=str(getattr(link, "filename", None) or repo), do=_ROOM)
        if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            where = str(getattr(link, "filename", None) or repo)
            return ResourceError("cannot write to the cache", where=where, do="choose a folder you can write to")
        if isinstance(link, errors.SafetensorsParsingError):
            return CheckpointError("holds a malformed safetensors file", where=repo)
        if "onsistency check failed" in str(link):
            return ResourceError("the download ended early; nothing of it is kept", where=repo, do="try again")
    last = chain[-1]
    reason = f"{type(last).__name__}: {' '.join(str(last).split())[:120]}"
    return ResourceError(f"cannot be fetched from the hub ({reason})", where=repo, do="check the network and try again")
