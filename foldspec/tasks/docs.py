"""``docs``: sections of Python's language reference, as pydoc has them, and a request to summarise one of them."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import cast

from foldspec.errors import UsageError
from foldspec.tasks.base import Encode, Item, Task, chat, ending, shuffled

__all__ = ["Docs"]

SHORTEST = 512  # tokens: the shortest prompt, in which every section that is asked about still stands whole


class Docs(Task):
    """Topics in sorted order (after the last comes the first), up to one that differs by item; then the question.

    A longer prompt only begins earlier. The question is about the section that begins first in the shortest prompt, so
    that its answer is never in the last lines alone. Items whose shortest prompt holds no whole section are left out.
    """

    name, max_new = "docs", 128

    @property
    def dataset(self) -> str:
        return f"Python {platform.python_version()} pydoc topics"

    def items(self, encode: Encode, length: int, limit: int, seed: int) -> list[Item]:
        if length < SHORTEST:
            raise UsageError(f"{length} tokens are too few: {SHORTEST} at least", where=self.name)
        sections = _sections()
        found: list[Item] = []
        for last in shuffled(range(len(sections)), seed):
            if len(found) >= limit:
                break
            about = _subject(encode, sections, last)
            if about is not None:
                frame = partial(_turn, question(sections[about]))
                ids = ending(encode, length, _back(sections, last), frame, self.name)
                found.append(Item(f"{self.name}/{last}", ids))
        return found


def question(section: str) -> str:
    """What is asked about a section, by its heading."""
    title = re.sub("^The ", "the ", section.partition("\n")[0].replace('"', ""))
    # of four wordings, this one set SmolLM2-135M looping least: 0.57 of 64 greedy tokens distinct, the others about 0.5
    return f"Summarise the section on {title} of the text above in a few sentences."


def _turn(asked: str, text: str) -> list[dict[str, str]]:
    return chat(text + asked)


def _sections() -> list[str]:
    """The topics' texts in the order of their names; each ends in an empty line."""
    topics = cast(dict[str, str], import_module("pydoc_data.topics").topics)
    return [topics[name].strip("\n") + "\n\n" for name in sorted(topics)]


def _back(sections: list[str], last: int) -> Iterator[str]:
    """From the section ``last`` backwards, each section once."""
    return (sections[(last - i) % len(sections)] for i in range(len(sections)))


def _subject(encode: Encode, sections: list[str], last: int) -> int | None:
    """The first section that stands whole in a prompt of SHORTEST tokens; None if even the last does not."""
    text, found = "", None
    for i, section in enumerate(_back(sections, last)):
        text = section + text
        if len(text) > 8 * SHORTEST or len(encode(chat(text + question(section)))) > SHORTEST:
            break
        found = (last - i) % len(sections)
    return found
