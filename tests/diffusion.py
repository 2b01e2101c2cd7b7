"""Tiny DiffusionGemma checkpoints, for the tests of several rooms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gemma
import tiny
import torch
import transformers
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.checkpoints.weights import load_into, read_headers
from foldspec.models.base import ForwardOutput, ForwardPlan
from foldspec.models.config import ModelConfig
from foldspec.models.diffusion_gemma import DiffusionGemma
from foldspec.models.layers import join, layouts, matrices, wide

GOLDEN = tiny.GOLDEN / "tiny" / "diffusion_gemma"
WINDOW = 5
# other sizes, head ratios and patterns of layers than the golden checkpoint, and the softcap of the class
CONFIG: dict[str, Any] = {
    "text_config": {
        "vocab_size": 131,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 24,
        "sliding_window": WINDOW,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "max_position_embeddings": 2048,
        "rope_parameters": gemma._ROPES,
        "pad_token_id": 0,
    },
    "vision_config": gemma._TOWERS["gemma4"]["vision_config"],
    "canvas_length": 7,
}


def load(
    folder: Path,
    kernels: str = "auto",
    dtype: torch.dtype = torch.float32,
    held: torch.dtype | None = None,
) -> DiffusionGemma:
    """With its weights, as an engine would load it."""
    config, weights, held = ModelConfig.read(folder), read_headers(folder), held or dtype
    model = DiffusionGemma.from_config(config, tuple(weights.entries), tiny.kernels_of(kernels))
    join(model, held, dtype, "cpu")
    load_into(
        model,
        weights,
        dtype=dtype,
        held=held,
        matrices=matrices(model),
        device="cpu",
        wide=wide(model),
        layouts=layouts(model, held, dtype, "cpu", tiny.kernels_of(kernels)),
        rename=model.parameter_name,
    )
    return model


@torch.inference_mode()
def encode(
    model: DiffusionGemma, cache: PagedCache, ids: Sequence[int], request: int = 0, taps: Sequence[int] = ()
) -> ForwardOutput:
    """Ids that follow what the cache holds of a request."""
    rows = Rows.of([request], [cache.tables.length(request)], [len(ids)])
    return model(torch.tensor(ids), ForwardPlan(rows, tuple(taps), head_rows=()), cache)


@torch.inference_mode()
def denoise(
    model: DiffusionGemma,
    cache: PagedCache,
    canvases: Sequence[Sequence[int]],
    requests: Sequence[int] = (0,),
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    starts = [cache.tables.length(request) for request in requests]
    rows = Rows.of(requests, starts, [len(canvas) for canvas in canvases])
    return model.denoise(torch.tensor([i for canvas in canvases for i in canvas]), rows, cache, before)


class Oracle:
    """The same checkpoint in transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        how = {
            "attn_implementation": "eager",
            "experts_implementation": "grouped_mm" if dtype.itemsize < 4 else "eager",
        }
        self._model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=dtype, **how).eval()

    @torch.inference_mode()
    def denoise(self, ids: Sequence[int], canvas: Sequence[int], before: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of a canvas behind ``ids``, encoded in one pass."""
        cache = transformers.DynamicCache(config=self._model.config.get_text_config(decoder=True))
        return self._model(
            input_ids=torch.tensor([ids]),
            cache=cache,
            decoder_input_ids=torch.tensor([canvas]),
            self_conditioning_logits=None if before is None else before[None],
        ).logits[0]


def write(folder: Path, **changes: Any) -> Path:
    """A random checkpoint, written by transformers; ``changes`` are of its text config."""
    text = {**CONFIG["text_config"], **changes}
    config = transformers.DiffusionGemmaConfig(**{**CONFIG, "text_config": text})
    model = DiffusionGemmaForBlockDiffusion(config).float()
    buffers = [(name, b) for name, b in model.named_buffers() if name.endswith("layer_scalar")]
    tensors = {**dict(model.named_parameters()), **dict(buffers)}
    weights = tiny.random_tensors({name: tuple(t.shape) for name, t in tensors.items()}, seed=3)
    with torch.no_grad():
        for name, tensor in tensors.items():
            gentle = 0.5 if "q_norm" in name or "k_norm" in name else 1.0  # logits of attention are not scaled
            tensor.copy_(weights[name] * gentle)
    model.save_pretrained(folder)
    return folder
