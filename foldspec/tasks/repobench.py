"""RepoBench v1.1: the next line of a file, given snippets of the files that it imports from; Python and Java."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import ClassVar

from foldspec.errors import UsageError
from foldspec.tasks.answers import said
from foldspec.tasks.base import Score, Text
from foldspec.tasks.data import Origin, Row
from foldspec.tasks.published import Published

__all__ = ["RepoBenchJava", "RepoBenchPython", "first_line"]

LEVELS = {32768: "32k", 65536: "64k", 131072: "128k"}


class RepoBenchPython(Published):
    """Raw text in the official layout. ``--lengths`` 32k, 64k and 128k are the data's own levels, which count another
    tokenizer's tokens: prompts may be much shorter. One example a file: the first in hash order."""

    name, max_new, whole = "repobench", 256, False
    sized = True
    sign: ClassVar[str] = "#"
    origin = Origin("tianyang/repobench_python_v1.1", ("data/cross_file_first-*.parquet",))
    part = "default/cross_file_first"
    columns = ("repo_name", "file_path", "context", "import_statement", "cropped_code", "next_line", "level")
    scoring = "the first line that is no comment equals the wanted one; second: edit similarity of rapidfuzz"
    library = "rapidfuzz"

    def name_of(self, row: Row, number: int) -> str:
        return f"{row['repo_name']}/{row['file_path']}:{hashlib.sha256(row['cropped_code'].encode()).hexdigest()[:8]}"

    def rows(self, length: int) -> Iterable[tuple[str, Row]]:
        if length not in LEVELS:
            levels = ", ".join(LEVELS.values())
            raise UsageError(f"has no level of {length} tokens", where=self.name, do=f"levels are {levels}")
        files: dict[tuple[str, str], tuple[str, Row]] = {}
        for name, row in super().rows(length):
            if row["level"] == LEVELS[length]:
                files.setdefault((row["repo_name"], row["file_path"]), (name, row))
        return files.values()

    def text(self, row: Row) -> Text:
        shown = "".join(f"{self.sign} Path: {each['path']}\n{each['snippet']}\n\n" for each in row["context"])
        own = f"{self.sign} Path: {row['file_path']}\n{row['import_statement']}\n{row['cropped_code'].rstrip()}\n"
        return re.sub(r"\n{4,}", "\n\n", f"{self.sign} Repo Name: {row['repo_name']}\n{shown}{own}")

    def answer(self, row: Row) -> str:
        return str(row["next_line"])

    def score(self, answer: str, text: str) -> Score:
        line = first_line(said(text) or "", self.sign)
        return Score(float(line.split() == answer.split()), answered=bool(line.strip()))

    def by_library(self, answer: str, text: str) -> float:
        from rapidfuzz import fuzz

        return float(fuzz.ratio(first_line(said(text) or "", self.sign), answer)) / 100


class RepoBenchJava(RepoBenchPython):
    """The paper takes 134 examples a level: --limit 134."""

    name, sign = "repobench_java", "//"
    origin = Origin("tianyang/repobench_java_v1.1", ("data/cross_file_first-*.parquet",))


def first_line(text: str, sign: str) -> str:
    """The first line that is neither blank nor a comment or docstring; the first of all if all are."""
    opened, lines = "", text.lstrip("\n").split("\n")
    marks = {"/*": "*/"} if sign == "//" else {'"""': '"""', "'''": "'''"}
    for line in lines:
        bare = line.strip()
        if opened:
            opened = "" if opened in bare else opened
        elif bare[:3] in marks or bare[:2] in marks:
            closing = marks[bare[:3] if bare[:3] in marks else bare[:2]]
            opened = "" if closing in bare[len(closing) :] else closing
        elif bare and not bare.startswith(sign):
            return line
    return lines[0]
