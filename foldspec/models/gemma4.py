"""Gemma 4, the dense text models: ``gemma4_unified`` (12B) and ``gemma4`` (31B), in their multimodal wrappers or alone.

x <- x + rms(Wo attention(rms(x)));   x <- x + rms(down(gelu(gate h) * up h)), h = rms(x);   x <- x * scalar

A layer is sliding or full, each with its own head size, key-value heads, RoPE and cache. q and k are normed, and v
without a weight; v of a full layer is the raw k. Logits are not scaled in attention. Rows of the embedding are
multiplied by sqrt(width), logits bounded by ``cap * tanh(logits / cap)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import nn

from foldspec.cache.paged import CacheSpec, PagedCache, TargetSpec
from foldspec.cache.rows import Rows
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardPlan, LanguageModel
from foldspec.models.config import ModelConfig
from foldspec.models.layers import (
    GeGLU,
    Geometry,
    Linear,
    Matrix,
    Projections,
    RMSNorm,
    Stack,
    UnitNorm,
    masked_attention,
    parameter,
)
from foldspec.models.llama import Backbone, Llama, rotation
from foldspec.models.rope import Rope

__all__ = ["Block", "Gemma4", "Layer", "layers_of"]

PERIOD = 6  # every sixth layer is full where a config does not list its layers


@dataclass(frozen=True)
class Layer:
    """``window``: the entries that a row of a sliding layer reads, its own included; None: a full layer.
    ``raw_keys``: its values are its raw keys."""

    geometry: Geometry
    window: int | None
    raw_keys: bool

    @property
    def kind(self) -> str:
        return "full_attention" if self.window is None else "sliding_attention"

    @property
    def turning(self) -> tuple[str, int]:
        """What its RoPE depends on."""
        return self.kind, self.geometry.head_dim

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """Of this layer alone."""
        g = self.geometry
        return CacheSpec(1, g.kv_heads, g.head_dim, g.head_dim, dtype, self.window)


def layers_of(config: ModelConfig) -> tuple[Layer, ...]:
    """The layers, from ``layer_types`` (derived where absent; the last one is always full) and from either spelling of
    the geometry of full layers: ``global_head_dim`` and ``num_global_key_value_heads``, or ``per_layer_config``.
    Raises :class:`CheckpointError`."""
    for key in ("head_dim", "num_key_value_heads"):  # what other readers put in their places differs
        config.whole(key)
    count = Geometry.from_config(config).layers
    derived = ["sliding_attention" if (i + 1) % PERIOD else "full_attention" for i in range(count)]
    kinds = config.get("layer_types", list, derived)
    if len(kinds) != count:
        raise config.error(f"layer_types has {len(kinds)} entries for {count} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error(f"unknown layer type {kind!r}")
    kinds = [*kinds[:-1], "full_attention"]
    raw_keys = config.flag("attention_k_eq_v")
    own = _own_values(config, kinds, raw_keys)
    return tuple(
        Layer(
            Geometry.from_config(ModelConfig({**config.values, **own.get(i, {})}, config.where)),
            config.whole("sliding_window") if kind == "sliding_attention" else None,
            raw_keys and kind == "full_attention",
        )
        for i, kind in enumerate(kinds)
    )


def _own_values(config: ModelConfig, kinds: Sequence[str], raw_keys: bool) -> dict[int, dict[str, Any]]:
    """What some layers have in place of the model's own ``head_dim`` and ``num_key_value_heads``, by number."""
    if not config.has("per_layer_config"):
        own = {"head_dim": config.whole("global_head_dim")}
        if raw_keys and config.has("num_global_key_value_heads"):
            own["num_key_value_heads"] = config.whole("num_global_key_value_heads")
        return {i: own for i, kind in enumerate(kinds) if kind == "full_attention"}
    listed, found = config.part("per_layer_config"), {}
    for name in listed.values:
        if not name.isdecimal() or int(name) >= len(kinds):  # "5", or "05" where layers have two digits
            raise listed.error(f"{name!r} is none of {len(kinds)} layers")
        layer = found[int(name)] = listed.part(name).values
        for key in layer:
            if key not in ("head_dim", "num_key_value_heads"):
                raise listed.error(f"{key} of one layer is not supported")
    return found


class Attention(Projections):
    """Projections with norms of queries, keys and values, and perhaps none for the values: these are then raw keys."""

    def __init__(self, layer: Layer, kernels: Kernels) -> None:
        g = layer.geometry
        super().__init__(g, kernels)
        if layer.raw_keys:
            del self.v_proj
            self.stack = Stack(self.q_proj, self.k_proj)
        self.q_norm = RMSNorm(g.head_dim, g.eps, kernels, wide=True)
        self.k_norm = RMSNorm(g.head_dim, g.eps, kernels, wide=True)
        self.v_norm = UnitNorm(g.head_dim, g.eps, kernels)

    def inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, *rest = (self._heads(part) for part in self.stack(x))
        return self.q_norm(q), self.k_norm(k), self.v_norm(*(rest or [k]))


