"""``fold_auto``: FOLD whose far read is as sharp as acceptance shows to pay, or left out (beyond the paper, whose
Limitations leave W and alpha fixed).

The arms are ``auto_alphas``: sharpnesses of the far read, 0 for none, which is ``window``. A round's reward is the
tokens that it committed over its cost, 1 without a far read; with one, the bytes that it adds are added as a share of
all that a round reads otherwise. That is a model (memory alone, a request by itself), not a time, so that a seed gives
the same text again. After a round the request goes on with the arm that has the largest

    mean_i + C m sqrt(log(1 + N) / (N_i + M))            mean_i = (S_i + M m) / (N_i + M)

``N_i`` and ``S_i`` are rounds and rewards of an arm, each round counting DISCOUNT times as much as the one after it;
``N = sum N_i``, ``m = sum S_i / N``: a discounted UCB (Garivier and Moulines 2011) whose arms begin with M rounds of
the common mean. The spread of a round's tokens is taken to be about m, as in drafts that each stand with one chance.
Ties go to the arm named first. Nothing is chosen, or counted, while the context fits the window.

Any choice gives the target's output: it hangs on earlier rounds alone, and the rule accepts whatever draft it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foldspec.context.base import Attended, DrafterLayer, Opened
from foldspec.context.fold import Fold
from foldspec.options import MethodOptions

# Chosen on made-up streams of 24 to 400 rounds (arms alike, one better by 0.3 tokens, one ruinous), before any request.
C, M, DISCOUNT = 0.35, 4.0, 0.99


@dataclass
class _Record:
    """``arm`` is what the next round reads with; ``rounds`` and ``rewards`` of each arm, discounted."""

    share: Callable[[int, int], float]
    rounds: list[float]
    rewards: list[float]
    arm: int = 0


class FoldAuto(Fold):
    uses = frozenset({"window", "layer_window", "auto_alphas", "coverage", "far_boundary"})
    not_fixed = "its alpha is chosen anew between rounds"

    def __init__(self, options: MethodOptions, layers: Sequence[DrafterLayer], block: int) -> None:
        super().__init__(options, layers, block)
        self._boundaries = [self._boundary(i) for i in range(len(layers)) if self.covers(i)]

    def begin(self, request: Opened) -> _Record:
        arms = len(self.options.auto_alphas)
        return _Record(request.share, [0.0] * arms, [0.0] * arms)

    def sharpness(self, layer: int, state: _Record) -> float | None:
        return self.options.auto_alphas[state.arm] or None

    def cost(self, state: _Record, n: int) -> float:
        """Of a round after ``n`` entries, as it is read now; 1 where no far entry is."""
        return 1.0 + (state.share(n, self._far(n)) if self.options.auto_alphas[state.arm] else 0.0)

    def _far(self, n: int) -> int:
        """Far entries of all layers together."""
        return sum(max(0, min(n, n + self.block - boundary)) for boundary in self._boundaries)

    def committed(self, state: _Record, before: int, n: int, attended: Attended) -> None:
        if not self._far(before):
            return
        cost = self.cost(state, before)
        for sums in (state.rounds, state.rewards):
            sums[:] = [DISCOUNT * value for value in sums]
        state.rounds[state.arm] += 1
        state.rewards[state.arm] += (n - before) / cost
        indices = self._indices(state)
        state.arm = indices.index(max(indices))

    @staticmethod
    def _indices(state: _Record) -> list[float]:
        total = sum(state.rounds)
        mean, wide = sum(state.rewards) / total, math.log1p(total)
        return [
            (reward + M * mean) / (count + M) + C * mean * math.sqrt(wide / (count + M))
            for count, reward in zip(state.rounds, state.rewards, strict=True)
        ]
