"""Qwen3: Llama's block with a norm over each head of q and k, after the projection and before the rotation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from foldspec.kernels.dispatch import Kernels
from foldspec.models.config import ModelConfig
from foldspec.models.llama import Extras, Llama

__all__ = ["Qwen3"]


class Qwen3(Llama):
    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> Llama:
        config.text().get("head_dim", int)  # readers disagree on what it is where it is missing
        return super().from_config(config, tensors, kernels)

    @classmethod
    def extras(cls, config: ModelConfig, tensors: Collection[str]) -> Extras:
        return replace(super().extras(config, tensors), head_norm=True)
