"""Tasks by name, as sources of inputs for one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foldspec.bench.inputs import Source, random_source
from foldspec.errors import UsageError
from foldspec.text.chat import ChatTemplate
from foldspec.text.tokenizer import Tokenizer

__all__ = ["About", "make_sources"]


@dataclass(frozen=True)
class About:
    """What a task must know of a target."""

    vocabulary: int
    max_context: int
    tokenizer: Tokenizer | None
    template: ChatTemplate | None


def make_sources(names: Sequence[str], about: About, *, seed: int) -> dict[str, Source]:
    """Raises :class:`UsageError` for a task that is not known."""
    sources: dict[str, Source] = {}
    for name in names:
        if name != "random":
            raise UsageError(f"unknown task {name!r}", where="--tasks", do="known: random")
        sources[name] = random_source(about.vocabulary, seed)
    if not sources:
        raise UsageError("names no task", where="--tasks")
    return sources
