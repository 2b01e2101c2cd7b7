"""Random Qwen3.5 checkpoints, for the tests of several files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracles
import torch
import transformers
from safetensors.torch import load_file, save_file

TOLERANCE = 5e-4  # transformers' own chunked and recurrent forms differ by 1e-4
LINEAR, FULL = "linear_attention", "full_attention"
VARIANTS: dict[str, dict[str, Any]] = {
    "three value heads a key head, odd vocabulary": {
        "vocab_size": 157,
        "hidden_size": 40,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL, LINEAR],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.3},
        "tie_word_embeddings": False,
    },
    "one value head a key head, three taps, biases, tied": {
        "vocab_size": 131,
        "hidden_size": 36,
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "attention_bias": True,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": True,
    },
}
FIRST = next(iter(VARIANTS))


def write(folder: Path, variant: str, dtype: torch.dtype = torch.float32) -> Path:
    """A random checkpoint. Norms hold w - 1, but for the gated one; decays go from slow to fast."""
    widths = {"intermediate_size": 56, "max_position_embeddings": 512, "mrope_section": [1, 1, 1]}
    settings = {**widths, **VARIANTS[variant], "num_hidden_layers": len(VARIANTS[variant]["layer_types"])}
    oracles.write(folder, transformers.Qwen3_5TextConfig(**settings), dtype)
    tensors = load_file(folder / "model.safetensors")
    for name, x in tensors.items():
        if "norm" in name and "linear_attn" not in name:
            x -= 1
        elif name.endswith("A_log"):
            x.copy_((torch.linspace(0.02, 1.0, len(x)) * (1 + 0.1 * x.float())).abs().log())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
