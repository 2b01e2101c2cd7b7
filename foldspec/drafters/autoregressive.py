"""A smaller language model of the same vocabulary as drafter: it decodes a few tokens of its own after the anchor.

Each draft is one row through the model, after the drafts before it: what it was drawn from is its law given those,
which is exact. The last draft of a proposal is not stored: nobody reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter, Host
from foldspec.drafters.language import LanguageDrafter, LanguageNetwork
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import LanguageModel, model_class
from foldspec.models.config import ModelConfig
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.records import PointMass, Proposal
from foldspec.sampling import DraftSampling, greedy

__all__ = ["Autoregressive", "AutoregressiveNetwork"]


class AutoregressiveNetwork(LanguageNetwork):
    """Any target model, as it is."""

    no_effort = "the drafter decodes token by token: its effort is draft_tokens"

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> AutoregressiveNetwork:
        """Raises :class:`CheckpointError`."""
        return cls(model_class(config).from_config(config, tensors, kernels), config.where)

    def bind(self, host: Host, caches: PagedCache, method: MethodOptions, sampling: DraftSampling) -> Drafter:
        return Autoregressive(self.language, caches, host, method.draft_tokens or 0, sampling)


class Autoregressive(LanguageDrafter):
    """Drafts are the model's argmax, or drawn from its law by ``sampling``."""

    def __init__(
        self, model: LanguageModel, cache: PagedCache, host: Host, max_drafts: int, sampling: DraftSampling
    ) -> None:
        super().__init__(model, cache, host, max_drafts)
        self._sampling = sampling

    def bytes_read(self, n: int) -> int:
        return sum(self.pass_bytes(n + i) for i in range(self.max_drafts))

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        # a row of the model beyond its last position is none that it was made for
        most = [self.model.max_positions - start for start in anchors.starts]
        budgets = [max(0, min(pair)) for pair in zip(budgets, most, strict=True)]
        drawn = [self._sampling.begin(noise, n) for noise, n in zip(noises, anchors.starts, strict=True)]
        drafts: list[list[int]] = [[] for _ in tokens]
        last = list(tokens)
        with self.drafting([request for request, budget in zip(anchors.requests, budgets, strict=True) if budget > 0]):
            for step in range(max(budgets, default=0)):
                going = [i for i, budget in enumerate(budgets) if budget > step]
                requests, starts = [anchors.requests[i] for i in going], [anchors.starts[i] + step for i in going]
                logits = self.run(Rows.of(requests, starts, [1] * len(going)), [last[i] for i in going])
                logits = logits[:, : self.vocabulary]
                if self._sampling.temperature:
                    chosen = [
                        drawn[i].draw(self._sampling.law(row, self.support))
                        for i, row in zip(going, logits, strict=True)
                    ]
                else:
                    chosen = greedy(logits)
                for i, token in zip(going, chosen, strict=True):
                    last[i] = token
                    drafts[i].append(token)
        if self._sampling.temperature:
            return list(drawn)
        return [PointMass(tuple(own)) for own in drafts]
