"""The vocabulary of layers that models and drafters are written in. Weights are [out, in], as in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import ReadArgs
from foldspec.models.config import ModelConfig

__all__ = ["Embedding", "Geometry", "Linear", "Projections", "RMSNorm", "SwiGLU", "causal_attention", "matrices"]


def _weight(*shape: int) -> nn.Parameter:
    # on the meta device until a checkpoint's tensor takes its place: a model is never held twice
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """x [n, in] -> [n, out], in the dtype of x, whatever the weight is held in."""

    def __init__(self, width_in: int, width_out: int, kernels: Kernels, *, bias: bool = False) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = _weight(width_out, width_in)
        self.bias = _weight(width_out) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """ids [n] -> rows [n, width], in the dtype that the table is held in."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = _weight(vocabulary, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


def matrices(module: nn.Module) -> frozenset[str]:
    """The parameters of a module that may be held narrower than its arithmetic: what Linear and Embedding read. Norms,
    biases and buffers are small, and are held in the arithmetic's own dtype."""
    kinds = (Linear, Embedding)
    return frozenset(f"{name}.weight" for name, part in module.named_modules() if isinstance(part, kinds))


class RMSNorm(nn.Module):
    """``w * x / sqrt(mean(x^2) + eps)`` over the last axis, statistics in fp32 or better."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = _weight(width)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # in half precision the source casts the normalised row before it multiplies by the weight
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class SwiGLU(nn.Module):
    """``down(silu(gate x) * up x)``."""

    def __init__(self, width: int, inner: int, kernels: Kernels, *, bias: bool = False) -> None:
        super().__init__()
        self._kernels = kernels
        self.gate_proj = Linear(width, inner, kernels, bias=bias)
        self.up_proj = Linear(width, inner, kernels, bias=bias)
        self.down_proj = Linear(inner, width, kernels, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._kernels.silu_mul(self.gate_proj(x), self.up_proj(x)))


@dataclass(frozen=True)
class Geometry:
    """The widths that a Llama-like block is made of."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def from_config(cls, config: ModelConfig) -> Geometry:
        """Raises :class:`CheckpointError` for a missing or impossible width."""
        width, heads = config.whole("hidden_size"), config.whole("num_attention_heads", high=1 << 16)
        if not config.has("head_dim") and width % heads:
            raise config.error(f"hidden_size {width} is not a multiple of num_attention_heads {heads}")
        geometry = cls(
            width=width,
            inner=config.whole("intermediate_size"),
            layers=config.whole("num_hidden_layers", high=1 << 12),
            heads=heads,
            kv_heads=config.whole("num_key_value_heads", heads),
            head_dim=config.whole("head_dim", width // heads or 1, high=1 << 16),
            eps=config.number("rms_norm_eps"),
        )
        if heads % geometry.kv_heads:
            raise config.error(f"num_attention_heads {heads} is not a multiple of {geometry.kv_heads} kv heads")
        if geometry.head_dim % 2:
            raise config.error(f"head_dim {geometry.head_dim} is odd, which rotary embedding cannot split")
        return geometry


class Projections(nn.Module):
    """The four projections of an attention layer, with a norm over each head of q and k where the model has one.

    q and k come out un-rotated: whoever owns positions rotates them.
    """

    def __init__(
        self, g: Geometry, kernels: Kernels, *, head_norm: bool = False, bias: bool = False, bias_out: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = g.head_dim
        self.q_proj = Linear(g.width, g.heads * g.head_dim, kernels, bias=bias)
        self.k_proj = Linear(g.width, g.kv_heads * g.head_dim, kernels, bias=bias)
        self.v_proj = Linear(g.width, g.kv_heads * g.head_dim, kernels, bias=bias)
        self.o_proj = Linear(g.heads * g.head_dim, g.width, kernels, bias=bias_out)
        if head_norm:
            self.q_norm: nn.Module = RMSNorm(g.head_dim, g.eps)
            self.k_norm: nn.Module = RMSNorm(g.head_dim, g.eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self.head_dim)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, heads, d]."""
        return self.q_norm(self._heads(self.q_proj(x)))

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, kv heads, d]."""
        return self.k_norm(self._heads(self.k_proj(x)))

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, kv heads, d]."""
        return self._heads(self.v_proj(x))

    def output(self, o: torch.Tensor) -> torch.Tensor:
        """[n, heads, d] -> [n, width]."""
        return self.o_proj(o.reshape(len(o), -1))


def causal_attention(
    q: torch.Tensor, cache: PagedCache, layer: int, rows: Rows, kernels: Kernels, scale: float
) -> torch.Tensor:
    """Rotated q [total, heads, d] of packed rows; each row reads its request's entries up to and with its own."""
    batch = []
    for request, start, packed in rows:
        keys, values = cache.entries(layer, request)
        count = packed.stop - packed.start
        first, last = (0,) * count, tuple(range(start + 1, start + count + 1))
        batch.append([ReadArgs(q[packed], keys, values, first, last, scale)])
    outputs = kernels.multi_read_attention(batch)
    return outputs[0].out if len(outputs) == 1 else torch.cat([o.out for o in outputs])
