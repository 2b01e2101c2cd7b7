"""Qwen3.5, the language model of the multimodal files: most layers are gated DeltaNets, every so often one attends.

Blocks are Llama's, with norms that hold w - 1. Attention: a norm on each head of q and k, rotation of a part of each
head, and outputs times the sigmoid of a gate that lies beside each head's query. A DeltaNet layer: one projection to q,
k and v, a short causal convolution, the gated delta rule (``kernels/gated_delta``), a norm over each head, a gate.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from foldspec.cache.paged import CacheSpec, PagedCache, TargetSpec
from foldspec.cache.recurrent import Columns, RecurrentSpec
from foldspec.cache.rows import Rows
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardPlan
from foldspec.models.config import ModelConfig
from foldspec.models.layers import (
    Geometry,
    Linear,
    Projections,
    RMSNorm,
    Stack,
    SwiGLU,
    by_row,
    masked_attention,
    parameter,
)
from foldspec.models.llama import Extras, Llama
from foldspec.models.mask import CAUSAL
from foldspec.models.rope import Rope

__all__ = ["Qwen3_5"]

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class DeltaGeometry:
    """The widths of a DeltaNet layer: each key head serves ``value_heads / key_heads`` consecutive value heads, and the
    convolution looks at ``taps`` rows, its own the last."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> DeltaGeometry:
        """Raises :class:`CheckpointError` for a missing or impossible width."""
        geometry = cls(
            config.whole("linear_num_key_heads", high=1 << 16),
            config.whole("linear_num_value_heads", high=1 << 16),
            config.whole("linear_key_head_dim", high=1 << 16),
            config.whole("linear_value_head_dim", high=1 << 16),
            config.whole("linear_conv_kernel_dim", high=1 << 10),
        )
        if geometry.value_heads % geometry.key_heads:
            raise config.error(
                f"linear_num_value_heads {geometry.value_heads} is not a multiple of {geometry.key_heads} key heads"
            )
        return geometry

    def cache_spec(self, layers: int, dtype: torch.dtype) -> RecurrentSpec:
        widths = (self.key_heads, self.value_heads, self.key_width, self.value_width)
        return RecurrentSpec(layers, *widths, self.taps, dtype)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        keys = self.key_heads * self.key_width
        return keys, keys, self.value_heads * self.value_width


class GatedAttention(Projections):
    """Projections with a gate for each number that attention gives: q_proj has, head by head, query and gate."""

    def __init__(self, g: Geometry, kernels: Kernels, extras: Extras) -> None:
        super().__init__(g, kernels, bias=extras.bias, bias_out=extras.bias_out)
        self.q_proj = Linear(g.width, 2 * g.heads * g.head_dim, kernels, bias=extras.bias)
        self.stack = Stack(self.q_proj, self.k_proj, self.v_proj)
        self.q_norm = RMSNorm(g.head_dim, g.eps, kernels, offset=True)
        self.k_norm = RMSNorm(g.head_dim, g.eps, kernels, offset=True)

    def gated_inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[n, width] -> queries and gates [n, heads, d], keys and values [n, kv heads, d]."""
        both, k, v = self.stack(x)
        q, gate = both.unflatten(1, (-1, 2 * self.head_dim)).split(self.head_dim, dim=-1)
        return self.q_norm(q), gate, self.k_norm(self._heads(k)), self._heads(v)


class Convolution(nn.Module):
    """Causal, each channel for itself, then silu. weight [channels, 1, taps]; the last tap meets the row itself."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = parameter(channels, 1, taps)

    def forward(self, rows: torch.Tensor, columns: Columns) -> torch.Tensor:
        """Rows [n, channels] of one request -> the same. They are recorded in ``columns``."""
        taps = self.weight.shape[-1]
        x = columns.extended(rows, taps).to(torch.promote_types(rows.dtype, torch.float32))
        # one product and one sum after another: the same bits for a row whatever is computed beside it
        total = x[: len(rows)] * self.weight[:, 0, 0]
        for tap in range(1, taps):
            total = total + x[tap : tap + len(rows)] * self.weight[:, 0, tap]
        return by_row(F.silu, total.to(rows.dtype))


