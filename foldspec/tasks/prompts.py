"""Official wordings, read where they are published: none is copied into this package.

A wording comes from its file beside the user's own data, else from the repository at a fixed commit. Where neither can
be had, the task's own wording takes its place, and every result says so.
"""

from __future__ import annotations

import ast
import hashlib
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foldspec.errors import UsageError
from foldspec.tasks.data import Access

__all__ = ["Place", "Wording", "constant", "wording"]

SECONDS = 20  # that a server may take


@dataclass(frozen=True)
class Place:
    """A file of a public repository at a commit, and how its wording is got out of the text."""

    repo: str
    commit: str
    path: str
    pick: Callable[[str], str] = str

    @property
    def url(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repo}/{self.commit}/{self.path}"


@dataclass(frozen=True)
class Wording:
    text: str
    source: str  # official, own or data

    def facts(self) -> dict[str, str | None]:
        return {"prompt": self.source, "prompt_sha256": hashlib.sha256(self.text.encode()).hexdigest()}


def wording(own: str, place: Place | None, access: Access) -> Wording:
    """Raises :class:`UsageError` for a file beside the data that does not hold what its name promises."""
    text = None if place is None else _beside(place, access.path) or _fetched(place, access.offline)
    if place is None or text is None:
        return Wording(own, "own")
    try:
        return Wording(place.pick(text), "official")
    except (ValueError, KeyError, TypeError, SyntaxError):
        what = f"has no wording where {place.repo} at {place.commit[:7]} has it"
        raise UsageError(what, where=place.path, do="leave the file out, or take that commit's") from None


def constant(text: str, name: str) -> object:
    """The value that Python source gives a name at its top level: a literal, or a string and ``.strip()``. Nothing of
    it is run. Raises KeyError and ValueError."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            value = node.value
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "strip":
                return str(ast.literal_eval(value.func.value)).strip()
            return ast.literal_eval(value)
    raise KeyError(name)


def _beside(place: Place, path: Path | None) -> str | None:
    if path is None:
        return None
    file = (path if path.is_dir() else path.parent) / Path(place.path).name
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError):
        return None


def _fetched(place: Place, offline: bool) -> str | None:
    if offline:
        return None
    try:
        with urllib.request.urlopen(place.url, timeout=SECONDS) as answer:
            return str(answer.read().decode("utf-8"))
    except (OSError, ValueError, urllib.error.URLError):
        return None
