"""Tasks by name, as sources of inputs for one target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foldspec.bench.inputs import Item, Source, random_source
from foldspec.errors import UsageError
from foldspec.tasks import PUBLISHED, TASKS, make_task
from foldspec.tasks.base import Score, Task, Text
from foldspec.tasks.data import Access
from foldspec.tasks.published import longest_prompt
from foldspec.text.chat import ChatTemplate
from foldspec.text.tokenizer import Tokenizer

__all__ = ["OUTPUT", "RANDOM", "About", "make_sources"]

RANDOM = "random"  # beside the tasks: ids drawn evenly
OUTPUT = 128  # tokens of output where neither the user nor a task says how many


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


def make_sources(
    names: Sequence[str],
    about: About,
    *,
    seed: int,
    max_new: int | None = None,
    data: Mapping[str, Path] | None = None,
    offline: bool = False,
    score: bool = False,
    execute: bool = False,
) -> dict[str, Source]:
    """``max_new`` None: each task's own. ``data``: the user's own files, by task. ``score``: also by libraries;
    ``execute``: also by running what a model wrote.

    Raises :class:`UsageError` for a task that is not known, or that needs a tokenizer, a library or leave to execute
    where there is none, and for data of a task that is not named.
    """
    data = data or {}
    for name in data:
        if name not in names or name == RANDOM:
            what = "is not among --tasks" if name not in names else "takes no data: its ids are drawn"
            raise UsageError(what, where=f"--data {name}={data[name]}")
    sources: dict[str, Source] = {}
    for name in names:
        if name == RANDOM:
            longest = about.max_context - (max_new or OUTPUT)
            source = random_source(about.vocabulary, seed)
            sources[name] = Source(source, longest, max_new or OUTPUT, facts=_no_facts)
        elif name not in TASKS:
            raise UsageError(f"unknown task {name!r}", where="--tasks", do=f"known: {', '.join([*TASKS, RANDOM])}")
        elif about.tokenizer is None:
            raise UsageError("the target has no tokenizer.json", where=f"--tasks {name}", do=f"use --tasks {RANDOM}")
        else:
            task = make_task(name, Access(data.get(name), offline))
            new = max_new or task.max_new
            published = name in PUBLISHED
            longest = longest_prompt(about.max_context, new) if published else about.max_context - new
            items, judge = partial(_items, task, about, seed), _judge(task, score, execute)
            sized = task.sized
            sources[name] = Source(items, longest, new, task.whole, published, sized, judge, partial(_facts, task))
    if not sources:
        raise UsageError("names no task", where="--tasks")
    return sources


def _items(task: Task, about: About, seed: int, length: int, count: int) -> Iterable[Item]:
    return task.items(about.encode, length, count, seed)


def _judge(task: Task, score: bool, execute: bool) -> Callable[[Any, str], Score | None] | None:
    """What makes scores of a task, if anything does."""
    if task.executes and not execute:
        if score:
            what = f"{task.name} is scored by running what the model writes, as this user"
            raise UsageError(what, where="--score", do="add --allow-code-execution where that may be done")
        return None
    if not score or not task.library:
        return task.score
    if find_spec(task.library) is None:
        package = task.library.replace("_", "-")
        raise UsageError(f"{task.name} needs {package}", where="--score", do="pip install 'foldspec[eval]'")
    return partial(_by_both, task)


def _by_both(task: Task, answer: Any, text: str) -> Score:
    """A rule of ours counts, and the library is the second opinion; without a rule the library counts."""
    own, other = task.score(answer, text), task.by_library(answer, text)
    return Score(other, answered=bool(text.strip())) if own is None else replace(own, second=other)


def _facts(task: Task) -> dict[str, str | None]:
    return task.facts() | {"scoring": task.scoring or None}


def _no_facts() -> dict[str, str | None]:
    return dict.fromkeys(("revision", "prompt", "prompt_sha256", "scoring")) | {"dataset": "ids drawn evenly"}
