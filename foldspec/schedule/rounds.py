"""The round loop: one draft, one verification, one commit, one truncate, for any number of requests at once.

Nothing here knows which drafter, which reading of the context or which rule is at work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foldspec.acceptance.base import AcceptanceRule
from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter
from foldspec.logprobs import logprobs_of
from foldspec.models.base import ForwardPlan, LanguageModel
from foldspec.records import Round
from foldspec.sampling import target_laws
from foldspec.schedule.request import Request
from foldspec.schedule.trace import Mark, unmarked

__all__ = ["Rounds"]


class Rounds:
    """A target, its cache, a drafter and a rule at work. ``draft_tokens`` caps the drafts that are verified a round.

    ``mark`` hears of the end of each part of a round (``schedule/trace.py``).
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
        self._device = device
        self._max_drafts = drafter.max_drafts if draft_tokens is None else min(draft_tokens, drafter.max_drafts)

    @torch.inference_mode()
    def round(self, requests: Sequence[Request]) -> list[Round]:
        """Advance each request, none of them done, by at least one token."""
        ids = [r.id for r in requests]
        starts = [r.anchor_pos for r in requests]
        anchors = [r.output[-1] for r in requests]
        budgets = [max(0, min(self._max_drafts, r.draft_budget)) for r in requests]
        rows = Rows.of(ids, starts, [1] * len(ids))
        self.mark("host")
        noises = [r.noise for r in requests]
        proposals = self.drafter.propose(rows, anchors, budgets, noises)
        self.mark("draft")

        blocks = [(anchor, *proposal.tokens) for anchor, proposal in zip(anchors, proposals, strict=True)]
        rows = Rows.of(ids, starts, [len(block) for block in blocks])
        tokens = [token for block in blocks for token in block]
        ids_of_rows = torch.tensor(tokens, device=self._device)
        self.mark("host")
        output = self.model(ids_of_rows, ForwardPlan(rows, self.drafter.taps), self.cache)
        self.mark("verify")
        targets = target_laws(output.logits, requests, proposals)
        for target in targets:
            if target.error is not None:
                raise target.error
        verdicts = self.rule.decide(targets, proposals, noises)
        self.mark("accept")

        rounds = []
        for request, own, proposal, verdict in zip(requests, rows, proposals, verdicts, strict=True):
            position = request.anchor_pos
            run = (*proposal.tokens[: verdict.accepted], verdict.next_token)
            committed = request.commit(run, logprobs_of(output.logits[own[2]], run, request.params.logprobs))
            rounds.append(Round(position, proposal.tokens, verdict.accepted, committed))
            request.rounds.append(rounds[-1])
        self._keep(requests, rows, tokens, output.taps)
        return rounds

    def _keep(
        self, requests: Sequence[Request], rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]
    ) -> None:
        """Every cache keeps the committed entries and nothing else; the drafter takes in the new ones."""
        for request in requests:
            self.cache.truncate(request.id, request.anchor_pos)
            self.drafter.truncate(request.id, request.anchor_pos)
        going = [(r, start, packed) for r, (_, start, packed) in zip(requests, rows, strict=True) if not r.done]
        if not going:
            return
        kept = [packed.start + i for r, start, packed in going for i in range(r.anchor_pos - start)]
        new = Rows.of(
            [r.id for r, _, _ in going],
            [start for _, start, _ in going],
            [r.anchor_pos - start for r, start, _ in going],
        )
        if len(kept) < rows.total:
            tokens, taps = [tokens[i] for i in kept], [tap[kept] for tap in taps]
        self.mark("host")
        self.drafter.absorb(new, tokens, taps)
        self.mark("draft")
