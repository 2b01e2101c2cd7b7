"""An acceptance rule decides how many drafted tokens stand, and which token of the target's own follows them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from foldspec.records import Proposal, Verdict

__all__ = ["AcceptanceRule"]


class AcceptanceRule(ABC):
    """``lossless`` states whether the output's law is the target's own."""

    lossless: bool

    @abstractmethod
    def decide(self, logits: torch.Tensor, proposals: Sequence[Proposal]) -> list[Verdict]:
        """One verdict a proposal.

        ``logits`` [sum(drafts + 1), vocabulary]: for each request the target's rows for its anchor and its drafts, in
        order; row ``i`` judges draft ``i``, and the row after the last accepted draft gives the next token.
        """

    @abstractmethod
    def law(self) -> str:
        """The law that committed tokens follow, in a phrase."""
