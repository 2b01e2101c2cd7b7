"""The vocabulary of layers that models and drafters are written in. Weights are [out, in], as in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import FixedRows, Rows
from foldspec.checkpoints.weights import Layout
from foldspec.errors import ResourceError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.linear import Facts, panels
from foldspec.kernels.multi_read_attention import ReadArgs
from foldspec.models.config import ModelConfig
from foldspec.models.mask import CAUSAL, Mask

__all__ = [
    "Embedding",
    "GeGLU",
    "Geometry",
    "Linear",
    "Matrix",
    "Projections",
    "RMSNorm",
    "Stack",
    "SwiGLU",
    "UnitNorm",
    "by_row",
    "join",
    "layouts",
    "masked_attention",
    "matrices",
    "parameter",
    "wide",
]


_ROWS = 64 * panels.PANEL  # that a part takes at a time: a few megabytes beside the part itself
_SOME = 16 * panels.PANEL  # rows of a matrix


def parameter(*shape: int) -> nn.Parameter:
    """A weight on the meta device, until a checkpoint's tensor takes its place: a model is never held twice."""
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


class Matrix(nn.Module):
    """A weight [out, in], as in the checkpoint, or ``packed`` in panels: then its rows are found with :meth:`rows`
    alone."""

    def __init__(self, width_out: int, width_in: int, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = parameter(width_out, width_in)
        self.packed = False

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, plus: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, in] -> [n, out], in the dtype of x, whatever the weight is held in."""
        return self._kernels.linear(x, self.weight, bias, plus, packed=self.packed)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> rows [n, in], in the dtype that the weight is held in."""
        return panels.rows(self.weight, ids) if self.packed else F.embedding(ids, self.weight)

    def mixed(self, shares: torch.Tensor) -> torch.Tensor:
        """shares [n, out] -> sums [n, in] of the rows, each times its share, in the dtype of the shares."""
        if not self.packed and self.weight.dtype == shares.dtype:
            return shares @ self.weight
        total = shares.new_zeros(len(shares), self.weight.shape[1])
        for first in range(0, len(self.weight), _SOME):  # a large table is never held twice
            part = self.weight[first : first + _SOME]
            rows = panels.unpacked(part) if self.packed else part
            total.addmm_(shares[:, first : first + _SOME], rows.to(shares.dtype))
        return total

    def part(self, ids: torch.Tensor) -> Matrix:
        """A matrix of some of the rows, laid out like this one."""
        part = Matrix(len(ids), self.weight.shape[1], self._kernels)
        weight = self.weight.new_empty(part.weight.shape)
        for some, place in zip(ids.split(_ROWS), weight.split(_ROWS), strict=True):
            if self.packed:
                self._kernels.pack(self.rows(some), place)
            else:
                place.copy_(self.rows(some))
        part.weight, part.packed = nn.Parameter(weight, requires_grad=False), self.packed
        return part


