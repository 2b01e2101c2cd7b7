"""The round loop: one draft, one verification, one commit, one truncate, for any number of requests at once.

The target's pass is ragged: the blocks of the requests that decode, and beside them chunks of prompts that are being
prefilled. Nothing here knows which drafter, which reading of the context or which rule is at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foldspec.acceptance.base import AcceptanceRule
from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter
from foldspec.errors import CheckpointError, UsageError
from foldspec.logprobs import logprobs_of
from foldspec.models.base import ForwardPlan, LanguageModel
from foldspec.records import PointMass, Proposal, Round, TokenLogprobs, Verdict
from foldspec.sampling import target_laws
from foldspec.schedule.graphs import Graphs
from foldspec.schedule.request import Request
from foldspec.schedule.trace import Mark, unmarked

__all__ = ["Chunk", "Rounds"]


@dataclass(frozen=True)
class Chunk:
    """Committed tokens of ``request`` from position ``start`` on that no cache holds yet. ``first``: these are the last
    of its prompt, so the row of the last one gives its first token."""

    request: Request
    start: int
    tokens: Sequence[int]
    first: bool = False


class Rounds:
    """A target, its cache, a drafter and a rule at work. ``draft_tokens`` caps the drafts that are verified a round.

    ``max_drafts``: those of a round at most. ``mark`` hears of the end of each part of a round (``schedule/trace.py``).
    ``graphs``, where it is set, runs the rounds that it can.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: PagedCache,
        drafter: Drafter,
        rule: AcceptanceRule,
        *,
        device: torch.device,
        draft_tokens: int | None = None,
    ) -> None:
        self.model, self.cache, self.drafter, self.rule = model, cache, drafter, rule
        self.mark: Mark = unmarked
        self.graphs: Graphs | None = None
        self._device = device
        self.max_drafts = drafter.max_drafts if draft_tokens is None else min(draft_tokens, drafter.max_drafts)

    def check_drafts(self, least: int) -> None:
        """Raises :class:`UsageError` where rounds can propose something, but never so many drafts."""
        if 0 < self.max_drafts < least:
            what = f"a round proposes {self.max_drafts} drafts at most, not {least}"
            raise UsageError(what, where="force_accept", do="ask for fewer")

    def budget(self, request: Request) -> int:
        """Drafts that this round can verify of the request."""
        return max(0, min(self.max_drafts, request.draft_budget))

    def round(self, requests: Sequence[Request]) -> list[Round]:
        """Advance each request, none of them done, by at least one token. Raises the error of one that fails."""
        self.step(requests, ())
        for request in requests:
            if request.error is not None:
                raise request.error
        return [request.rounds[-1] for request in requests]

    @torch.inference_mode()
    def step(self, decoding: Sequence[Request], chunks: Sequence[Chunk]) -> None:
        """One pass of the target over a block of each request that decodes and over the chunks. Every request that
        decodes is advanced by at least one token, and one whose prompt ends here gets its first. A request whose next
        token would come from logits that are not finite ends with an error; the others are none the worse for it.
        """
        if self.graphs is not None and not chunks and self._replay(self.graphs, decoding):
            return
        anchors = Rows.of([r.id for r in decoding], [r.anchor_pos for r in decoding], [1] * len(decoding))
        proposals = self._propose(decoding, anchors)
        rows, tokens = self._rows(decoding, proposals, chunks)
        ids = torch.tensor(tokens, device=self._device)
        judged = [(r, p) for r, p in zip(decoding, proposals, strict=True)]
        judged += [(chunk.request, PointMass(())) for chunk in chunks if chunk.first]
        self.mark("host")
        output = self.model(
            ids, ForwardPlan(rows, self.drafter.taps, self._head_rows(rows, decoding, chunks)), self.cache
        )
        self.mark("verify")
        self._commit(output.logits, judged, len(decoding))
        self._keep(decoding, chunks, rows, tokens, output.taps)

    @torch.inference_mode()
    def first(self, request: Request, logits: torch.Tensor) -> None:
        """Commit the first token of a request, from the logits [1, vocabulary] of its prompt's last token."""
        self._commit(logits, [(request, PointMass(()))], 0)

    def _replay(self, graphs: Graphs, decoding: Sequence[Request]) -> bool:
        """Run the round on fixed buffers, where that can be: it then counts as verification, whole."""
        self.mark("host")
        outcomes = graphs.run(decoding, self.rule)
        if outcomes is None:
            return False
        self.mark("verify")
        for request, (proposal, verdict, sound) in zip(decoding, outcomes, strict=True):
            start = request.anchor_pos
            self._take(request, proposal, verdict, sound, in_round=True)
            graphs.keep(request, max(start, request.anchor_pos))
        return True

    def _propose(self, decoding: Sequence[Request], anchors: Rows) -> list[Proposal]:
        if not decoding:
            return []
        self.mark("host")
        tokens, budgets = [r.output[-1] for r in decoding], [self.budget(r) for r in decoding]
        proposals = self.drafter.propose(anchors, tokens, budgets, [r.noise for r in decoding])
        self.mark("draft")
        return proposals

    def _rows(
        self, decoding: Sequence[Request], proposals: Sequence[Proposal], chunks: Sequence[Chunk]
    ) -> tuple[Rows, list[int]]:
        """The packed rows of a pass, blocks first, and their ids."""
        blocks = [(r.output[-1], *proposal.tokens) for r, proposal in zip(decoding, proposals, strict=True)]
        rows = Rows.of(
            [*(r.id for r in decoding), *(c.request.id for c in chunks)],
            [*(r.anchor_pos for r in decoding), *(c.start for c in chunks)],
            [*(len(block) for block in blocks), *(len(c.tokens) for c in chunks)],
        )
        return rows, [token for piece in (*blocks, *(c.tokens for c in chunks)) for token in piece]

    @staticmethod
    def _head_rows(rows: Rows, decoding: Sequence[Request], chunks: Sequence[Chunk]) -> tuple[int, ...] | None:
        """The rows whose logits are used: all of a block, of a chunk at most the last."""
        if not chunks:
            return None
        ends = rows.offsets[len(decoding) + 1 :]
        last = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.first]
        return (*range(rows.offsets[len(decoding)]), *last)

    def _commit(self, logits: torch.Tensor, judged: Sequence[tuple[Request, Proposal]], decoding: int) -> None:
        """Decide and commit. ``logits`` [sum(drafts + 1), vocabulary]; the first ``decoding`` requests run a round."""
        if not judged:
            return
        requests, proposals = [request for request, _ in judged], [proposal for _, proposal in judged]
        targets = target_laws(logits, requests, proposals)
        verdicts = self.rule.decide(targets, proposals, [request.noise for request in requests])
        self.mark("accept")
        for i, (request, target, proposal, verdict) in enumerate(
            zip(requests, targets, proposals, verdicts, strict=True)
        ):
            run = verdict.run(proposal)[: target.sound]
            logprobs = logprobs_of(target.logits, run, request.params.logprobs)
            self._take(request, proposal, verdict, target.sound, logprobs, in_round=i < decoding)

    @staticmethod
    def _take(
        request: Request,
        proposal: Proposal,
        verdict: Verdict,
        sound: int,
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        in_round: bool,
    ) -> None:
        """Commit a verdict, of which the first ``sound`` rows can be used."""
        position = request.anchor_pos
        tokens = request.commit(verdict.run(proposal)[:sound], logprobs)
        if verdict.accepted >= sound and not request.done:  # plain decoding would come as far, and no further
            request.fail(_not_finite(request, position + sound))
        if in_round and tokens:
            outside = sum(row < len(tokens) for row in verdict.outside)
            stood = min(verdict.accepted, sound)
            request.rounds.append(Round(position, proposal.tokens, stood, tokens, outside, proposal.steps))

    def _keep(
        self,
        decoding: Sequence[Request],
        chunks: Sequence[Chunk],
        rows: Rows,
        tokens: Sequence[int],
        taps: Sequence[torch.Tensor],
    ) -> None:
        """Every cache keeps the committed entries and nothing else; the drafter takes in the new ones."""
        for request, start in zip(decoding, rows.starts, strict=False):
            self.cache.truncate(request.id, max(start, request.anchor_pos))
            self.drafter.truncate(request.id, max(start, request.anchor_pos))
        kept: list[int] = []
        going: list[tuple[int, int, int]] = []
        for request, (number, start, packed) in zip((*decoding, *(c.request for c in chunks)), rows, strict=True):
            count = min(packed.stop - packed.start, request.anchor_pos - start)
            if not request.done and count:
                going.append((number, start, count))
                kept += range(packed.start, packed.start + count)
        if not going:
            return
        if len(kept) < rows.total:
            tokens, taps = [tokens[i] for i in kept], [tap[kept] for tap in taps]
        self.mark("host")
        self.drafter.absorb(Rows.of(*zip(*going, strict=True)), tokens, taps)
        self.mark("draft")


def _not_finite(request: Request, position: int) -> CheckpointError:
    """NaN weights, or an overflow in float16, would else come out as an endless row of one token."""
    return CheckpointError(
        "the target's logits are not finite",
        where=f"request {request.id}, position {position}",
        do="use --dtype float32, or check its weights",
    )
