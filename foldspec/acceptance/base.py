"""An acceptance rule decides how many drafted tokens stand, and which token of the target's own follows them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from foldspec.noise import Noise
from foldspec.records import Proposal, Verdict
from foldspec.sampling import TargetLaws

__all__ = ["AcceptanceRule"]


class AcceptanceRule(ABC):
    """``lossless`` states whether the output's law is the target's own."""

    lossless: bool

    @abstractmethod
    def decide(
        self, targets: Sequence[TargetLaws], proposals: Sequence[Proposal], noises: Sequence[Noise]
    ) -> list[Verdict]:
        """One verdict a request. ``targets[i].law(j)`` judges draft ``j`` of ``proposals[i]``, and the row after the
        last accepted draft gives the next token. The token at row ``j`` has position ``targets[i].position + j``; a
        number of ``noises[i]`` is looked at once for each purpose and position."""

    @abstractmethod
    def law(self) -> str:
        """The law that committed tokens follow, in a phrase."""
