"""``code``: a file of Python's standard library, cut where it first needs another file, with files before it.

Only held-out files are read, for the history too. The rules are LCA's, with a cut line found by ``ast``.
"""

from __future__ import annotations

import ast
import builtins
import io
import platform
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from foldspec.tasks.base import Encode, Item, Task, ending, shuffled
from foldspec.tasks.held_out import held_out

__all__ = ["Code", "Source", "cut", "pieces"]

SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "pydoc_data", "encodings", "site-packages"}
FIRST_LINE = 50  # the first line, from 0, that may be cut at
# What every file has without importing it: no sign that a line needs another file.
COMMON = {*dir(builtins), *dir(str), *dir(list), *dir(dict)}


class Code(Task):
    """Raw text to be continued: history, then a file up to its cut line. A longer prompt only begins earlier."""

    name, max_new = "code", 128

    @property
    def dataset(self) -> str:
        return f"Python {platform.python_version()} standard library, held-out files"

    def items(self, encode: Encode, length: int, limit: int, seed: int) -> list[Item]:
        sources = read_sources()
        order = {path: i for i, path in enumerate(sources)}
        found: list[Item] = []
        for path in shuffled(sources, seed):
            if len(found) >= limit:
                break
            line = cut(path, sources)
            if line is not None:
                ids = ending(encode, length, pieces(path, line, nearest(path, line, sources), sources), str, self.name)
                found.append(Item(f"{self.name}/{order[path]}", ids))
        return found


@dataclass(frozen=True)
class Source:
    """A file: ``defines`` are the functions and classes at its top level, ``own`` what it gives a name anywhere: those,
    its variables and its parameters."""

    text: str
    defines: frozenset[str]
    own: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Source:
        """Raises SyntaxError for what is no Python."""
        tree, kinds = ast.parse(text), (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        top = frozenset(node.name for node in tree.body if isinstance(node, kinds))
        own = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        return cls(text, top, frozenset(own))


@lru_cache(maxsize=1)
def read_sources() -> dict[str, Source]:
    """The held-out files of the running Python's standard library, by path, in order of path."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        built = name.startswith(("_sysconfigdata", "config-"))  # written when Python was built: paths of a machine
        if built or SKIPPED & set(name.split("/")) or not held_out(f"stdlib/{name}"):
            continue
        try:
            found[name] = Source.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
    return found


def cut(path: str, sources: Mapping[str, Source]) -> int | None:
    """The line, from 0, that is to be written: the first from FIRST_LINE on, no import or comment, with a name that
    another file defines at its top level and this one nowhere. None if there is none."""
    elsewhere = {name for other, source in sources.items() if other != path for name in source.defines}
    wanted = elsewhere - sources[path].own - COMMON
    for line, names in sorted(_names(sources[path].text).items()):
        if line >= FIRST_LINE and names[0] not in ("import", "from") and wanted & set(names):
            return line
    return None


def nearest(path: str, line: int, sources: Mapping[str, Source]) -> list[str]:
    """The other files, nearest first: what defines names of the cut line; then by how many names of the file so far
    each defines; then by path."""
    names = _names(sources[path].text)
    missing = set(names[line]) - sources[path].own - COMMON
    used = {name for i in names if i <= line for name in names[i]} - sources[path].own - COMMON

    def rank(other: str) -> tuple[bool, int, str]:
        defines = sources[other].defines
        return not missing & defines, -len(used & defines), other

    return sorted((other for other in sources if other != path), key=rank)


def pieces(path: str, line: int, others: list[str], sources: Mapping[str, Source]) -> Iterator[str]:
    """The text of a prompt, last piece first: the file up to its cut line, then the others, the nearest first."""
    # lines as tokenize counts them: str.splitlines would also part them at form feeds
    yield f"# {path}\n" + "".join(io.StringIO(sources[path].text).readlines()[:line])
    for other in others:
        yield f"# {other}\n{sources[other].text.rstrip()}\n\n"


@lru_cache(maxsize=256)
def _names(text: str) -> dict[int, list[str]]:
    """Names and keywords by line, from 0, in order; those in strings and comments are none."""
    found: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            found.setdefault(token.start[0] - 1, []).append(token.string)
    return found