class DeltaNet(nn.Module):
    """A layer's mixer. ``A_log`` and ``dt_bias`` [value heads] stay in fp32 in any arithmetic."""

    wide = ("A_log", "dt_bias")

    def __init__(self, width: int, d: DeltaGeometry, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self._kernels, self._d = kernels, d
        self.in_proj_qkv = Linear(width, sum(d.parts), kernels)
        self.in_proj_z = Linear(width, d.parts[2], kernels)
        self.in_proj_b = Linear(width, d.value_heads, kernels)
        self.in_proj_a = Linear(width, d.value_heads, kernels)
        self.stack = Stack(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        self.conv1d = Convolution(sum(d.parts), d.taps)
        self.A_log = parameter(d.value_heads)
        self.dt_bias = parameter(d.value_heads)
        self.norm = RMSNorm(d.value_width, eps, kernels)
        self.out_proj = Linear(d.parts[2], width, kernels)

    def forward(self, h: torch.Tensor, plus: torch.Tensor, layer: int, rows: Rows, cache: PagedCache) -> torch.Tensor:
        """Normed rows [total, width] -> the same, added to ``plus``."""
        u, z, b, a = self.stack(h)
        beta = by_row(torch.sigmoid, b).to(self.A_log.dtype)
        g = -self.A_log.exp() * by_row(F.softplus, a.to(self.A_log.dtype) + self.dt_bias)
        y = u.new_empty(rows.total, self._d.value_heads, self._d.value_width)
        for request, _, packed in rows:
            state, columns = cache.state(layer, request)
            q, k, v = self.conv1d(u[packed], columns).split(self._d.parts, dim=1)
            q, k = (x.unflatten(1, (self._d.key_heads, self._d.key_width)) for x in (q, k))
            v = v.unflatten(1, (self._d.value_heads, self._d.value_width))
            y[packed] = self._kernels.gated_delta(q, k, v, g[packed], beta[packed], state)
        wide = torch.promote_types(y.dtype, torch.float32)  # norm first, rounded, then the gate in fp32
        gated = self._kernels.silu_mul(z.to(wide), self.norm(y).flatten(1).to(wide))
        return self.out_proj(gated.to(y.dtype), plus)


class Block(nn.Module):
    """One layer, with the mixer of its kind."""

    def __init__(self, g: Geometry, d: DeltaGeometry | None, kernels: Kernels, extras: Extras) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(g.width, g.eps, kernels, offset=True)
        self.self_attn = GatedAttention(g, kernels, extras) if d is None else None
        self.linear_attn = None if d is None else DeltaNet(g.width, d, g.eps, kernels)
        self.post_attention_layernorm = RMSNorm(g.width, g.eps, kernels, offset=True)
        self.mlp = SwiGLU(g.width, g.inner, kernels, bias=extras.mlp_bias)


class Qwen3_5(Llama):
    renamed = {"model.language_model.": "model."}  # noqa: RUF012
    ignored = ("model.visual.", "mtp.")

    def __init__(
        self,
        geometry: Geometry,
        delta: DeltaGeometry,
        kinds: tuple[str, ...],
        rope: Rope,
        kernels: Kernels,
        *,
        vocabulary: int,
        max_positions: int,
        tied: bool,
        extras: Extras,
    ) -> None:
        super().__init__(
            geometry, rope, kernels, vocabulary=vocabulary, max_positions=max_positions, tied=tied, extras=extras
        )
        self.delta, self.kinds = delta, kinds
        self.model.norm = RMSNorm(geometry.width, geometry.eps, kernels, offset=True)
        self.model.layers = nn.ModuleList(
            Block(geometry, delta if kind == LINEAR else None, kernels, extras) for kind in kinds
        )

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> Qwen3_5:
        config = config.text()
        config.refuse(hidden_act="silu", attn_output_gate=True)
        geometry = Geometry.from_config(config)
        if not any(part.has("partial_rotary_factor") for part in (config, config.part("rope_parameters"))):
            raise config.error("partial_rotary_factor is missing, at the top level and in rope_parameters")
        rope = Rope.from_config(config, geometry.head_dim)
        return cls(
            geometry,
            DeltaGeometry.from_config(config),
            kinds_of_layers(config, geometry.layers),
            rope,
            kernels,
            vocabulary=config.whole("vocab_size"),
            max_positions=max(config.whole("max_position_embeddings"), rope.reach),
            tied=config.flag("tie_word_embeddings") and "lm_head.weight" not in tensors,
            extras=cls.extras(config, [tensor for tensor in tensors if cls.parameter_name(tensor)]),
        )

    def cache_spec(self, dtype: torch.dtype) -> TargetSpec:
        g, linear = self.geometry, self.kinds.count(LINEAR)
        full = len(self.kinds) - linear
        pools = (
            CacheSpec(full, g.kv_heads, g.head_dim, g.head_dim, dtype),
            self.delta.cache_spec(linear, dtype),
        )
        return TargetSpec(pools, tuple(int(kind == LINEAR) for kind in self.kinds))

    def _block(
        self,
        block: nn.Module,
        index: int,
        x: torch.Tensor,
        plan: ForwardPlan,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        cache: PagedCache,
    ) -> torch.Tensor:
        assert isinstance(block, Block) and plan.mask == CAUSAL, "a state knows what came before alone"
        h = block.input_layernorm(x)
        if block.linear_attn is not None:
            x = block.linear_attn(h, x, index, plan.rows, cache)
        else:
            assert block.self_attn is not None
            q, gate, k, v = block.self_attn.gated_inputs(h)
            q = self.kernels.rotate_append(q, k, v, cos_sin, cache.slots(index))
            o = masked_attention(q, cache, index, plan.rows, self.kernels, self.geometry.head_dim**-0.5)
            x = block.self_attn.output(o * by_row(torch.sigmoid, gate), x)
        return block.mlp(block.post_attention_layernorm(x), x)


def kinds_of_layers(config: ModelConfig, layers: int) -> tuple[str, ...]:
    """``layer_types``, or what ``full_attention_interval`` makes of them: every so many layers, the last attends."""
    if not config.has("layer_types"):
        every = config.whole("full_attention_interval")
        return tuple(LINEAR if (i + 1) % every else FULL for i in range(layers))
    kinds = tuple(config.get("layer_types", list))
    unknown = [kind for kind in kinds if kind not in (LINEAR, FULL)]
    if unknown or len(kinds) != layers:
        what = f"names {unknown[0]!r}" if unknown else f"has {len(kinds)} entries for {layers} layers"
        raise config.error(f"layer_types {what}", do=f"it needs {LINEAR} or {FULL} for each layer")
    return kinds
