"""An acceptance rule decides how many drafted tokens stand, and which token of the target's own follows them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from foldspec.noise import Noise
from foldspec.records import Proposal, Verdict
from foldspec.sampling import TargetLaws

__all__ = ["AcceptanceRule"]


class AcceptanceRule(ABC):
    """``lossless`` states whether the output's law is the target's own, ``uses_q`` whether it is only if each draft
    was drawn from the law that it is held with."""

    lossless: bool
    uses_q: bool = True

    def decide(
        self, targets: Sequence[TargetLaws], proposals: Sequence[Proposal], noises: Sequence[Noise]
    ) -> list[Verdict]:
        """One verdict a request. A rule that judges many at once overrides this."""
        return [self.judge(*each) for each in zip(targets, proposals, noises, strict=True)]

    @abstractmethod
    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        """The verdict on one request's drafts. ``target.law(j)`` judges draft ``j`` of ``proposal``, and the row after
        the last accepted draft gives the next token. The token at row ``j`` has position ``target.position + j``; a
        number of ``noise`` is looked at once for each purpose and position."""

    @abstractmethod
    def law(self) -> str:
        """The law that committed tokens follow, in a phrase."""
