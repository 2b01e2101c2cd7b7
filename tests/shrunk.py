"""A registry of tiny checkpoints: every family that dummies must fit, with odd vocabularies and few numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
DFLASH: dict[str, Any] = {
    **LLAMA,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 24,
    "num_target_layers": 7,
    "dflash_config": {"block_size": 6, "mask_token_id": 210, "target_layer_ids": [1, 3, 5]},
}
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        **LLAMA,
        "architectures": None,
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "in_channels": 3,
        "num_position_embeddings": 4,
        "out_hidden_size": 32,
        "patch_size": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "text_config": {
        **LLAMA,
        "architectures": None,
        "num_hidden_layers": 13,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 24,
        "final_logit_softcapping": 30.0,
        "rope_theta": None,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "vision_config": {
        "model_patch_size": 2,
        "mm_embed_dim": 8,
        "mm_posemb_size": 4,
        "output_proj_dims": 8,
    },
    "audio_config": {"audio_embed_dim": 8},
}


def _without_none(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value is not None
    }


def install(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this registry take the place of the one that ships."""
    drafts = {"kind": "dflash", "config": DFLASH}
    other = {**DFLASH, "num_target_layers": 8}
    checkpoints = {
        "t/llama": {"config": LLAMA},
        "t/hybrid": {"config": HYBRID},
        "t/gemma": {"config": GEMMA},
        "t/dflash": drafts,
        "t/dflash-hybrid": {"kind": "dflash", "config": other},
        "t/diffusion": {"kind": "block diffusion", "config": {**LLAMA, "architectures": ["SDARForCausalLM"]}},
    }
    pairs = {
        "llama": {"target": "t/llama", "drafter": "t/dflash", "window": 16},
        "hybrid": {"target": "t/hybrid", "drafter": "t/dflash-hybrid", "window": 16},
        "gemma": {"target": "t/gemma"},
        "diffusion": {"target": "t/llama", "drafter": "t/diffusion", "block": 4},
    }
    path = folder / "checkpoints.yaml"
    whole = {"checkpoints": {k: _without_none(v) for k, v in checkpoints.items()}, "pairs": pairs}
    path.write_text(yaml.safe_dump(whole))
    patch.setattr("foldspec.checkpoints.registry.registry_path", lambda: path)
