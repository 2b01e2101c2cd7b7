"""The README's annotated tree names every file of the package, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = ["foldspec", "scripts", "csrc"]  # folders of which every file is named


def block() -> str:
    """The README's tree. A line is: indentation, name (folders end in /), two spaces or more, a remark."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"<!-- tree -->\n+```\n(.*?)```", text, re.DOTALL)
    return found


def tree() -> set[str]:
    paths: set[str] = set()
    folders: list[str] = []
    for line in block().splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        assert len(indent) % 4 == 0, line
        del folders[len(indent) // 4 :]
        if name.endswith("/"):
            folders.append(name)
        paths.add("".join(folders) + ("" if name.endswith("/") else name))
    return paths


def test_what_the_tree_names_exists() -> None:
    missing = [path for path in sorted(tree()) if not (ROOT / path).exists()]
    assert missing == []


def test_every_source_file_is_named() -> None:
    there = {
        path.relative_to(ROOT).as_posix()
        for folder in SHOWN
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in {"", ".py", ".cu", ".cpp"}
    }
    empty = {path for path in there if path.endswith("__init__.py") and not (ROOT / path).read_text().strip()}
    assert sorted(there - empty - tree()) == []


def test_every_file_has_a_remark() -> None:
    bare = [line for line in block().splitlines() if not re.match(r" *(\S+/$|\S+ {2,}\S)", line)]
    assert bare == []
