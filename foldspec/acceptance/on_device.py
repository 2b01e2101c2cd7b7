"""A rule that decides on the device: one call for all requests of a pass, and one look at what it found.

Its verdicts are those of the rule's own :meth:`AcceptanceRule.judge`. It stands around a rule where the target runs on
a GPU, and the rule has a case in ``kernels/verify``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from foldspec.acceptance.base import AcceptanceRule, Draft
from foldspec.acceptance.forced import Forced
from foldspec.kernels.verify import Blocks, Case, Verify
from foldspec.kernels.verify.filters import cuts
from foldspec.laws import Law
from foldspec.noise import Noise
from foldspec.records import PointMass, Proposal, Verdict
from foldspec.sampling import TargetLaws

__all__ = ["OnDevice", "blocks_of"]


class OnDevice(AcceptanceRule):
    """``rule`` has a :meth:`AcceptanceRule.case`; ``verify`` is ``Kernels.verify``."""

    def __init__(self, rule: AcceptanceRule, verify: Verify) -> None:
        case = rule.case()
        assert case is not None
        self._rule, self._verify, self._case = rule, verify, case
        self.lossless, self.uses_q = rule.lossless, rule.uses_q

    def decide(
        self, targets: Sequence[TargetLaws], proposals: Sequence[Proposal], noises: Sequence[Noise]
    ) -> list[Verdict]:
        forced = None
        if isinstance(self._rule, Forced):
            forced = [self._rule.count(t.position, noise) for t, noise in zip(targets, noises, strict=True)]
        found = self._verify(blocks_of(self._case, targets, proposals, noises, forced))
        numbers = torch.stack((found.accepted, found.token, found.sound), -1)
        verdicts = []
        for target, proposal, (accepted, token, sound, *outside) in zip(
            targets, proposals, torch.cat((numbers, found.outside), -1).tolist(), strict=True
        ):
            target.sound = sound
            followed = self._case.kind != "unverified" or not proposal.tokens
            rows = tuple(j for j, without in enumerate(outside) if without)
            verdicts.append(Verdict(accepted, token, rows, followed))
        return verdicts

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        return self.decide([target], [proposal], [noise])[0]

    def case(self) -> Case:
        return self._case

    def settled(self, position: int, noise: Noise) -> int | None:
        return self._rule.settled(position, noise)

    def law(self) -> str:
        return self._rule.law()

    def chance(self, draft: Draft) -> float | None:
        return self._rule.chance(draft)

    def spent(self, draft: Draft) -> float | None:
        return self._rule.spent(draft)


def blocks_of(
    case: Case,
    targets: Sequence[TargetLaws],
    proposals: Sequence[Proposal],
    noises: Sequence[Noise],
    forced: Sequence[int] | None = None,
) -> Blocks:
    """The blocks of a pass, on the device of its logits."""
    logits, device = targets[0].packed.logits, targets[0].logits.device
    changed = [target.changed() for target in targets]
    if any(rows is not None for rows in changed):
        logits = torch.cat([t.logits if rows is None else rows for t, rows in zip(targets, changed, strict=True)])
    drafts = [proposal.tokens for proposal in proposals]
    most = max(map(len, drafts))
    params = [target.params for target in targets]
    q, q_rows = _drawn_from(proposals, most, logits) if case.kind != "match" else (None, None)

    def whole(values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def real(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    floor = last = None
    if any(p.temperature and (p.top_k or p.top_p < 1 or p.min_p) for p in params):
        by_row = [p for p, tokens in zip(params, drafts, strict=True) for _ in range(len(tokens) + 1)]
        floor, last = cuts(
            logits,
            real([p.temperature for p in by_row]),
            whole([p.top_k for p in by_row]),
            real([p.top_p for p in by_row]),
            real([p.min_p for p in by_row]),
        )
    return Blocks(
        case,
        not any(p.temperature for p in params),
        logits,
        first=whole([target.own.start for target in targets]),
        counts=whole([len(tokens) for tokens in drafts]),
        drafts=whole([[*tokens, *[0] * (most - len(tokens))] for tokens in drafts]).view(len(targets), most),
        positions=whole([target.position for target in targets]),
        keys=whole([noise.key for noise in noises]),
        temperatures=real([p.temperature for p in params]),
        shares=case.by_draft(most, device),
        floor=floor,
        last=last,
        q=q,
        q_rows=q_rows,
        forced=None if forced is None else whole(forced),
    )


def _drawn_from(
    proposals: Sequence[Proposal], most: int, logits: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``q`` and ``q_rows`` of the drafts' laws; None where all are point masses."""
    laws: list[Law] = []
    rows = []
    for proposal in proposals:
        own = [] if isinstance(proposal, PointMass) else [proposal.law(i) for i in range(len(proposal.tokens))]
        rows.append([-1] * most)
        for i, law in enumerate(own):
            if law.token is None:
                rows[-1][i] = len(laws)
                laws.append(law)
    if not laws:
        return None, None
    dtype = torch.float64 if any(law.logits.dtype == torch.float64 for law in laws) else torch.float32
    q = torch.full((len(laws), logits.shape[-1]), -math.inf, dtype=dtype, device=logits.device)
    for row, law in zip(q, laws, strict=True):
        row[slice(len(law.logits)) if law.ids is None else law.ids] = law.logits.to(dtype)
    return q, torch.tensor(rows, dtype=torch.int64, device=logits.device)
