"""The named pairs of ``checkpoints.yaml``, and what is known of their checkpoints before any file of them is read.
Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from foldspec.errors import CheckpointError, UsageError

__all__ = ["KINDS", "Effort", "Pair", "Registry", "Source", "find", "load_registry", "named"]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the compiled one, where there is one
# keys that published files have at the top or in a part, by their age
_MOVED = ("block_size", "rope_theta")

# what a drafter may do; which of these this version runs is the business of `drafters`
KINDS = (
    "dflash",
    "dspark",
    "autoregressive",
    "masked diffusion",
    "block diffusion",
    "uniform diffusion",
    "adapter",
)


@dataclass(frozen=True)
class Source:
    """Where one checkpoint comes from. ``embedded``, where given, is used; ``repo`` then names the original.

    ``config``      the part of its config.json that the registry knows; empty for a checkpoint that it does not
    ``paper``       keys of ``config`` whose values come from a paper
    ``unverified``  keys of ``config``, and fields of this class, whose values nobody saw in a published file
    """

    repo: str | None = None
    revision: str | None = None
    embedded: str | None = None
    kind: str | None = None
    licence: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    paper: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What a user would write to name it."""
        return self.embedded or self.repo or "unnamed"

    def values(self) -> Iterator[tuple[str, Any, str]]:
        """``(dotted key, value, where it comes from)`` of all of ``config``: ``file``, ``paper`` or ``unverified``."""
        for key, value in _flat(self.config):
            parts = set(key.split("."))
            marked = (
                word for word, keys in (("unverified", self.unverified), ("paper", self.paper)) if parts & {*keys}
            )
            yield key, value, next(marked, "file")

    def contradictions(self, config: Mapping[str, Any]) -> list[str]:
        """What a config.json that was read says otherwise, one sentence a value. A key that it leaves out says
        nothing."""
        real = dict(_flat(config))
        found = []
        for key, known, _ in self.values():
            name = key.rpartition(".")[2]
            same = [each for each in real if each.rpartition(".")[2] == name] if name in _MOVED else []
            place = key if key in real else same[0] if len(same) == 1 else None
            if place is not None and real[place] != known:
                what = f"{place} is {real[place]} in its file, which counts; the registry says {known}"
                found.append(f"{self.name}: {what}")
        return found


@dataclass(frozen=True)
class Effort:
    """How hard a drafter works on a draft unless an option says otherwise: denoising ``steps``, the ``confidence`` or
    the ``entropy_bound`` at which positions are settled, and in which ``order``."""

    steps: int | None = None
    confidence: float | None = None
    entropy_bound: float | None = None
    order: str | None = None


@dataclass(frozen=True)
class Pair:
    """A target, the drafter made for it, and how the two are used unless an option says otherwise.

    ``yarn_reference`` is the length in tokens that YaRN takes for trained; ``block`` the tokens of a draft, for
    drafters whose own config has none; ``paper`` the fields whose values come from a paper, all others being ours.
    """

    name: str
    target: Source
    drafter: Source | None = None
    description: str = ""
    window: int | None = None
    alpha: float | None = None
    coverage: str = "all"
    yarn_reference: int | None = None
    block: int | None = None
    effort: Effort = Effort()
    chat: bool = True
    download_bytes: int | None = None
    disk_bytes: int | None = None
    paper: tuple[str, ...] = ()

    def source(self, name: str) -> str:
        """Where the value of a field comes from: ``paper`` or ``ours``."""
        return "paper" if name in self.paper else "ours"


@dataclass(frozen=True)
class Registry:
    pairs: dict[str, Pair]
    checkpoints: dict[str, Source]


def registry_path() -> Path:
    """``checkpoints.yaml``: inside the package when installed from a wheel, else at the top of the checkout."""
    package = Path(__file__).parent.parent
    inside = package / "checkpoints.yaml"
    return inside if inside.exists() else package.parent / "checkpoints.yaml"


def load_registry(path: Path | None = None) -> Registry:
    """All pairs and checkpoints. Raises :class:`CheckpointError` where the file cannot be read or has an unknown key, a
    value of the wrong kind, or a mark on a value that is not there."""
    path = path or registry_path()
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"is not YAML ({' '.join(str(error).split())})", where=str(path)) from None
    parts = _mapping({} if entries is None else entries, str(path))
    for key in parts:
        if key not in ("pairs", "checkpoints"):
            raise CheckpointError(f"unknown key {key!r}", where=str(path), do="known keys: pairs, checkpoints")
    sources = _mapping(parts.get("checkpoints") or {}, f"{path}: checkpoints")
    checkpoints = {str(name): _source(str(name), entry, f"{path}: {name}") for name, entry in sources.items()}
    pairs = _mapping(parts.get("pairs") or {}, f"{path}: pairs")
    made = {str(name): _pair(str(name), entry, checkpoints, f"{path}: {name}") for name, entry in pairs.items()}
    return Registry(made, checkpoints)