class Block(nn.Module):
    def __init__(self, layer: Layer, kernels: Kernels) -> None:
        super().__init__()
        g = layer.geometry
        self.layer = layer
        self.input_layernorm = RMSNorm(g.width, g.eps, kernels, wide=True)
        self.self_attn = Attention(layer, kernels)
        self.post_attention_layernorm = RMSNorm(g.width, g.eps, kernels, wide=True)
        self.pre_feedforward_layernorm = RMSNorm(g.width, g.eps, kernels, wide=True)
        self.mlp = GeGLU(g.width, g.inner, kernels)
        self.post_feedforward_layernorm = RMSNorm(g.width, g.eps, kernels, wide=True)
        self.layer_scalar = parameter(1)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """What joins the stream x [n, width] after attention, before its norm."""
        return self.mlp(self.pre_feedforward_layernorm(x))


class Gemma4(Llama):
    renamed = {"model.language_model.": "model."}  # noqa: RUF012
    ignored: ClassVar[tuple[str, ...]] = (
        "model.vision_tower.",
        "model.vision_embedder.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    )

    def __init__(
        self,
        layers: Sequence[Layer],
        ropes: dict[tuple[str, int], Rope],
        kernels: Kernels,
        *,
        vocabulary: int,
        max_positions: int,
        softcap: float | None,
        tied: bool,
        block: Callable[[Layer, Kernels], Block] = Block,
    ) -> None:
        LanguageModel.__init__(self)  # what Llama is made of is of one geometry
        self.layout, self.ropes, self.kernels, self.softcap = tuple(layers), ropes, kernels, softcap
        g = layers[0].geometry
        self.vocabulary, self.width, self.layer_count = vocabulary, g.width, len(layers)
        self.max_positions = max_positions
        self.model = Backbone(g, vocabulary, (block(layer, kernels) for layer in layers), kernels, wide=True)
        self.lm_head = None if tied else Linear(self.width, vocabulary, kernels)
        self.embedding_scale = self.width**0.5

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> Gemma4:
        config = cls.text_of(config)
        layers = layers_of(config)
        return cls(
            layers,
            cls.ropes_of(config, layers),
            kernels,
            vocabulary=config.whole("vocab_size"),
            max_positions=config.whole("max_position_embeddings"),
            softcap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
            tied="lm_head.weight" not in tensors,  # the published ones are, whatever their configs say of it
        )

    @staticmethod
    def text_of(config: ModelConfig) -> ModelConfig:
        """The text model's settings, none of which is one that is not supported."""
        config = config.text()
        if config.get("use_bidirectional_attention", str, "vision") != "vision":  # of images, of which there are none
            raise config.error("use_bidirectional_attention of text is not supported")
        config.refuse(hidden_activation="gelu_pytorch_tanh", attention_bias=False)
        return config

    @staticmethod
    def ropes_of(config: ModelConfig, layers: Sequence[Layer]) -> dict[tuple[str, int], Rope]:
        """By what a layer's depends on."""
        return {layer.turning: Rope.from_config(config, layer.geometry.head_dim, layer.kind) for layer in layers}

    def cache_spec(self, dtype: torch.dtype) -> TargetSpec:
        each = [layer.cache_spec(dtype) for layer in self.layout]
        kinds = list(dict.fromkeys(each))
        pools = tuple(replace(kind, layers=each.count(kind)) for kind in kinds)
        return TargetSpec(pools, tuple(kinds.index(spec) for spec in each))

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        return super().embed(ids, self.embedding_scale if scale is None else scale)

    def head(self, x: torch.Tensor, matrix: Matrix | None = None, softcap: float | None = None) -> torch.Tensor:
        return super().head(x, matrix, self.softcap if softcap is None else softcap)

    def _rotations(self, rows: Rows, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = {turning: rotation(rope, rows, device) for turning, rope in self.ropes.items()}
        return [found[layer.turning] for layer in self.layout]

    def _block(
        self,
        block: nn.Module,
        index: int,
        x: torch.Tensor,
        plan: ForwardPlan,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        cache: PagedCache,
    ) -> torch.Tensor:
        block = cast(Block, block)
        q, k, v = block.self_attn.inputs(block.input_layernorm(x))
        q = self.kernels.rotate_append(q, k, v, cos_sin, cache.slots(index))
        o = masked_attention(q, cache, index, plan.rows, self.kernels, 1.0, block.layer.window, plan.mask)
        x = x + block.post_attention_layernorm(block.self_attn.output(o))
        x = x + block.post_feedforward_layernorm(block.feed_forward(x))
        return x * self._scalar(block, index, plan)

    def _scalar(self, block: Block, index: int, plan: ForwardPlan) -> torch.Tensor:
        """[1] what a layer's output is multiplied by."""
        return block.layer_scalar
