"""What the rooms hand one another. Plain data; no torch at import time.

Positions are 0-based. ``n`` is the position of the anchor, the last committed token, which is in no cache yet; the
context entries are ``0 .. n-1``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from foldspec.errors import FoldspecError

__all__ = [
    "Completion",
    "DrafterFacts",
    "Piece",
    "PointMass",
    "Proposal",
    "Round",
    "Sampled",
    "TokenLogprobs",
    "Verdict",
]


class _HasPoint(Protocol):
    @classmethod
    def point(cls, token: int) -> Any: ...


L = TypeVar("L", bound=_HasPoint)  # a law: ``foldspec.laws.Law``, which brings torch


@dataclass(frozen=True)
class DrafterFacts:
    """What a drafter's checkpoint says of the target that it was made for. ``where`` names the checkpoint in errors.

    ``taps`` are 0-based layer indices; ``width``, ``vocabulary``, ``target_layers`` and ``mask_id`` are None where the
    format asks for none. ``padding``: by how many rows tables of one and the same vocabulary may differ; the tokenizers
    are compared where that is not 0.
    """

    where: str
    width: int | None
    vocabulary: int | None
    taps: tuple[int, ...]
    target_layers: int | None
    mask_id: int | None
    padding: int = 0


@dataclass(frozen=True)
class PointMass:
    """Drafted tokens that were not drawn: each one's law ``q`` puts all mass on it (an argmax draft).

    The law holds its tokens, so a token can never be paired with another token's law. ``steps``: passes of the drafter
    that they took.
    """

    tokens: tuple[int, ...]
    steps: int = 1


class Sampled(Generic[L]):
    """Drafted tokens, each held with the law that it was drawn from.

    A token comes in by :meth:`draw` alone, so it can never be paired with a law that it was not drawn from.
    ``source(law, place, step)`` draws the draft at a place of the block, in a step of the drafter's. ``points``: all
    count as settled. ``steps``: passes of the drafter that all of them took.
    """

    def __init__(self, source: Callable[[L, int, int], int], *, points: bool = False) -> None:
        self._source, self._points = source, points
        self.steps = 1
        self._drawn: dict[int, tuple[int, L]] = {}
        self._settled: set[int] = set()

    def draw(self, law: L, place: int | None = None, step: int = 0) -> int:
        """Draw the token at a place (None: the next), keep it with its law, and return it. Places may come in any
        order, and again in a later step: what was there before is forgotten, unless it is settled."""
        place = len(self._drawn) if place is None else place
        assert place not in self._settled, "what is settled is not drawn again"
        token = self._source(law, place, step)
        self._drawn[place] = token, law
        return token

    def settle(self, place: int) -> None:
        """From now on the token stays, and its law is a point mass: that it was drawn is forgotten, so nothing that was
        decided by it can be wrong about its law."""
        self._settled.add(place)

    def cut(self, count: int) -> None:
        """Keep the first ``count`` places at most."""
        self._drawn = {place: drawn for place, drawn in self._drawn.items() if place < count}

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of them; a place before the last that nothing was drawn for is a :class:`KeyError`."""
        return tuple(self._drawn[place][0] for place in range(len(self._drawn)))

    def law(self, i: int) -> L:
        """What draft ``i`` was drawn from, or a point mass."""
        token, law = self._drawn[i]
        return type(law).point(token) if self._points or i in self._settled else law


# The tokens that one request drafts, and the law that each came from.
Proposal: TypeAlias = PointMass | Sampled[Any]


@dataclass(frozen=True)
class Verdict:
    """A rule's answer for one request: how many drafts stand, and the target's own token after them. ``outside``: the
    rows of drafts that stand although the target's law gives them no probability. ``followed``: whether that token
    comes; else the drafts that stand, one at least, are all."""

    accepted: int
    next_token: int
    outside: tuple[int, ...] = ()
    followed: bool = True

    def run(self, proposal: Proposal) -> tuple[int, ...]:
        """What is to be committed."""
        drafts = proposal.tokens[: self.accepted]
        return (*drafts, self.next_token) if self.followed else drafts


@dataclass(frozen=True)
class Round:
    """One draft, one verification, one commit.

    ``accepted`` counts agreeing drafts also where a stop id or the limit cut the commit short; ``committed`` is what
    was really emitted. ``outside``: how many of these have no probability under the target's law (after temperature,
    top-k, top-p and min-p): only a lossy rule lets such drafts stand. ``steps``: passes of the drafter.
    """

    anchor_pos: int
    drafted: tuple[int, ...]
    accepted: int
    committed: tuple[int, ...]
    outside: int = 0
    steps: int = 1


@dataclass(frozen=True)
class TokenLogprobs:
    """What the target's raw logits say of one committed token: natural logarithms of their softmax, before temperature,
    filters, penalties and bias.

    ``top`` holds the most likely (id, logprob), falling, of equal ones the lowest id first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """What one commit adds to a stream: text that is settled (may be empty) and the new token ids.

    Text that may still become a stop string waits for a later piece.
    """

    text: str
    token_ids: tuple[int, ...]


@dataclass
class Completion:
    """The result of one request.

    ``token_ids`` starts with the token that prefill produced, which belongs to no round.
    ``seed``: that of its noise, given or fresh; None where decoding is greedy and none was given.
    ``finish_reason``: ``stop``, ``length``, ``error`` or ``cancelled``; ``stopped_by`` is the id or the string that
    made it stop. The text ends before a stop string, ids end with the token that completed it.
    ``logprobs``: one a token of ``token_ids``; None where they were not asked for.
    ``first_time`` and ``last_time``: seconds from the start of the request to its first and last token; ``times``: to
    the first token and to the end of each round. ``error``: why it failed, where ``finish_reason`` is ``error``.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    rounds: list[Round] = field(default_factory=list)
    first_time: float | None = None
    last_time: float | None = None
    seed: int | None = None
    stopped_by: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    times: list[float] = field(default_factory=list)
    error: FoldspecError | None = None

    @property
    def tau(self) -> float | None:
        """Committed tokens a round, the target's own included; None without a round."""
        return sum(len(r.committed) for r in self.rounds) / len(self.rounds) if self.rounds else None

    @property
    def outside(self) -> int:
        """Committed tokens to which the target's own law gives no probability."""
        return sum(r.outside for r in self.rounds)

    @property
    def by_position(self) -> list[tuple[int, int]]:
        """For each draft of a block, the first one first: (rounds in which it stood, rounds that drafted it). Where a
        stop or the limit cut a commit short, what lies behind the cut is in neither. To be read beside tau: with longer
        drafts the share falls, and tau may rise all the same."""
        judged = [(r, len(r.drafted) if r.accepted < len(r.committed) else len(r.committed)) for r in self.rounds]
        longest = max((count for _, count in judged), default=0)
        return [
            (sum(i < min(r.accepted, count) for r, count in judged), sum(i < count for _, count in judged))
            for i in range(longest)
        ]

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first: (t_last - t_first) / (n_out - 1); None below two tokens."""
        if len(self.token_ids) < 2 or self.first_time is None or self.last_time is None:
            return None
        return (self.last_time - self.first_time) / (len(self.token_ids) - 1)

    @property
    def ttft(self) -> float | None:
        """Seconds from the start of the request to its first token."""
        return self.first_time
