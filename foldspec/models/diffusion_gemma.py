"""DiffusionGemma: Gemma 4 with experts beside its MLP, as an encoder of committed text and a decoder of canvases.

Both are the same network over one cache, but for a scalar of each layer. The encoder is causal and stores keys and
values. The decoder denoises a canvas of any length behind them: its rows read one another and the whole prefix, on
sliding layers the prefix's last ``window - 1`` entries whatever the row; nothing of it stays in the cache.

    x_0 = rms(e + down(gelu(gate s) * up s)),  s = rms(softmax(z) E sqrt(width)),  e = E[canvas] sqrt(width)

z are the processed logits of the step before (first step: s = 0), and the outer norm has no weight. In a layer, with r
the stream after attention, ``x <- (r + rms(rms(mlp(rms(r))) + rms(experts(rms(r))))) * scalar``; the router reads r as
it is. Row i of a canvas predicts its own position.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardPlan
from foldspec.models.config import ModelConfig
from foldspec.models.experts import Experts, Router
from foldspec.models.gemma4 import Block, Gemma4, Layer, layers_of
from foldspec.models.layers import GeGLU, Matrix, RMSNorm, UnitNorm, parameter
from foldspec.models.mask import FULL
from foldspec.models.rope import Rope

__all__ = ["DiffusionGemma", "Mixture"]

SOFTCAP = 30.0  # where a config has none


@dataclass(frozen=True)
class Mixture:
    """``experts`` of ``inner`` rows each, of which a row takes ``chosen``."""

    experts: int
    chosen: int
    inner: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> Mixture:
        experts = config.whole("num_experts")
        return cls(experts, config.whole("top_k_experts", high=experts), config.whole("moe_intermediate_size"))

    def __str__(self) -> str:
        return f"{self.chosen} of {self.experts}"


class MixedBlock(Block):
    """A layer whose MLP and experts read the stream side by side."""

    def __init__(self, mixture: Mixture, layer: Layer, kernels: Kernels) -> None:
        super().__init__(layer, kernels)
        g = layer.geometry
        self.router = Router(g.width, mixture.experts, mixture.chosen, g.eps, kernels)
        self.experts = Experts(g.width, mixture.inner, mixture.experts, kernels)
        self.post_feedforward_layernorm_1 = RMSNorm(g.width, g.eps, kernels, wide=True)
        self.post_feedforward_layernorm_2 = RMSNorm(g.width, g.eps, kernels, wide=True)
        self.pre_feedforward_layernorm_2 = RMSNorm(g.width, g.eps, kernels, wide=True)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
        return self.post_feedforward_layernorm_1(super().feed_forward(x)) + self.post_feedforward_layernorm_2(mixed)


class SelfConditioning(GeGLU):
    """What a decoder makes of its canvas and of what it said of it a step before."""

    def __init__(self, width: int, inner: int, eps: float, kernels: Kernels) -> None:
        super().__init__(width, inner, kernels)
        self.pre_norm = RMSNorm(width, eps, kernels, wide=True)
        self.post_norm = UnitNorm(width, eps, kernels)

    def embed(self, x: torch.Tensor, soft: torch.Tensor | None) -> torch.Tensor:
        """x [n, width] embedded ids, soft [n, width] embedded expectations; None: there are none yet, which counts as
        zeros."""
        return self.post_norm(x if soft is None else self(self.pre_norm(soft), x))


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_scalar = parameter(1)


class _Encoder(nn.Module):
    """What the encoder does not share with the decoder."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Scalar() for _ in range(layers))


class DiffusionGemma(Gemma4):
    """``forward`` encodes, :meth:`denoise` decodes. The head serves the decoder alone: encode with ``head_rows=()``."""

    renamed = {"model.decoder.": "model.", "model.encoder.language_model.": "encoder."}  # noqa: RUF012
    ignored = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")

    def __init__(
        self,
        layers: Sequence[Layer],
        ropes: dict[tuple[str, int], Rope],
        kernels: Kernels,
        *,
        vocabulary: int,
        max_positions: int,
        softcap: float,
        mixture: Mixture,
        canvas: int,
    ) -> None:
        super().__init__(
            layers,
            ropes,
            kernels,
            vocabulary=vocabulary,
            max_positions=max_positions,
            softcap=softcap,
            tied=True,
            block=partial(MixedBlock, mixture),
        )
        g = layers[0].geometry
        self.canvas, self.mixture = canvas, mixture
        self.self_conditioning = SelfConditioning(g.width, g.inner, g.eps, kernels)
        self.encoder = _Encoder(len(layers))

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> DiffusionGemma:
        canvas = config.whole("canvas_length")
        text = cls.text_of(config)
        text.refuse(attention_k_eq_v=True)  # full layers always read their raw keys
        layers = layers_of(ModelConfig({**text.values, "attention_k_eq_v": True}, text.where))
        return cls(
            layers,
            cls.ropes_of(text, layers),
            kernels,
            vocabulary=text.whole("vocab_size"),
            max_positions=text.whole("max_position_embeddings"),
            softcap=text.number("final_logit_softcapping", SOFTCAP),
            mixture=Mixture.from_config(text),
            canvas=canvas,
        )

    @classmethod
    def parameter_name(cls, tensor: str) -> str | None:
        name = super().parameter_name(tensor)
        if name is None:
            return None
        name = name.replace("model.self_conditioning.", "self_conditioning.")
        return f"{name}.weight" if ".experts." in name else name  # which files name without it

    def head(self, x: torch.Tensor, matrix: Matrix | None = None, softcap: float | None = None) -> torch.Tensor:
        """Widened before they are bounded, as the source does."""
        logits = (matrix or self.head_matrix).product(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.softcap if softcap is None else softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def bytes_of(self, rows: int) -> int:
        """About the bytes of weights that a forward of so many rows reads: of the experts, as many as rows choose that
        choose evenly."""
        experts = sum(p.nbytes for name, p in self.named_parameters() if ".experts." in name)
        idle = (1 - self.mixture.chosen / self.mixture.experts) ** rows
        return self.bytes_read - int(idle * experts)

    def denoise(
        self, ids: torch.Tensor, rows: Rows, cache: PagedCache, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [total, vocabulary] in fp32 or better of canvases ``ids`` [total], which lie behind what the cache
        holds of each request. ``before`` [total, vocabulary]: the processed logits of the step before. The cache holds
        afterwards what it held."""
        soft = None if before is None else self._expected(before)
        x = self.self_conditioning.embed(self.embed(ids), soft)
        logits = self._run(x, ForwardPlan(rows, mask=FULL), cache).logits
        for request, start, _ in rows:
            cache.truncate(request, start)
        return logits

    def _expected(self, before: torch.Tensor) -> torch.Tensor:
        """Mean embeddings [n, width] under the laws that logits [n, vocabulary] make."""
        dtype = self.model.norm.weight.dtype
        shares = before.to(dtype).softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        return self.model.embed_tokens.mixed(shares) * torch.tensor(self.embedding_scale, dtype=dtype)

    def _scalar(self, block: Block, index: int, plan: ForwardPlan) -> torch.Tensor:
        if plan.mask == FULL:
            return block.layer_scalar
        return cast(_Scalar, self.encoder.layers[index]).layer_scalar
