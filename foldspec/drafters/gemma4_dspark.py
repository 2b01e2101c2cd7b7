"""DeepSpec's drafters on the backbone of Gemma 4: DFlash's block and context with another layer, and DSpark's heads.

All layers are full ones of Gemma 4 (``models/gemma4.py``): values are the raw keys, normed without a weight (both are
kept), logits of attention are not scaled, norms stand before and after each half, and a scalar ends the layer. RoPE
turns a part of each head. The file's own embedding is multiplied by sqrt(width), its logits are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from foldspec.drafters.dflash import DFlashConfig, DFlashNetwork
from foldspec.drafters.dspark import HeadsConfig
from foldspec.kernels.dispatch import Kernels
from foldspec.models import gemma4
from foldspec.models.config import ModelConfig
from foldspec.models.layers import RMSNorm
from foldspec.models.rope import Rope

__all__ = ["Gemma4Network"]


def read(config: ModelConfig, tensors: Collection[str]) -> tuple[DFlashConfig, tuple[gemma4.Layer, ...]]:
    """Raises :class:`CheckpointError`."""
    config = config.text()
    config.refuse(hidden_activation="gelu_pytorch_tanh", attention_bias=False)
    layers = gemma4.layers_of(config)
    if any(layer.window is not None for layer in layers):
        raise config.error("a drafter with sliding layers on Gemma 4's backbone is not supported")
    geometry = layers[0].geometry
    rope = Rope.from_config(config, geometry.head_dim, "full_attention")
    heads = HeadsConfig.from_config(config, tensors)
    return DFlashConfig.of(config, config, tensors, geometry, rope, heads, first_row=0), layers


class Attention(gemma4.Attention):
    def context(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, *rest = (self._heads(part) for part in self.stack(x, 1))
        return self.k_norm(k), self.v_norm(*(rest or [k]))


class Block(gemma4.Block):
    def __init__(self, layer: gemma4.Layer, kernels: Kernels) -> None:
        super().__init__(layer, kernels)
        self.self_attn = Attention(layer, kernels)

    def forward(self, x: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        o = attend(*self.self_attn.inputs(self.input_layernorm(x)))
        x = x + self.post_attention_layernorm(self.self_attn.output(o))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Gemma4Network(DFlashNetwork):
    def __init__(self, config: DFlashConfig, layers: tuple[gemma4.Layer, ...], kernels: Kernels) -> None:
        super().__init__(config, kernels)
        g = config.geometry
        self.scale = 1.0
        self.hidden_norm, self.norm = (RMSNorm(g.width, g.eps, kernels, wide=True) for _ in range(2))
        self.layers = nn.ModuleList(Block(layer, kernels) for layer in layers)

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> Gemma4Network:
        return cls(*read(config, tensors), kernels)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        rows = super().embed(ids)
        return rows * torch.tensor(self.config.geometry.width**0.5, dtype=rows.dtype)
