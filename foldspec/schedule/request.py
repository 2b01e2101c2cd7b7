"""One request: its ids, where it ends, and the one place that cuts a verified run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foldspec.errors import FoldspecError
from foldspec.records import Round

__all__ = ["Request"]


@dataclass
class Request:
    """``limit`` is the number of output tokens at which the request ends; ``stop_ids`` end it earlier. ``error`` says
    why, where ``finish_reason`` is ``error``.

    ``output`` begins with the token that prefill produced. Its last token is the anchor: committed, in no cache yet.
    """

    id: int
    prompt: tuple[int, ...]
    limit: int
    stop_ids: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""
    error: FoldspecError | None = None

    @property
    def done(self) -> bool:
        return bool(self.finish_reason)

    @property
    def anchor_pos(self) -> int:
        """Position of the anchor, which is also the number of context entries."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def draft_budget(self) -> int:
        """Drafts that can be of use: the target's own token always takes one place of what is left."""
        return self.limit - len(self.output) - 1

    def commit(self, run: Sequence[int]) -> tuple[int, ...]:
        """Take over a verified run, token by token, up to the first that ends the request; return what was taken.

        A stop id beats the limit where both fall on one token. What follows is dropped for good.
        """
        kept: list[int] = []
        for token in run:
            kept.append(token)
            self.output.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.output) >= self.limit:
                self.finish_reason = "length"
            if self.done:
                break
        return tuple(kept)
