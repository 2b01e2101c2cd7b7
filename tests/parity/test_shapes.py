"""The tensor lists of checkpoints/shapes.py against transformers' own models, built from the same configs with fewer
layers: a period of sliding and full ones, and some more."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForConditionalGeneration
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from foldspec.checkpoints.registry import load_registry
from foldspec.checkpoints.shapes import list_tensors

LAYERS = 8  # of the text part, and of the vision tower

CLASSES = {
    "NousResearch/Meta-Llama-3.1-8B-Instruct": transformers.LlamaForCausalLM,
    "Qwen/Qwen2.5-32B-Instruct": transformers.Qwen2ForCausalLM,
    "Qwen/Qwen2.5-1.5B-Instruct": transformers.Qwen2ForCausalLM,
    "Qwen/Qwen3-8B": transformers.Qwen3ForCausalLM,
    "JetLM/SDAR-1.7B-Chat": transformers.Qwen3ForCausalLM,  # the same tensors
    "Dream-org/Dream-v0-Instruct-7B": transformers.Qwen2ForCausalLM,  # the same tensors
    "Qwen/Qwen3.5-9B": Qwen3_5ForConditionalGeneration,
    "google/gemma-4-12B-it": Gemma4UnifiedForConditionalGeneration,
    "google/gemma-4-31B-it": Gemma4ForConditionalGeneration,
    "google/diffusiongemma-26B-A4B-it": DiffusionGemmaForBlockDiffusion,
}


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    counts = {key: LAYERS for key in ("num_hidden_layers", "depth") if key in config}
    parts = {key: shortened(part) for key, part in config.items() if key in ("text_config", "vision_config")}
    return {**config, **counts, **parts}


def of_transformers(name: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as they are saved: without what is tied to something else."""
    kind = CLASSES[name]
    values = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = kind(kind.config_class(**values))
    tied = set(model.all_tied_weights_keys) if config.get("tie_word_embeddings") else set()
    return {as_saved(name, key): tuple(t.shape) for key, t in model.state_dict().items() if key not in tied}


def as_saved(name: str, key: str) -> str:
    """transformers holds the embedder of Gemma-4-12B under another name than the released file does."""
    begin = "model.embed_vision."
    if "12B" not in name or not key.startswith(begin):
        return key
    rest = key.removeprefix(begin)
    inner = rest.removeprefix("multimodal_embedder.")
    return f"model.vision_embedder.{rest}" if inner == rest else begin + inner


@pytest.mark.parametrize("name", CLASSES)
def test_names_and_shapes(name: str) -> None:
    config = shortened(load_registry().checkpoints[name].config)
    ours = list_tensors(config, name).shapes
    theirs = of_transformers(name, config)
    ours = {key: shape for key, shape in ours.items() if not key.startswith("mtp.")}  # which transformers leaves out
    assert ours.keys() == theirs.keys()
    assert ours == theirs
