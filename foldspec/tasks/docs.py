"""``docs``: sections of Python's language reference, as pydoc has them, and a request to summarise one of them."""

from __future__ import annotations

import platform
import re
from functools import partial
from importlib import import_module
from typing import cast

from foldspec.errors import UsageError
from foldspec.tasks.base import Encode, Item, Task, chat, ending, shuffled

__all__ = ["Docs"]

SHORTEST = 512  # tokens of a prompt
OPENING = 256  # tokens at most of the section that is asked about


class Docs(Task):
    """The opening of one section, other sections, and the question about the first: its answer lies as far back as the
    prompt is long. A longer prompt has more sections between; the first and the last lines stay the same. Sections
    whose heading and first paragraph are too long are not asked about.
    """

    name, max_new = "docs", 128

    @property
    def dataset(self) -> str:
        return f"Python {platform.python_version()} pydoc topics"

    def items(self, encode: Encode, length: int, limit: int, seed: int) -> list[Item]:
        if length < SHORTEST:
            raise UsageError(f"{length} tokens are too few: {SHORTEST} at least", where=self.name)
        sections, items = _sections(), list[Item]()
        for about in shuffled(range(len(sections)), seed):
            opening = _opening(encode, sections[about])
            if opening and len(items) < limit:
                others = (sections[(about - i) % len(sections)] for i in range(1, len(sections)))
                frame = partial(_turn, opening, question(sections[about]))
                items.append(Item(f"{self.name}/{about}", ending(encode, length, others, frame, self.name)))
        return items


def question(section: str) -> str:
    """What is asked about a section, by its heading."""
    title = re.sub("^The ", "the ", section.partition("\n")[0].replace('"', ""))
    # of four wordings, this one set SmolLM2-135M looping least: 0.57 of 64 greedy tokens distinct, the others about 0.5
    return f"Summarise the section on {title} of the text above in a few sentences."


def _turn(opening: str, asked: str, text: str) -> list[dict[str, str]]:
    return chat(opening + text + asked)


def _sections() -> list[str]:
    """The topics' texts in the order of their names; each ends in an empty line."""
    topics = cast(dict[str, str], import_module("pydoc_data.topics").topics)
    return [topics[name].strip("\n") + "\n\n" for name in sorted(topics)]


def _opening(encode: Encode, section: str) -> str:
    """Its first paragraphs, as many as fit :data:`OPENING`; empty if not even the first two, heading and text, do."""
    paragraphs, kept = section.strip("\n").split("\n\n"), ""
    for count in range(2, len(paragraphs) + 1):
        text = "\n\n".join(paragraphs[:count]) + "\n\n"
        if len(text) > 8 * OPENING or len(encode(text)) > OPENING:
            break
        kept = text
    return kept