def find(name: str, path: Path | None = None) -> Pair:
    """The pair of that name; :class:`UsageError` with the known names if there is none."""
    pairs = load_registry(path).pairs
    if name not in pairs:
        near = difflib.get_close_matches(name, list(pairs), n=1)
        hint = f"did you mean {near[0]!r}? If not, give" if near else "give"
        raise UsageError(
            f"no pair is called {name!r} (known: {', '.join(pairs) or 'none'})",
            do=f"{hint} a folder or a hub id with --target, and --drafter",
        )
    return pairs[name]


def named(ref: str) -> Source:
    """What a user named with ``--target`` or ``--drafter``: a checkpoint that needs no hub by its name in the registry,
    else a folder or a hub id. A folder of that name comes first. An adapter's files do not say that they are one."""
    known = load_registry().checkpoints.get(ref)
    if known is not None and (known.embedded or known.kind == "adapter") and not os.path.isdir(os.path.expanduser(ref)):
        return known
    return Source(repo=ref)


def _pair(name: str, entry: Any, checkpoints: Mapping[str, Source], where: str) -> Pair:
    values = _known(entry, Pair, where)
    if "name" in values:
        raise CheckpointError("a pair's name is its key; 'name' is not given again", where=where)
    for side in ("target", "drafter"):
        ref = values.get(side)
        if ref is None:
            continue
        if not isinstance(ref, str) or ref not in checkpoints:
            near = difflib.get_close_matches(str(ref), list(checkpoints), n=1)
            do = f"did you mean {near[0]!r}?" if near else "add it to checkpoints"
            raise CheckpointError(f"{side} must be a key of checkpoints, not {ref!r}", where=where, do=do)
        values[side] = checkpoints[ref]
    if values.get("target") is None:
        raise CheckpointError("has no target", where=where)
    if values.get("drafter") is not None and values["drafter"].kind is None:
        raise CheckpointError("its drafter has no kind", where=where, do=f"known kinds: {', '.join(KINDS)}")
    if "effort" in values:
        values["effort"] = Effort(**_known(values["effort"], Effort, f"{where}.effort"))
    _check_marks(values.get("paper", ()), {*values}, "paper", where)
    return Pair(name=name, **values)


def _source(name: str, entry: Any, where: str) -> Source:
    values = _known(entry, Source, where)
    if not values.get("embedded"):
        if values.get("repo"):
            raise CheckpointError("a hub id is its key; 'repo' is for embedded ones", where=where)
        if "/" not in name:
            raise CheckpointError("is neither a hub id (owner/name) nor 'embedded'", where=where)
        values["repo"] = name
    if values.get("kind") is not None and values["kind"] not in KINDS:
        raise CheckpointError(f"unknown kind {values['kind']!r}", where=where, do=f"known: {', '.join(KINDS)}")
    source = Source(**values)
    parts = {part for key, _ in _flat(source.config) for part in key.split(".")}
    _check_marks(source.paper, parts, "paper", where)
    _check_marks(source.unverified, parts | {*values} - {"unverified", "paper", "config"}, "unverified", where)
    both = sorted({*source.paper} & {*source.unverified})
    if both:
        raise CheckpointError(f"{both[0]} is both of a paper and unverified", where=where)
    return source


def _check_marks(marks: tuple[str, ...], there: set[str], what: str, where: str) -> None:
    for mark in marks:
        if mark not in there:
            raise CheckpointError(f"{what} names {mark!r}, which the entry does not give", where=where)


# What YAML may give for each annotation of the dataclasses; compared by type, since a bool is an int to Python.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "dict[str, Any]": (dict,),
    "tuple[str, ...]": (list,),
}


def _known(entry: Any, kind: type, where: str) -> dict[str, Any]:
    """``entry`` as keyword arguments of the dataclass ``kind``: every key a field of it, every value of its type."""
    fields = {field.name: str(field.type).removesuffix(" | None") for field in dataclasses.fields(kind)}
    values = dict(_mapping(entry, where))
    for key, value in values.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), list(fields), n=1)
            do = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(fields)}"
            raise CheckpointError(f"unknown key {key!r}", where=where, do=do)
        allowed = _TYPES.get(fields[key])
        if allowed and value is not None and type(value) not in allowed:
            raise CheckpointError(f"{key} must be of type {allowed[-1].__name__}, not {value!r}", where=where)
        if allowed == (list,):
            if value is None or not all(isinstance(name, str) for name in value):
                raise CheckpointError(f"{key} must be a list of names, not {value!r}", where=where)
            values[key] = tuple(value)
    return values


def _mapping(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"expected 'key: value' lines, found {value!r}", where=where)
    return value


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)`` of a config and of all its parts."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
