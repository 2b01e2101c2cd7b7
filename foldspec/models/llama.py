"""Llama, and with it SmolLM2 and whatever else declares ``LlamaForCausalLM``. Maths: pre-norm block, RoPE, SwiGLU.

x <- x + Wo attention(rms(x));   x <- x + down(silu(gate h) * up h), h = rms(x);   logits = head(rms(x))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from foldspec.cache.paged import CacheSpec, PagedCache, TargetSpec
from foldspec.cache.rows import Rows
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardOutput, ForwardPlan, LanguageModel
from foldspec.models.config import ModelConfig
from foldspec.models.layers import Embedding, Geometry, Linear, Matrix, Projections, RMSNorm, SwiGLU, masked_attention
from foldspec.models.rope import Rope

__all__ = ["Backbone", "Extras", "Llama", "rotation"]


@dataclass(frozen=True)
class Extras:
    """What blocks have beside their matrices and two norms: biases of q, k and v, of o and of the MLP, and a norm over
    each head of q and k."""

    bias: bool = False
    bias_out: bool = False
    mlp_bias: bool = False
    head_norm: bool = False


class Block(nn.Module):
    def __init__(self, g: Geometry, kernels: Kernels, extras: Extras) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(g.width, g.eps, kernels)
        self.self_attn = Projections(g, kernels, head_norm=extras.head_norm, bias=extras.bias, bias_out=extras.bias_out)
        self.post_attention_layernorm = RMSNorm(g.width, g.eps, kernels)
        self.mlp = SwiGLU(g.width, g.inner, kernels, bias=extras.mlp_bias)


class Backbone(nn.Module):
    def __init__(
        self, g: Geometry, vocabulary: int, blocks: Iterable[nn.Module], kernels: Kernels, *, wide: bool = False
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocabulary, g.width, kernels)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(g.width, g.eps, kernels, wide=wide)


class Llama(LanguageModel):
    def __init__(
        self,
        geometry: Geometry,
        rope: Rope,
        kernels: Kernels,
        *,
        vocabulary: int,
        max_positions: int,
        tied: bool,
        extras: Extras,
    ) -> None:
        super().__init__()
        self.geometry, self.rope, self.kernels = geometry, rope, kernels
        self.vocabulary, self.width, self.layer_count = vocabulary, geometry.width, geometry.layers
        self.max_positions = max_positions
        blocks = (Block(geometry, kernels, extras) for _ in range(geometry.layers))
        self.model = Backbone(geometry, vocabulary, blocks, kernels)
        self.lm_head = None if tied else Linear(geometry.width, vocabulary, kernels)

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> Llama:
        config = config.text()
        config.refuse(hidden_act="silu", pretraining_tp=1, rope_interleaved=False)
        for part in (config, config.part("rope_parameters"), config.part("rope_scaling")):
            part.refuse(partial_rotary_factor=1.0)  # other readers of these architectures pass over it
        if any(kind != "full_attention" for kind in config.get("layer_types", list, [])):
            raise config.error("layer_types other than full_attention are not supported")
        geometry = Geometry.from_config(config)
        rope = Rope.from_config(config, geometry.head_dim)
        return cls(
            geometry,
            rope,
            kernels,
            vocabulary=config.whole("vocab_size"),
            max_positions=max(config.whole("max_position_embeddings"), rope.reach),
            # a head in the file wins: some exports declare tied embeddings and ship a head of their own
            tied=config.flag("tie_word_embeddings") and "lm_head.weight" not in tensors,
            extras=cls.extras(config, tensors),
        )

    @classmethod
    def extras(cls, config: ModelConfig, tensors: Collection[str]) -> Extras:
        """A bias is there if the config says so, or the file has it: some families' configs say nothing."""

        biases = {tensor.split(".")[-2] for tensor in tensors if tensor.endswith(".bias")}
        attention = config.flag("attention_bias")
        return Extras(
            bias=attention or not biases.isdisjoint({"q_proj", "k_proj", "v_proj"}),
            bias_out=attention or "o_proj" in biases,
            mlp_bias=config.flag("mlp_bias") or not biases.isdisjoint({"gate_proj", "up_proj", "down_proj"}),
        )

    def cache_spec(self, dtype: torch.dtype) -> TargetSpec:
        g = self.geometry
        return TargetSpec.uniform(CacheSpec(g.layers, g.kv_heads, g.head_dim, g.head_dim, dtype))

    @property
    def head_matrix(self) -> Matrix:
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        # the table may be held narrower than the rows are computed in; the norms never are
        rows = self.model.embed_tokens(ids).to(self.model.norm.weight.dtype)
        return rows if scale is None else rows * torch.tensor(scale, dtype=rows.dtype)

    def head(self, x: torch.Tensor, matrix: Matrix | None = None, softcap: float | None = None) -> torch.Tensor:
        logits = (matrix or self.head_matrix).product(x)
        if softcap is not None:  # in half precision, too, where the source does
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def forward(self, ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> ForwardOutput:
        return self._run(self.embed(ids), plan, cache)

    def _run(self, x: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> ForwardOutput:
        """Embedded rows [total, width] through all layers."""
        rows, taps = plan.rows, {}
        cache.begin(rows)
        rotations = self._rotations(rows, x.device)
        for i, (block, cos_sin) in enumerate(zip(self.model.layers, rotations, strict=True)):
            x = self._block(block, i, x, plan, cos_sin, cache)
            if i in plan.taps:
                taps[i] = x
        if plan.head_rows is not None:
            x = x[torch.tensor(plan.head_rows, dtype=torch.int64, device=x.device)]
        logits = self.head(self.model.norm(x)) if len(x) else x.new_empty(0, self.vocabulary)
        return ForwardOutput(logits, tuple(taps[i] for i in plan.taps))

    def _rotations(self, rows: Rows, device: torch.device) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin of the rows, for each layer."""
        return [rotation(self.rope, rows, device)] * self.layer_count

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
        scale = self.geometry.head_dim**-0.5
        o = masked_attention(q, cache, index, plan.rows, self.kernels, scale, mask=plan.mask)
        x = block.self_attn.output(o, x)
        return block.mlp(block.post_attention_layernorm(x), x)


def rotation(rope: Rope, rows: Rows, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of packed rows."""
    return rope.between(0, rows.end, rows.positions(device))
