"""What published sets have in common: rows that are requests as they are, in one order, never cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, ClassVar

from foldspec.errors import UsageError
from foldspec.tasks.base import Encode, Item, Task, Text, chat
from foldspec.tasks.data import Access, Origin, Row, find, read
from foldspec.tasks.prompts import Place, Wording, wording

__all__ = ["Published", "longest_prompt"]

BLOCK, SPARE = 256, 65  # FOLD's rule of length (B.2), in tokens


def longest_prompt(max_context: int, max_new: int) -> int:
    """The longest prompt P that FOLD's rule lets in: ceil((P + max_new + 65) / 256) * 256 <= ``max_context``."""
    return max_context // BLOCK * BLOCK - SPARE - max_new


class Published(Task):
    """A subclass says where its data is (``origin``), which ``columns`` its rows must have, of which config and split
    they are (``part``), and how a row becomes a request: :meth:`text`, :meth:`answer` and, unless a column ``id`` has
    it, :meth:`name_of`. ``own`` is a wording of ours, ``place`` where the official one is; without both, the data has
    the prompt. No row is ever cut: one that does not fit is left out, and counted.
    """

    whole = True
    origin: Origin
    part: str
    columns: tuple[str, ...]
    own: ClassVar[str] = ""
    place: Place | None = None

    def __init__(self, access: Access | None = None) -> None:
        self.access = access or Access()
        self._revision: str | None = None

    @property
    def dataset(self) -> str:
        return f"{self.origin.repo} {self.part}"

    def facts(self) -> dict[str, str | None]:
        return {"dataset": self.dataset, "revision": self._revision, **self.wording.facts()}

    @cached_property
    def wording(self) -> Wording:
        return wording(self.own, self.place, self.access) if self.own else Wording("", "data")

    def text(self, row: Row) -> Text:
        """The request: a text that is continued as it stands, or chat messages."""
        return chat(self.filled(**row))

    def answer(self, row: Row) -> Any:
        """What :meth:`score` judges by."""
        return None

    def name_of(self, row: Row, number: int) -> str:
        """The row's id; ``number``: its place in the data, from 0."""
        return str(row["id"])

    def filled(self, **values: Any) -> str:
        """The wording with its ``{names}`` replaced. Raises :class:`UsageError` for a name that a row does not have."""
        try:
            return self.wording.text.format(**values)
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(f"the wording asks for {error}, which no row has", where=self.name) from None

    def rows(self, length: int) -> Iterable[tuple[str, Row]]:
        """Id and row of all that may be asked at this length, in their order: by the sha256 of
        ``{dataset}/{config}/{split}:{id}``, as hexadecimal digits."""

        def place(pair: tuple[str, Row]) -> str:
            return hashlib.sha256(f"{self.origin.repo}/{self.part}:{pair[0]}".encode()).hexdigest()

        return sorted(self._named(self.origin), key=place)

    def items(self, encode: Encode, length: int, limit: int, seed: int) -> Iterator[Item]:
        """All requests, made as they are asked for. The order is that of :meth:`rows`, whatever the seed."""
        for name, row in self.rows(length):
            yield Item(name, encode(self.text(row)), self.answer(row))

    def _named(self, origin: Origin) -> Iterator[tuple[str, Row]]:
        paths, self._revision = find(self.name, origin, self.access)
        for number, row in enumerate(read(paths, origin.member, self.columns)):
            yield self.name_of(row, number), row
