"""One request: its ids and text, where it ends, and the one place that cuts a verified run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foldspec.errors import FoldspecError
from foldspec.noise import Noise
from foldspec.options import SamplingParams
from foldspec.records import Round, TokenLogprobs
from foldspec.text.stream import TextStream

__all__ = ["Request"]


@dataclass
class Request:
    """``limit`` is the number of output tokens at which the request ends; ``stop_ids`` end it earlier, and so do the
    stop strings that ``text`` looks for. ``stopped_by`` is the id or the string that did.

    ``output`` begins with the token that prefill produced. Its last token is the anchor: committed, in no cache yet.
    """

    id: int
    prompt: tuple[int, ...]
    limit: int
    stop_ids: frozenset[int] = frozenset()
    params: SamplingParams = field(default_factory=SamplingParams)
    text: TextStream = field(default_factory=lambda: TextStream(None))
    noise: Noise = field(default_factory=lambda: Noise(0))
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""
    stopped_by: int | str | None = None
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

    def commit(self, run: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> tuple[int, ...]:
        """Take over a verified run, token by token, up to the first that ends the request; return what was taken.

        A token is looked at as a stop id, then as the end of a stop string, then against the limit: the first that
        holds is the reason, and what follows the token is dropped for good. Neither kind of stop counts among the first
        ``min_tokens``. ``logprobs`` has an entry a token, or none at all.
        """
        kept: list[int] = []
        for i, token in enumerate(run):
            self.logprobs += logprobs[i : i + 1]
            self.output.append(token)
            kept.append(token)
            may_stop = len(self.output) > self.params.min_tokens
            self.text.push((token,), may_stop)
            if may_stop and token in self.stop_ids:
                self.finish_reason, self.stopped_by = "stop", token
            elif self.text.stopped_by is not None:
                self.finish_reason, self.stopped_by = "stop", self.text.stopped_by
            elif len(self.output) >= self.limit:
                self.finish_reason = "length"
            if self.done:
                self.text.finish()
                break
        return tuple(kept)

    def settle(self) -> None:
        """Bring the records in line after an interrupt, which may have come anywhere in a commit: tokens whose round
        was not recorded were never delivered and are dropped, and the text is made anew from those that are left."""
        recorded = 1 + sum(len(r.committed) for r in self.rounds)
        if not self.rounds and self.finish_reason in ("", "stop", "length"):  # the first token has no round: once more
            first, logprobs = self.output[:1], self.logprobs[:1]
            self.output, self.logprobs, self.text = [], [], self.text.remade(())
            self.finish_reason, self.stopped_by = "", None
            self.commit(first, logprobs)
            return
        if len(self.output) > recorded:
            self.finish_reason, self.stopped_by = "", None
        del self.output[recorded:]
        del self.logprobs[len(self.output) :]
        self.text = self.text.remade(self.output, self.params.min_tokens)
        if self.done:
            self.text.finish()

    def cancel(self) -> None:
        """End the request here, unless it has ended."""
        if not self.done:
            self.finish_reason = "cancelled"
            self.text.finish()

    def fail(self, error: FoldspecError) -> None:
        """End the request because of an error, which is its own and no other request's."""
        self.cancel()
        self.finish_reason, self.error = "error", error
