"""Tasks by name, as sources of inputs for one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from foldspec.bench.inputs import Item, Source, random_source
from foldspec.errors import UsageError
from foldspec.tasks import TASKS, make_task
from foldspec.tasks.base import Task, Text
from foldspec.text.chat import ChatTemplate
from foldspec.text.tokenizer import Tokenizer

__all__ = ["RANDOM", "About", "datasets", "make_sources"]

RANDOM = "random"  # beside the tasks: ids drawn evenly


@dataclass(frozen=True)
class About:
    """What a task must know of a target."""

    vocabulary: int
    max_context: int
    tokenizer: Tokenizer | None
    template: ChatTemplate | None

    def encode(self, text: Text) -> tuple[int, ...]:
        """Raw text as it stands; messages through the chat template, thinking off. Without one they are raw text."""
        assert self.tokenizer is not None
        if not isinstance(text, str) and self.template is not None:
            rendered = self.template.render([dict(turn) for turn in text], enable_thinking=False)
            return tuple(self.tokenizer.encode(rendered, special=False))
        raw = text if isinstance(text, str) else "\n\n".join(turn["content"] for turn in text)
        return tuple(self.tokenizer.encode_prompt(raw))


def make_sources(names: Sequence[str], about: About, *, seed: int) -> dict[str, Source]:
    """Raises :class:`UsageError` for a task that is not known, or that needs a tokenizer where there is none."""
    sources: dict[str, Source] = {}
    for name in names:
        if name == RANDOM:
            sources[name] = random_source(about.vocabulary, seed)
        elif name not in TASKS:
            raise UsageError(f"unknown task {name!r}", where="--tasks", do=f"known: {', '.join([*TASKS, RANDOM])}")
        elif about.tokenizer is None:
            raise UsageError("the target has no tokenizer.json", where=f"--tasks {name}", do=f"use --tasks {RANDOM}")
        else:
            sources[name] = partial(_items, make_task(name), about, seed)
    if not sources:
        raise UsageError("names no task", where="--tasks")
    return sources


def _items(task: Task, about: About, seed: int, length: int, count: int) -> Sequence[Item]:
    return task.items(about.encode, length, count, seed)


def datasets(names: Sequence[str]) -> dict[str, str]:
    """What each task is made from."""
    return {name: "ids drawn evenly" if name == RANDOM else make_task(name).dataset for name in names}
