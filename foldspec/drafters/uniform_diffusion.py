"""Uniform diffusion as a drafter: DiffusionGemma encodes what is committed and denoises a canvas after the anchor.

    what the last round has committed, and the anchor -> encoder, one pass, stored
    canvas of random ids at n+1 .. n+B;  K times: logits = decoder(canvas), one step of the sampler
    the drafts are what the last step draws, each from its law there

A canvas is as long as a draft, whatever the network was trained with. Nothing of it is stored, and what its steps hand
to one another ends with the round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters.base import Drafter, Host
from foldspec.drafters.denoise_uniform import Annealed
from foldspec.drafters.language import LanguageDrafter, LanguageNetwork
from foldspec.kernels.dispatch import Kernels
from foldspec.models.config import ModelConfig
from foldspec.models.diffusion_gemma import DiffusionGemma
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.records import PointMass, Proposal
from foldspec.sampling import DraftSampling

__all__ = ["UniformDiffusion", "UniformNetwork"]


class UniformNetwork(LanguageNetwork):
    language: DiffusionGemma
    efforts = frozenset({"steps", "entropy_bound"})
    no_effort = "every step of uniform diffusion draws all places anew"

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> UniformNetwork:
        """Raises :class:`CheckpointError`."""
        return cls(DiffusionGemma.from_config(config, tensors, kernels), config.where)

    def described(self) -> dict[str, Any]:
        return {"canvas": self.language.canvas, "experts": str(self.language.mixture)}

    def bind(self, host: Host, caches: PagedCache, method: MethodOptions, sampling: DraftSampling) -> Drafter:
        return UniformDiffusion(self.language, caches, host, method.draft_tokens or 0, sampling)


class UniformDiffusion(LanguageDrafter):
    """Drafts are drawn by ``sampling`` from the laws of the last step, or the likeliest ids of it."""

    def __init__(
        self, model: DiffusionGemma, cache: PagedCache, host: Host, max_drafts: int, sampling: DraftSampling
    ) -> None:
        super().__init__(model, cache, host, max_drafts)
        self._denoiser, self._sampling = model, sampling
        self._steps = sampling.effort.steps or 1

    def bytes_read(self, n: int) -> int:
        passes = (1, *(self.max_drafts for _ in range(self._steps)))
        return sum(self._denoiser.bytes_of(rows) + self.cache.spec.bytes_read(n) for rows in passes)

    def truncate(self, request: int, length: int) -> None:
        if length < self.encoded(request):
            super().truncate(request, length)
        else:
            del self._ids[request][length:]

    def encoded(self, request: int) -> int:
        """Of the entries that it holds, those that have been through the encoder: the last few wait for the anchor."""
        return self.cache.tables.length(request)

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        """What a round commits is encoded with the anchor of the next: one pass a round. A prompt is encoded now."""
        long: dict[int, Sequence[int]] = {}
        for request, _, ids in self.lacking(rows, tokens):
            if self.held(request) - self.encoded(request) + len(ids) > self.max_drafts:
                long[request] = ids
            else:
                self._ids[request] += ids
        self._encode([request for request in long if self.encoded(request) < self.held(request)])
        self._encode(list(long), list(long.values()))

    def _encode(self, requests: Sequence[int], more: Sequence[Sequence[int]] = ()) -> None:
        """One pass over what waits of each request, and ids after it."""
        if not requests:
            return
        starts = [self.encoded(request) for request in requests]
        waiting = [self._ids[request][start:] for request, start in zip(requests, starts, strict=True)]
        pieces = [[*own, *(more[i] if more else ())] for i, own in enumerate(waiting)]
        rows = Rows.of(requests, starts, [len(piece) for piece in pieces])
        self.run(rows, [token for piece in pieces for token in piece], head_rows=())
        for request, start, own in zip(requests, starts, waiting, strict=True):
            del self._ids[request][start : start + len(own)]  # they have come once more, with the others

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        # a canvas ends where the network's positions do
        lengths = [min(self.max_drafts, self.model.max_positions - n - 1) for n in anchors.starts]
        asked = [i for i, budget in enumerate(budgets) if min(budget, lengths[i]) > 0]
        drafts: list[Proposal] = [PointMass(()) for _ in tokens]
        if not asked:
            return drafts
        requests, starts = [anchors.requests[i] for i in asked], [anchors.starts[i] for i in asked]
        self._encode(requests, [[tokens[i]] for i in asked])
        blocks = [
            Annealed(self._sampling.effort, self._sampling, noises[i], n, lengths[i], self.vocabulary)
            for i, n in zip(asked, starts, strict=True)
        ]
        self._denoise(requests, [n + 1 for n in starts], blocks)
        for i, block in zip(asked, blocks, strict=True):
            block.proposal.cut(budgets[i])
            drafts[i] = block.proposal
        return drafts

    def _denoise(self, requests: Sequence[int], starts: Sequence[int], blocks: Sequence[Annealed]) -> None:
        """Step by step, all that are not done in one pass. Blocks begin together, so either all or none of those in a
        pass have been through one before."""
        before: torch.Tensor | None = None
        going = list(range(len(blocks)))
        while going:
            canvases = [blocks[i].canvas for i in going]
            rows = Rows.of([requests[i] for i in going], [starts[i] for i in going], [len(c) for c in canvases])
            ids = torch.tensor([i for canvas in canvases for i in canvas], device=self._device)
            logits = self._denoiser.denoise(ids, rows, self.cache, before)[:, : self.vocabulary]
            for i, (_, _, packed) in zip(going, rows, strict=True):
                blocks[i].step(logits[packed], self.support)
            going = [i for i in going if not blocks[i].done]
            said = [blocks[i].processed for i in going]
            before = self._padded(torch.cat([each for each in said if each is not None])) if going else None

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the ids that can be drafted [n, ids] -> those of all of the network's, the others barred."""
        return F.pad(logits, (0, self.model.vocabulary - logits.shape[1]), value=-torch.inf)
