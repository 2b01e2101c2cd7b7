"""The drafters by the architecture that a checkpoint declares. A drafter is one file and one line here."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module

from foldspec.drafters.base import DrafterNetwork
from foldspec.kernels.dispatch import Kernels
from foldspec.models.config import ModelConfig

__all__ = ["ARCHITECTURES", "make_network"]

# architecture -> "module:class"; imported when it is asked for. DeepSpec's DFlash files carry its DSpark class name.
ARCHITECTURES = {
    "DFlashDraftModel": "foldspec.drafters.dflash:DFlashNetwork",
    "Qwen3DSparkModel": "foldspec.drafters.dflash:DFlashNetwork",
}


def make_network(config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> DrafterNetwork:
    """A drafter's network, its weights not yet loaded. Raises :class:`CheckpointError` for an unknown architecture."""
    name = config.architecture
    if name not in ARCHITECTURES:
        raise config.error(f"unknown drafter architecture {name!r}", do=f"known: {', '.join(sorted(ARCHITECTURES))}")
    module, _, attribute = ARCHITECTURES[name].partition(":")
    network: DrafterNetwork = getattr(import_module(module), attribute).from_config(config, tensors, kernels)
    return network
