"""What every target model offers, and where its class is found from config.json."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import torch
from torch import nn

from foldspec.cache.paged import PagedCache, TargetSpec
from foldspec.cache.rows import Rows
from foldspec.kernels.dispatch import Kernels
from foldspec.models.config import ModelConfig
from foldspec.models.layers import Matrix
from foldspec.models.mask import CAUSAL, Mask

__all__ = ["ForwardOutput", "ForwardPlan", "LanguageModel", "model_class"]

# architecture -> "module:class"; imported when it is asked for
ARCHITECTURES = {
    "Gemma4ForCausalLM": "foldspec.models.gemma4:Gemma4",
    "Gemma4ForConditionalGeneration": "foldspec.models.gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "foldspec.models.gemma4:Gemma4",
    "Gemma4UnifiedForConditionalGeneration": "foldspec.models.gemma4:Gemma4",
    "LlamaForCausalLM": "foldspec.models.llama:Llama",
    "Qwen2ForCausalLM": "foldspec.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "foldspec.models.qwen3:Qwen3",
    "Qwen3_5ForCausalLM": "foldspec.models.qwen3_5:Qwen3_5",
    "Qwen3_5ForConditionalGeneration": "foldspec.models.qwen3_5:Qwen3_5",
}


@dataclass(frozen=True)
class ForwardPlan:
    """One forward over packed rows, stored in the cache: what is not to stay there is truncated away after it.

    ``taps``       layer indices whose raw outputs are wanted (residual stream after the layer)
    ``head_rows``  packed rows whose logits are wanted; None for all
    ``mask``       which entries each row reads; recurrent layers know :data:`CAUSAL` alone
    """

    rows: Rows
    taps: tuple[int, ...] = ()
    head_rows: tuple[int, ...] | None = None
    mask: Mask = CAUSAL


@dataclass(frozen=True)
class ForwardOutput:
    """``logits`` [head rows, vocabulary] fp32 or better; ``taps`` one [total, width] for each tapped layer."""

    logits: torch.Tensor
    taps: tuple[torch.Tensor, ...]


class LanguageModel(nn.Module, ABC):
    """A target: built on the meta device from its config, then filled with a checkpoint's tensors by name.

    ``renamed``  beginnings of names in checkpoints, and what parameters have in their place
    ``ignored``  beginnings of names that belong to other parts than the language model
    """

    renamed: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    vocabulary: int
    width: int
    layer_count: int
    max_positions: int

    @classmethod
    @abstractmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> LanguageModel:
        """``tensors`` are the names in the checkpoint: some parts exist by presence.

        Raises :class:`CheckpointError` for a missing value or one that is not supported.
        """

    @abstractmethod
    def cache_spec(self, dtype: torch.dtype) -> TargetSpec:
        """The pools that this model's keys and values need."""

    @abstractmethod
    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """ids [n] -> embedding rows [n, width]; ``scale`` multiplies them in place of the model's own, if it has one
        (rounded to their dtype)."""

    @abstractmethod
    def head(self, x: torch.Tensor, matrix: Matrix | None = None, softcap: float | None = None) -> torch.Tensor:
        """Normed rows [n, width] -> logits [n, vocabulary] in fp32 or better. ``matrix``, a part of
        :attr:`head_matrix`, restricts the vocabulary to its rows. ``softcap`` bounds logits in place of the model's
        own bound, if it has one: ``softcap * tanh(logits / softcap)``."""

    @property
    @abstractmethod
    def head_matrix(self) -> Matrix:
        """[vocabulary, width]; the embedding table where the two are tied."""

    @property
    def head_weight(self) -> torch.Tensor:
        """The tensor of :attr:`head_matrix`, as it is held: perhaps packed."""
        return self.head_matrix.weight

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that a forward reads, each once. Embedding tables count where they are the head as well."""
        head = self.head_weight
        return sum(p.nbytes for name, p in self.named_parameters() if p is head or "embed_tokens" not in name)

    @abstractmethod
    def forward(self, ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> ForwardOutput:
        """ids [total] of the plan's rows. Stores their keys and values in the cache and counts them in."""

    @classmethod
    def parameter_name(cls, tensor: str) -> str | None:
        """The parameter that a checkpoint's tensor fills; None for one that is ignored by rule."""
        # old exports carry the rotary frequencies, which follow from the config
        if tensor.startswith(cls.ignored) or tensor.endswith("rotary_emb.inv_freq"):
            return None
        for begin, other in cls.renamed.items():
            if tensor.startswith(begin):
                return other + tensor.removeprefix(begin)
        return tensor


def model_class(config: ModelConfig) -> type[LanguageModel]:
    """Raises :class:`CheckpointError` for an architecture that foldspec does not know."""
    name = config.architecture
    if name not in ARCHITECTURES:
        raise config.error(f"unknown target architecture {name!r}", do=f"known: {', '.join(sorted(ARCHITECTURES))}")
    module, _, attribute = ARCHITECTURES[name].partition(":")
    found: type[LanguageModel] = getattr(import_module(module), attribute)
    return found
