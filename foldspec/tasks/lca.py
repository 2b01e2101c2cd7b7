"""Long Code Arena, project-level completion: a file cut where it first needs its project, which stands before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from foldspec.errors import UsageError
from foldspec.tasks.base import Encode, Item, ending
from foldspec.tasks.data import Origin, Row
from foldspec.tasks.published import Published

__all__ = ["LongCodeArena", "cut_line", "distance"]

FIRST_LINE = 50  # the first line, from 0, that may be cut at
LARGE = 131072  # tokens; longer prompts are of the huge configuration
HUGE_ITEMS = 48  # as many the paper takes of it


class LongCodeArena(Published):
    """Raw text of exactly the length asked for, in the data's order: files from the farthest to the nearest, then the
    file up to its cut line. A repository that is too small for a length has no request of it. Speed only."""

    name, max_new, whole = "lca", 256, False
    origin = Origin("JetBrains-Research/lca-project-level-code-completion", ())  # its files go by the length
    part = "large_context/test"
    columns = ("repo", "commit_hash", "completion_file", "completion_lines", "repo_snapshot")

    def name_of(self, row: Row, number: int) -> str:
        return f"{row['repo']}@{row['commit_hash'][:12]}/{row['completion_file']['filename']}"

    def items(self, encode: Encode, length: int, limit: int, seed: int) -> Iterator[Item]:
        config = "large_context" if length <= LARGE else "huge_context"
        self.part = f"{config}/test"
        origin = Origin(self.origin.repo, (f"{config}/test-*.parquet", f"{config}.jsonl"))
        found = (item for name, row in self._named(origin) for item in self._item(encode, name, row, length))
        return islice(found, None if length <= LARGE else HUGE_ITEMS)

    def _item(self, encode: Encode, name: str, row: Row, length: int) -> list[Item]:
        line = cut_line(row["completion_lines"])
        if line is None:
            return []
        try:
            return [Item(name, ending(encode, length, _pieces(row, line), str, self.name))]
        except UsageError:  # all its text is too short
            return []


def cut_line(lines: Mapping[str, list[int]]) -> int | None:
    """The first line from :data:`FIRST_LINE` on that uses something of the project, by the data's own classes (the one
    is spelt so)."""
    return min((line for kind in ("inproject", "commited") for line in lines[kind] if line >= FIRST_LINE), default=None)


def distance(path: str, other: str) -> int:
    """Directories up from one file and down to the other."""
    own, its = path.split("/")[:-1], other.split("/")[:-1]
    common = next((i for i, (a, b) in enumerate(zip(own, its, strict=False)) if a != b), min(len(own), len(its)))
    return len(own) + len(its) - 2 * common


def _pieces(row: Row, line: int) -> Iterator[str]:
    """The text of a prompt, last piece first."""
    target, snapshot = row["completion_file"], row["repo_snapshot"]
    yield f"# {target['filename']}\n" + "".join(each + "\n" for each in target["content"].split("\n")[:line])
    others = {
        name: text
        for name, text in zip(snapshot["filename"], snapshot["content"], strict=True)
        if name.endswith(".py") and name != target["filename"]
    }
    for name in sorted(others, key=lambda other: (distance(target["filename"], other), other)):
        yield f"# {name}\n{others[name].rstrip()}\n\n"
