"""DSpark's heads (DeepSpec): what a drafted token says of the next one, and how far a block is worth verifying.

With ``y_k`` row k of the block after the last norm, ``prev`` the token before the one that it drafts (the anchor, then
draft after draft) and ``e = W1[prev]``, the Markov head adds to the row's logits

    vanilla   W2 e
    gated     W2 (sigmoid(G [y_k; e]) e)
    rnn       W2 tanh(o),  (g, c, o) = J [s; e; y_k],  s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  s = 0 at first

and the confidence head says with ``sigmoid(w [y_k; e] + b)`` how likely draft k is to stand if those before it do. That
looks at nothing drafted from row k on, so a block may be cut there without a trace in the output's law. All in fp32.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from foldspec.kernels.dispatch import Kernels
from foldspec.models.config import ModelConfig
from foldspec.models.layers import Embedding, Linear

__all__ = ["Chain", "ConfidenceHead", "HeadsConfig", "MarkovHead", "markov_head"]


@dataclass(frozen=True)
class HeadsConfig:
    """``rank`` of the Markov head, 0 without one, and its ``kind``; whether there is a ``confidence`` head, and whether
    it reads e as well (``with_markov``)."""

    rank: int = 0
    kind: str = "vanilla"
    confidence: bool = False
    with_markov: bool = False

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str]) -> HeadsConfig:
        """``tensors`` are the names in the checkpoint: a head stands in the config and in the file, or in neither.
        Raises :class:`CheckpointError`."""
        rank, kind = config.whole("markov_rank", 0, low=0), config.get("markov_head_type", str, "vanilla")
        confidence = config.flag("enable_confidence_head")
        if bool(rank) != any(name.startswith("markov_head.") for name in tensors):
            raise config.error("markov_rank and the markov_head tensors do not agree")
        if rank and kind not in KINDS:
            raise config.error(f"a Markov head of type {kind!r} is not supported", do=f"known: {', '.join(KINDS)}")
        if confidence != any(name.startswith("confidence_head.") for name in tensors):
            raise config.error("enable_confidence_head and the confidence_head tensors do not agree")
        if confidence and not config.has("confidence_head_with_markov"):
            raise config.error("confidence_head_with_markov is missing")
        with_markov = confidence and config.flag("confidence_head_with_markov")
        if with_markov and not rank:
            raise config.error("confidence_head_with_markov is true, but there is no Markov head")
        return cls(rank, kind, confidence, with_markov)


class MarkovHead(nn.Module):
    """The vanilla head."""

    def __init__(self, rank: int, width: int, vocabulary: int, draft_ids: int, kernels: Kernels) -> None:
        super().__init__()
        self.markov_w1 = Embedding(vocabulary, rank, kernels)
        self.markov_w2 = Linear(rank, draft_ids, kernels)

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """Ids [n] of the target -> e [n, rank]."""
        return self.markov_w1(previous).to(torch.float32)

    def forward(
        self, e: torch.Tensor, y: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """e [n, rank], y [n, width] -> what is added to the logits [n, draft ids], and the state for the next row."""
        return self.markov_w2(e), None


class GatedHead(MarkovHead):
    def __init__(self, rank: int, width: int, vocabulary: int, draft_ids: int, kernels: Kernels) -> None:
        super().__init__(rank, width, vocabulary, draft_ids, kernels)
        self.gate_proj = Linear(width + rank, rank, kernels, bias=True)

    def forward(
        self, e: torch.Tensor, y: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.markov_w2(self.gate_proj(torch.cat((y, e), -1)).sigmoid() * e), None


class RecurrentHead(MarkovHead):
    def __init__(self, rank: int, width: int, vocabulary: int, draft_ids: int, kernels: Kernels) -> None:
        super().__init__(rank, width, vocabulary, draft_ids, kernels)
        self.joint_proj = Linear(2 * rank + width, 3 * rank, kernels, bias=True)

    def forward(
        self, e: torch.Tensor, y: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        before = torch.zeros_like(e) if state is None else state
        gate, candidate, out = self.joint_proj(torch.cat((before, e, y), -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return self.markov_w2(out.tanh()), gate * before + (1 - gate) * candidate.tanh()


KINDS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RecurrentHead}


def markov_head(config: HeadsConfig, width: int, vocabulary: int, draft_ids: int, kernels: Kernels) -> MarkovHead:
    return KINDS[config.kind](config.rank, width, vocabulary, draft_ids, kernels)


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, device="meta").requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, width] -> probabilities [n]."""
        return ((x * self.proj.weight.float()).sum(-1) + self.proj.bias.float()).sigmoid()


class Chain:
    """The rows of one block a request, taken from left to right, each given the token before it.

    ``y`` [requests, rows, width], ``logits`` [requests, rows, draft ids] without what the Markov head adds.
    """

    def __init__(
        self,
        markov: MarkovHead | None,
        confidence: ConfidenceHead | None,
        with_markov: bool,
        y: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        self._markov, self._confidence, self._with_markov = markov, confidence, with_markov
        self._y, self.logits = y, logits
        self._state: torch.Tensor | None = None
        self._row = 0

    def next(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next row after the ids ``previous`` [requests] of the target: its logits [requests, draft ids], and how
        likely its draft is to stand [requests], if the drafter says so."""
        row, self._row = self._row, self._row + 1
        y, logits, e = self._y[:, row].to(torch.float32), self.logits[:, row], None
        if self._markov is not None:
            e = self._markov.embed(previous)
            added, self._state = self._markov(e, y, self._state)
            logits = logits + added
        if self._confidence is None:
            return logits, None
        return logits, self._confidence(torch.cat((y, e), -1) if e is not None and self._with_markov else y)
