"""A rule that is listened to: the same verdicts, and what target and drafter thought of every draft that was judged.

It costs a look at both laws in full at each of these positions, so it stands around a rule only where a measurement
asked for it (``Engine.record``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from foldspec.acceptance.base import AcceptanceRule, Draft
from foldspec.laws import Law
from foldspec.noise import Noise
from foldspec.records import PointMass, Proposal, Verdict
from foldspec.sampling import TargetLaws

__all__ = ["Judged", "Recorded"]


@dataclass(frozen=True)
class Judged:
    """The drafts of one request's round. ``position``: of the first.
    ``tv``, ``chance`` and ``spent`` have one for each draft that was judged: those that stood and the first that fell.

    ``tv``      total variation of the target's law and the drafter's, both as the verification used them
    ``chance``  how likely the draft was to stand, known its token
    ``spent``   total variation of the target's law and that of the token that comes there under the rule, over all that
                might have been drafted; None (both): the rule cannot say
    """

    position: int
    drafted: int
    accepted: int
    tv: tuple[float, ...]
    chance: tuple[float | None, ...]
    spent: tuple[float | None, ...]


class Recorded(AcceptanceRule):
    """``hear`` is told of every round with drafts."""

    def __init__(self, rule: AcceptanceRule, hear: Callable[[Judged], None]) -> None:
        self._rule, self._hear = rule, hear
        self.lossless, self.uses_q = rule.lossless, rule.uses_q

    def decide(
        self, targets: Sequence[TargetLaws], proposals: Sequence[Proposal], noises: Sequence[Noise]
    ) -> list[Verdict]:
        verdicts = self._rule.decide(targets, proposals, noises)
        for each in zip(targets, proposals, verdicts, strict=True):
            self._tell(*each)
        return verdicts

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        return self.decide([target], [proposal], [noise])[0]

    def law(self) -> str:
        return self._rule.law()

    def _tell(self, target: TargetLaws, proposal: Proposal, verdict: Verdict) -> None:
        tokens = proposal.tokens
        if not tokens:
            return
        tv, chance, spent = [], [], []
        for i in range(min(len(tokens), verdict.accepted + 1, target.sound)):
            q = Law.point(tokens[i]) if isinstance(proposal, PointMass) else proposal.law(i)
            draft = Draft(i, tokens[i], target.law(i), q, partial(target.raw, i))
            tv.append(draft.p.tv(q))
            chance.append(self._rule.chance(draft))
            spent.append(self._rule.spent(draft))
        self._hear(Judged(target.position, len(tokens), verdict.accepted, tuple(tv), tuple(chance), tuple(spent)))