class Linear(Matrix):
    """x [n, in] -> plus + x W^T + b [n, out]. ``more``, if there is one, adds to that in place: an adapter."""

    more: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    def __init__(self, width_in: int, width_out: int, kernels: Kernels, *, bias: bool = False) -> None:
        super().__init__(width_out, width_in, kernels)
        self.bias = parameter(width_out) if bias else None

    def forward(self, x: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        out = self.product(x, self.bias, plus)
        if self.more is not None:
            self.more(x, out)
        return out


class Embedding(Matrix):
    """ids [n] -> rows [n, width], in the dtype that the table is held in."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids)


def matrices(module: nn.Module) -> frozenset[str]:
    """The parameters of a module that may be held narrower than its arithmetic: what Linear and Embedding read. Norms,
    biases and buffers are small, and are held in the arithmetic's own dtype."""
    return frozenset(f"{name}.weight" for name, part in module.named_modules() if isinstance(part, Matrix))


def wide(module: nn.Module) -> frozenset[str]:
    """The parameters of a module that are held in fp32 even where the arithmetic is narrower: what its parts name in
    an attribute ``wide``."""
    return frozenset(f"{name}.{own}" for name, part in module.named_modules() for own in getattr(part, "wide", ()))


def by_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An element-wise function of x [n, ...], each row by itself: on a CPU torch's exponentials give the last elements
    of a range other bits than the others, so that a row's would depend on the rows around it."""
    if x.device.type != "cpu" or len(x) < 2:
        return function(x)
    return torch.stack([function(row) for row in x])


class Stack:
    """Linears that read the same rows: one product, once :meth:`join` has given their weights one place.

    Each Linear keeps its own part as a view, so that nothing is held twice.
    """

    def __init__(self, *parts: Linear) -> None:
        self._parts, self._widths = parts, [len(part.weight) for part in parts]
        self._joined: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # weight and bias of the parts from i on

    def join(self, held: torch.dtype, dtype: torch.dtype, device: torch.device | str) -> None:
        """Make room for weights in ``held`` and biases in ``dtype``. Parts that do not end with a panel stay apart."""
        if any(width % panels.PANEL for width in self._widths):
            return
        weight = self._room("weight", held, device)
        bias = None if self._parts[0].bias is None else self._room("bias", dtype, device)
        for begin in accumulate(self._widths[:-1], initial=0):
            self._joined.append((weight[begin:], None if bias is None else bias[begin:]))

    def _room(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Uninitialised, for the parts one after another; each part's parameter is a view of its place."""
        rest = getattr(self._parts[0], name).shape[1:]
        whole = torch.empty(sum(self._widths), *rest, dtype=dtype, device=device)
        for part, piece in zip(self._parts, whole.split(self._widths), strict=True):
            setattr(part, name, nn.Parameter(piece, requires_grad=False))
        return whole

    def __call__(self, x: torch.Tensor, first: int = 0) -> Sequence[torch.Tensor]:
        """x [n, in] -> the products of the parts from ``first`` on, [n, out] each, perhaps views of one."""
        if not self._joined:
            return [part(x) for part in self._parts[first:]]
        weight, bias = self._joined[first]
        whole = self._parts[0]._kernels.linear(x, weight, bias, packed=self._parts[0].packed)
        products = whole.split_with_sizes(self._widths[first:], 1)
        for part, product in zip(self._parts[first:], products, strict=True):
            if part.more is not None:
                part.more(x, product)
        return products


def join(module: nn.Module, held: torch.dtype, dtype: torch.dtype, device: torch.device | str) -> None:
    """Before weights are loaded: give the products of the same rows one place. ``held`` is the dtype of matrices,
    ``dtype`` that of the arithmetic. Raises :class:`ResourceError` when memory runs out."""
    try:
        for part in module.modules():
            if isinstance(stack := getattr(part, "stack", None), Stack):
                stack.join(held, dtype, device)
    except RuntimeError as error:  # torch has no one class for it on all devices
        raise ResourceError(
            f"no memory for the weights on {device}",
            do="use a smaller --dtype, another --device or a smaller checkpoint",
        ) from error


def layouts(
    module: nn.Module, held: torch.dtype, dtype: torch.dtype, device: torch.device | str, kernels: Kernels
) -> dict[str, Layout]:
    """Before weights are loaded: how the matrices of which a compiled product will read are laid out, by name; from now
    on they count as packed. Arguments as :func:`join` has them."""
    if not kernels.compiles("linear", Facts(torch.device(device).type, dtype, held, packed=True)):
        return {}
    for part in module.modules():
        if isinstance(part, Matrix):
            part.packed = True
    return dict.fromkeys(matrices(module), Layout(panels.PANEL, kernels.pack))


class RMSNorm(nn.Module):
    """``w * x / sqrt(mean(x^2) + eps)`` over the last axis, statistics in fp32 or better.

    Arithmetic in half precision casts the normalised row before it multiplies by the weight, as Llama's source does;
    with ``wide``, after, as Gemma's and Qwen3.5's do. ``offset``: the checkpoint holds w - 1 (and the norm is wide).
    """

    def __init__(self, width: int, eps: float, kernels: Kernels, *, wide: bool = False, offset: bool = False) -> None:
        super().__init__()
        self._kernels, self.eps, self._offset = kernels, eps, offset
        self._wide = wide or offset
        self.weight = parameter(width)
        self._scale: torch.Tensor | None = None

    def scale(self) -> torch.Tensor:
        """What rows are multiplied by; its dtype says whether before or after the cast."""
        if not self._wide:
            return self.weight
        if self._scale is None:
            wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
            self._scale = wide + 1 if self._offset else wide
        return self._scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, self.scale(), self.eps)


class UnitNorm(nn.Module):
    """An RMSNorm without a weight."""

    def __init__(self, width: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self._width, self.eps, self._kernels = width, eps, kernels
        self._ones: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._ones is None:
            wide = torch.promote_types(x.dtype, torch.float32)
            self._ones = torch.ones(self._width, dtype=wide, device=x.device)
        return self._kernels.rms_norm(x, self._ones, self.eps)


class SwiGLU(nn.Module):
    """``down(silu(gate x) * up x)``, added to ``plus``, if that is given."""

    def __init__(self, width: int, inner: int, kernels: Kernels, *, bias: bool = False) -> None:
        super().__init__()
        self._kernels = kernels
        self.gate_proj = Linear(width, inner, kernels, bias=bias)
        self.up_proj = Linear(width, inner, kernels, bias=bias)
        self.down_proj = Linear(inner, width, kernels, bias=bias)
        self.stack = Stack(self.gate_proj, self.up_proj)

    def forward(self, x: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        return self.down_proj(self._gated(*self.stack(x)), plus)

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self._kernels.silu_mul(gate, up)


class GeGLU(SwiGLU):
    """``down(gelu(gate x) * up x)``, added to ``plus``; gelu in its tanh form."""

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self._kernels.gelu_mul(gate, up)


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
        self.stack = Stack(self.q_proj, self.k_proj, self.v_proj)
        if head_norm:
            self.q_norm: nn.Module = RMSNorm(g.head_dim, g.eps, kernels)
            self.k_norm: nn.Module = RMSNorm(g.head_dim, g.eps, kernels)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.head_dim)

    def inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n, width] -> queries [n, heads, d], keys and values [n, kv heads, d]."""
        q, k, v = self.stack(x)
        return self.q_norm(self._heads(q)), self.k_norm(self._heads(k)), self._heads(v)

    def context(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, width] -> keys and values [n, kv heads, d] alone."""
        k, v = self.stack(x, 1)
        return self.k_norm(self._heads(k)), self._heads(v)

    def output(self, o: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        """[n, heads, d] -> [n, width], added to ``plus``."""
        return self.o_proj(o.flatten(1), plus)


def masked_attention(
    q: torch.Tensor,
    cache: PagedCache,
    layer: int,
    rows: Rows,
    kernels: Kernels,
    scale: float,
    window: int | None = None,
    mask: Mask = CAUSAL,
) -> torch.Tensor:
    """Rotated q [total, heads, d] of packed rows; each row reads of its request's entries the span that ``mask`` gives
    it, of which ``window`` keeps the end."""
    if isinstance(rows, FixedRows):
        assert window is None and mask == CAUSAL, "fixed rows read all that is before them"
        return kernels.device_attention([cache.fixed_read(layer, rows, q, scale)]).out.flatten(0, 1)
    cache.ask(layer, q, scale)
    batch = []
    for request, start, packed in rows:
        begins, ends = mask.spans(start, packed.stop - packed.start, window)
        base = begins[0]
        keys, values = cache.entries(layer, request, base)
        first, last = tuple(begin - base for begin in begins), tuple(end - base for end in ends)
        batch.append([ReadArgs(q[packed], keys, values, first, last, scale, origin=base)])
    outputs = kernels.multi_read_attention(batch)
    return outputs[0].out if len(outputs) == 1 else torch.cat([o.out for o in outputs])
