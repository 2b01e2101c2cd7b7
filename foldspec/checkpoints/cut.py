"""A checkpoint with fewer layers than it has, for dummy weights: config and list of tensors. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from foldspec.checkpoints.headers import Weights
from foldspec.checkpoints.shapes import layer_kinds

__all__ = ["cut", "fold_taps", "layers_of"]

_LAYER = re.compile(r"((?:model\.(?:(?:encoder\.)?language_model\.|decoder\.)?)?layers\.)(\d+)(\..*)")


def layers_of(config: Mapping[str, Any]) -> int:
    """Layers of the text model."""
    count: int = (config.get("text_config") or config)["num_hidden_layers"]
    return count


def cut(config: Mapping[str, Any], weights: Weights, layers: int) -> tuple[dict[str, Any], Weights]:
    """Both with the last ``layers`` layers alone (or all, if there are fewer): where a model has layers of several
    kinds, one of each kind is among the last two."""
    text = config.get("text_config") or config
    kinds = layer_kinds(text)
    gone = max(0, len(kinds) - layers)
    short: dict[str, Any] = {**text, "num_hidden_layers": len(kinds) - gone}
    if text.get("layer_types") or len(set(kinds)) > 1:
        short["layer_types"] = kinds[gone:]
    entries = {}
    for name, entry in weights.entries.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            entries[name] = entry
        elif int(layer[2]) >= gone:
            entries[f"{layer[1]}{int(layer[2]) - gone}{layer[3]}"] = entry
    return (
        {**config, "text_config": short} if config.get("text_config") else short,
        Weights(weights.folder, entries),
    )


def fold_taps(config: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """A drafter's config for its target cut from ``before`` layers to ``after``: as many taps, on layers that exist, in
    their order, several on one where there are fewer layers than taps."""
    nested = config.get("dflash_config")
    taps: Sequence[int] | None = (nested or config).get("target_layer_ids")
    if taps is None:
        return dict(config)
    folded = {"target_layer_ids": [tap * after // before for tap in taps]}
    changed = {"dflash_config": {**nested, **folded}} if nested else folded
    known = {"num_target_layers": after} if "num_target_layers" in config else {}
    return {**config, **changed, **known}
