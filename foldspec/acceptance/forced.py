"""As many drafts stand as was decided beforehand, whatever the target says of them: for timing alone.

Not among the rules that have a name, since what it commits follows no law worth the name: ``--force-accept`` asks for
it. The target's pass and its own token after the drafts are computed as ever.
"""

from __future__ import annotations

import math

from foldspec.acceptance.base import AcceptanceRule
from foldspec.forcing import Forcing
from foldspec.kernels.verify import Case
from foldspec.noise import Noise, Purpose
from foldspec.records import Proposal, Verdict
from foldspec.sampling import TargetLaws


class Forced(AcceptanceRule):
    lossless = False

    def __init__(self, forcing: Forcing) -> None:
        self._forcing = forcing

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        accepted = min(self.count(target.position, noise), len(proposal.tokens))
        return Verdict(accepted, noise.draw(target.law(accepted), Purpose.TARGET, target.position + accepted))

    def case(self) -> Case:
        return Case("forced")

    def settled(self, position: int, noise: Noise) -> int:
        return self.count(position, noise)

    def count(self, position: int, noise: Noise) -> int:
        """Drafts that stand where the first of them has this position."""
        forcing = self._forcing
        if forcing.count is not None:
            return forcing.count
        if forcing.mean is not None:
            return _next(position, forcing.mean, noise.uniform(Purpose.ACCEPT, 0)) - position
        count = 0
        while count < MOST:
            chance = forcing.chances[min(count, len(forcing.chances) - 1)]
            if not noise.uniform(Purpose.ACCEPT, position + count) < chance:
                break
            count += 1
        return count

    def law(self) -> str:
        return "none: how many drafts stand was decided beforehand"


MOST = 1024  # more than any round drafts


def _next(position: int, mean: float, phase: float) -> int:
    """Rounds end behind the positions ``floor(mean * (i + phase))``, so that after many of them exactly the mean comes
    out. The end of the round whose first token has this ``position``: the first of those at or behind it."""
    i = int(position / mean) - 2  # two back: rounding may have gone up
    while (end := math.floor(mean * (i + phase))) < position:
        i += 1
    return end
