"""The named pairs of ``checkpoints.yaml``. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from foldspec.errors import CheckpointError, UsageError

__all__ = ["Pair", "Source", "find", "load_registry"]


@dataclass(frozen=True)
class Source:
    """Where one checkpoint comes from. ``embedded``, where given, is used; ``repo`` then names the original."""

    repo: str | None = None
    revision: str | None = None
    embedded: str | None = None


@dataclass(frozen=True)
class Pair:
    """A target, the drafter made for it, and how the two are used unless an option says otherwise."""

    name: str
    target: Source
    drafter: Source | None = None
    description: str = ""
    window: int | None = None
    alpha: float | None = None
    coverage: str = "all"
    yarn_ref: int | None = None
    chat: bool = True
    download_bytes: int | None = None
    disk_bytes: int | None = None


def registry_path() -> Path:
    """``checkpoints.yaml``: inside the package when installed from a wheel, else at the top of the checkout."""
    package = Path(__file__).parent.parent
    inside = package / "checkpoints.yaml"
    return inside if inside.exists() else package.parent / "checkpoints.yaml"


def load_registry(path: Path | None = None) -> dict[str, Pair]:
    """All pairs by name. Raises :class:`CheckpointError` where the file cannot be read or has an unknown key."""
    path = path or registry_path()
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"is not YAML ({' '.join(str(error).split())})", where=str(path)) from None
    pairs = _mapping({} if entries is None else entries, str(path))
    return {str(name): _pair(str(name), entry, f"{path}: {name}") for name, entry in pairs.items()}


def find(name: str, path: Path | None = None) -> Pair:
    """The pair of that name; :class:`UsageError` with the known names if there is none."""
    pairs = load_registry(path)
    if name not in pairs:
        raise UsageError(
            f"no pair is called {name!r} (known: {', '.join(pairs) or 'none'})",
            do="give a folder or a hub id with --target, and --drafter",
        )
    return pairs[name]


def _pair(name: str, entry: Any, where: str) -> Pair:
    values = _known(entry, Pair, where)
    if "name" in values:
        raise CheckpointError("a pair's name is its key; 'name' is not given again", where=where)
    for side in ("target", "drafter"):
        if values.get(side) is not None:
            values[side] = _source(values[side], f"{where}.{side}")
    if values.get("target") is None:
        raise CheckpointError("has no target", where=where)
    return Pair(name=name, **values)


def _source(entry: Any, where: str) -> Source:
    source = Source(**_known(entry, Source, where))
    if not source.repo and not source.embedded:
        raise CheckpointError("needs 'repo' or 'embedded'", where=where)
    return source


# What YAML may give for each annotation of the two dataclasses; compared by type, since a bool is an int to Python.
_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}


def _known(entry: Any, kind: type, where: str) -> dict[str, Any]:
    """``entry`` as keyword arguments of the dataclass ``kind``: every key a field of it, every value of its type."""
    fields = {field.name: str(field.type).removesuffix(" | None") for field in dataclasses.fields(kind)}
    values = _mapping(entry, where)
    for key, value in values.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), list(fields), n=1)
            do = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(fields)}"
            raise CheckpointError(f"unknown key {key!r}", where=where, do=do)
        allowed = _KINDS.get(fields[key])
        if allowed and value is not None and type(value) not in allowed:
            raise CheckpointError(f"{key} must be of type {fields[key]}, not {value!r}", where=where)
    return dict(values)


def _mapping(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"expected 'key: value' lines, found {value!r}", where=where)
    return value
