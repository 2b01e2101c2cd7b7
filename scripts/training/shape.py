"""What a drafter's config.json has of its target's: a drafter is shaped like its target."""

from __future__ import annotations

from typing import Any

from foldspec.models.config import ModelConfig

__all__ = ["target_shape"]

SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def target_shape(target: ModelConfig) -> dict[str, Any]:
    """The values of a target's config.json that give a layer its widths. Raises :class:`CheckpointError`."""
    for name in SHAPE[2:]:
        if not target.has(name):
            raise target.error(f"{name} is missing, and a drafter is shaped like its target")
    return {name: target.values[name] for name in SHAPE}
