"""Tiny Gemma 4 checkpoints, for the tests of several rooms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracles
import tiny
import transformers

WINDOW = 4
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
# As foldspec reads it, with the geometry of full layers as published files spell it. Fits the drafters of tiny.py.
TARGET: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "rope_parameters": _ROPES,
    "tie_word_embeddings": True,
}
# DeepSpec's drafter on Gemma 4's backbone; stray keys stand beside its ropes, as in the published files.
DRAFTER: dict[str, Any] = {
    **{key: value for key, value in TARGET.items() if key not in ("layer_types", "tie_word_embeddings")},
    "architectures": ["Gemma4DSparkModel"],
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention"] * 3,
    "rope_parameters": {**_ROPES, "rope_theta": None, "rope_type": "default"},
    "num_target_layers": 4,
    "block_size": 5,
    "mask_token_id": 127,
    "target_layer_ids": [0, 1, 2],
    "markov_rank": 0,
}
_TEXT: dict[str, Any] = {
    "intermediate_size": 56,
    "max_position_embeddings": 2048,
    "rope_parameters": _ROPES,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 16,
    "use_bidirectional_attention": "vision",
    "pad_token_id": 0,
}
_TOWERS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 16,
            "patch_size": 4,
        },
        "audio_config": None,
    },
    "gemma4_unified": {
        "vision_config": {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16},
        "audio_config": {"audio_embed_dim": 16},
    },
}
# For transformers: other sizes, head ratios and patterns of layers than the golden checkpoints
VARIANTS: dict[str, dict[str, Any]] = {
    "two periods, odd vocabulary, groups of 3 and 6": {
        "wrapper": "gemma4_unified",
        "vocab_size": 131,
        "hidden_size": 40,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "sliding_window": 4,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 6.0,
    },
    "31B's wrapper, groups of 2 and 4": {
        "wrapper": "gemma4",
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "global_head_dim": 40,
        "num_global_key_value_heads": 2,
        "sliding_window": 7,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 5.0,
    },
    "values of their own on full layers, no softcap": {
        "wrapper": None,
        "vocab_size": 150,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "global_head_dim": 16,
        "num_global_key_value_heads": None,
        "sliding_window": 17,
        "attention_k_eq_v": False,
        "final_logit_softcapping": None,
    },
}


def config_of(variant: dict[str, Any]) -> transformers.PreTrainedConfig:
    """The config of a variant, in a wrapper or alone."""
    settings = {**_TEXT, **variant}
    wrapper = settings.pop("wrapper")
    if wrapper is None:
        return transformers.Gemma4TextConfig(**settings)
    kind = transformers.Gemma4Config if wrapper == "gemma4" else transformers.Gemma4UnifiedConfig
    return kind(text_config=settings, **_TOWERS[wrapper])


def write(folder: Path, variant: str, **settings: Any) -> Path:
    """A random checkpoint, written by transformers: full layers' geometry in ``per_layer_config``."""
    gentle = {"q_norm": 0.5, "k_norm": 0.5}  # logits of attention are not scaled
    return oracles.write(folder, config_of(VARIANTS[variant]), factors=gentle, **settings)


def write_target(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint, written by foldspec's own names."""
    return tiny.write_target(folder, tiny.changed(TARGET, **changes), seed)
