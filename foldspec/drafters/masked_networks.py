"""Networks of masked diffusion: language models that read a canvas of known ids and masks both ways.

Dream                Qwen2, reads everything; row i predicts the token at i + 1, as in the model it was made from
SDAR                 Qwen3, blocks of a grid; row i predicts the token at i
MaskedLlama (ours)   Llama, blocks of a grid; row i predicts the token at i; embedding and head are the target's own
                     where the file has none, and the mask's embedding is a tensor of its own
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import torch

from foldspec.drafters.base import Drafter, Host
from foldspec.drafters.masked_diffusion import MaskedNetwork
from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import LanguageModel
from foldspec.models.config import ModelConfig
from foldspec.models.layers import Matrix, parameter
from foldspec.models.llama import Llama
from foldspec.models.mask import Mask, grid
from foldspec.models.qwen2 import Qwen2
from foldspec.models.qwen3 import Qwen3
from foldspec.options import MethodOptions
from foldspec.sampling import DraftSampling
from foldspec.text.tokenizer import mask_id

__all__ = ["DreamNetwork", "GridNetwork", "MaskedLlamaNetwork", "SDARNetwork"]


class DreamNetwork(MaskedNetwork):
    shift = 1
    order = "entropy"
    efforts = MaskedNetwork.efforts | {"prefix_cache"}
    quota = "dream"

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> DreamNetwork:
        """Raises :class:`CheckpointError`."""
        config.refuse(full_attn_mask=True, use_mrope=False)
        return cls(Qwen2.from_config(config, tensors, kernels), config.where, _mask_id(config))

    def pass_rows(self, method: MethodOptions, longest: int) -> int:
        return longest + self.rows(method)

    def filled(self, method: MethodOptions) -> MethodOptions:
        return replace(super().filled(replace(method, prefix_cache=None)), prefix_cache=method.prefix_cache or "exact")

    def described(self) -> dict[str, Any]:
        return {"reads": "everything, both ways", "mask id": self.mask_id}


class GridNetwork(MaskedNetwork):
    """Reads blocks of ``block_length`` positions; None: the file does not say, an option must."""

    efforts = MaskedNetwork.efforts | {"block_length"}

    def __init__(self, language: LanguageModel, where: str, mask_id: int, block_length: int | None) -> None:
        super().__init__(language, where, mask_id)
        self.block_length = block_length

    def filled(self, method: MethodOptions) -> MethodOptions:
        block = method.block_length or self.block_length
        if block is None:
            what = f"{self.facts.where} does not say how long its blocks are"
            raise UsageError(what, where="block_length", do="give --block-length, as it was trained")
        return replace(super().filled(replace(method, block_length=None)), block_length=block)

    def mask(self, method: MethodOptions) -> Mask:
        block = method.block_length or self.block_length
        assert block is not None, "the method is filled in"
        return grid(block)

    def rows(self, method: MethodOptions) -> int:
        block = self.mask(method).block
        assert block is not None
        return super().rows(method) + block - 1  # blocks are always whole

    def described(self) -> dict[str, Any]:
        return {"block length": self.block_length, "mask id": self.mask_id}


class SDARNetwork(GridNetwork):
    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> SDARNetwork:
        """Raises :class:`CheckpointError`."""
        language = Qwen3.from_config(config, tensors, kernels)
        return cls(language, config.where, _mask_id(config), _block_length(config))


class MaskedLlamaNetwork(GridNetwork):
    language: MaskedLlama

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> MaskedLlamaNetwork:
        """Raises :class:`CheckpointError`."""
        language = MaskedLlama.from_config(config, tensors, kernels)
        network = cls(language, config.where, language.mask_id, _block_length(config))
        inside = language.mask_id if language.mask_id < language.vocabulary else None
        network.facts = replace(network.facts, mask_id=inside)
        if language.borrows:  # then what it was made from must be what it borrows from
            layers = config.whole("num_target_layers") if config.has("num_target_layers") else None
            network.facts = replace(network.facts, width=language.width, padding=0, target_layers=layers)
        return network

    def bind(self, host: Host, caches: Any, method: MethodOptions, sampling: DraftSampling) -> Drafter:
        self.language.borrow(host.model)
        return super().bind(host, caches, method, sampling)


class MaskedLlama(Llama):
    """Llama with a mask's embedding of its own, where the file has one, and with the target's tables, where the file
    has none: then it ``borrows``."""

    mask_id = -1
    borrows = False
    _lender: tuple[LanguageModel, ...] = ()  # a tuple, so that its weights are not counted as these

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> MaskedLlama:
        """Raises :class:`CheckpointError`."""
        made = super().from_config(config, tensors, kernels)
        assert isinstance(made, MaskedLlama)
        made.borrows = "model.embed_tokens.weight" not in tensors
        if made.borrows and "lm_head.weight" in tensors:
            raise config.error("the file has a head and no embedding", do="both are needed, or neither")
        own = "model.mask_embedding" in tensors
        made.mask_id = config.whole("mask_token_id", low=0) if own else _mask_id(config)
        made.model.register_parameter("mask_embedding", parameter(made.width) if own else None)
        if made.borrows:
            made.lm_head = None
            del made.model.embed_tokens
        return made

    def borrow(self, target: LanguageModel) -> None:
        """Take the tables of the target where there are none."""
        self._lender = (target,) if self.borrows else ()

    @property
    def head_matrix(self) -> Matrix:
        return self._lender[0].head_matrix if self._lender else super().head_matrix

    @property
    def bytes_read(self) -> int:
        return super().bytes_read + (self.head_weight.nbytes if self._lender else 0)

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        own = cast(torch.Tensor | None, self.model.mask_embedding)
        masked = ids == self.mask_id
        known = ids if own is None else ids.where(~masked, 0)  # the mask may be no id of the table
        rows = self._lender[0].embed(known, 1.0) if self._lender else super().embed(known, scale)
        if own is not None:
            rows[masked] = own
        return rows


def _mask_id(config: ModelConfig) -> int:
    """``mask_token_id``, or what the tokenizer beside the config says. Raises :class:`CheckpointError`."""
    found = mask_id(config.folder) if config.folder is not None and not config.has("mask_token_id") else None
    if found is None:
        found = config.whole("mask_token_id", low=0)
    vocabulary = config.whole("vocab_size")
    if found >= vocabulary:
        raise config.error(f"its mask id {found} is outside its {vocabulary} ids")
    return found


def _block_length(config: ModelConfig) -> int | None:
    """SDAR's files say ``block_size``, that of their training."""
    key = next((key for key in ("block_length", "block_size") if config.has(key)), None)
    return None if key is None else config.whole(key)
