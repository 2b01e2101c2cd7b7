"""An acceptance rule decides how many drafted tokens stand, and which token of the target's own follows them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foldspec.kernels.verify import Case
from foldspec.laws import Law
from foldspec.noise import Noise
from foldspec.records import Proposal, Verdict
from foldspec.sampling import TargetLaws

__all__ = ["AcceptanceRule", "Draft"]


@dataclass(frozen=True)
class Draft:
    """One drafted token as a rule sees it. ``row``: which of the block's drafts, from 0; ``p`` the target's law there,
    a point mass at temperature 0, for which ``raw`` makes the one at temperature 1; ``q`` what it was drawn from."""

    row: int
    token: int
    p: Law
    q: Law
    raw: Callable[[], Law]


class AcceptanceRule(ABC):
    """``lossless`` states whether the output's law is the target's own, ``uses_q`` whether what it says of
    its law takes each draft to follow the law that the draft is held with."""

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

    def settled(self, position: int, noise: Noise) -> int | None:
        """How many drafts stand of those from ``position`` on, where that was decided beforehand."""
        return None

    @abstractmethod
    def law(self) -> str:
        """The law that committed tokens follow, in a phrase."""

    def case(self) -> Case | None:
        """The rule as ``kernels/verify`` decides it for a whole batch on a GPU, the same way as :meth:`judge`; None: it
        knows no such rule, and each request is judged by itself."""
        return None

    # What measurements ask of a rule; a rule need not say either.

    def chance(self, draft: Draft) -> float | None:
        """The probability that the draft stands, if those before it do, known its token."""
        return None

    def spent(self, draft: Draft) -> float | None:
        """The total variation between the target's law and that of the token that comes at the draft's position, over
        all that might have been drafted there: what leniency costs."""
        return 0.0 if self.lossless else None
