"""The drafters: networks by the architecture that a checkpoint declares, and those without weights by name. A drafter
is one file and one line here."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module

from foldspec.drafters.base import Drafter, DrafterNetwork
from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ARCHITECTURES as TARGETS
from foldspec.models.config import ModelConfig

__all__ = ["ARCHITECTURES", "KINDS", "MODEL_FREE", "make_model_free", "make_network"]

# what the registry calls the kinds that run
KINDS = ("dflash", "dspark", "autoregressive", "masked diffusion", "block diffusion", "uniform diffusion")

# architecture -> "module:class"; imported when it is asked for. DeepSpec's DFlash files carry its DSpark class name.
ARCHITECTURES = {
    "PEFT LORA": "foldspec.drafters.adapter:AdapterNetwork",
    "DFlashDraftModel": "foldspec.drafters.dflash:DFlashNetwork",
    "Qwen3DSparkModel": "foldspec.drafters.dflash:DFlashNetwork",
    "Gemma4DSparkModel": "foldspec.drafters.gemma4_dspark:Gemma4Network",
    "DreamModel": "foldspec.drafters.masked_networks:DreamNetwork",
    "SDARForCausalLM": "foldspec.drafters.masked_networks:SDARNetwork",
    "MaskedLlamaForCausalLM": "foldspec.drafters.masked_networks:MaskedLlamaNetwork",
    "DiffusionGemmaForBlockDiffusion": "foldspec.drafters.uniform_diffusion:UniformNetwork",
}

# any target model may draft, too
LANGUAGE_MODEL = "foldspec.drafters.autoregressive:AutoregressiveNetwork"

# architecture -> the name under which it is known and not supported
REFUSED = {"DFlash2DraftModel": "DFlash 2"}

# name -> "module:class", made without arguments; `options.WITHOUT_WEIGHTS` has the names for those without torch
MODEL_FREE = {
    "lookup": "foldspec.drafters.prompt_lookup:PromptLookup",
    "repeat": "foldspec.drafters.naive:Repeat",
    "unigram": "foldspec.drafters.naive:Unigram",
}


def make_model_free(name: str) -> Drafter:
    """A drafter without weights. Raises :class:`UsageError` for an unknown name."""
    if name not in MODEL_FREE:
        raise UsageError(f"no drafter without weights is called {name!r}", do=f"known: {', '.join(MODEL_FREE)}")
    module, _, attribute = MODEL_FREE[name].partition(":")
    drafter: Drafter = getattr(import_module(module), attribute)()
    return drafter


def make_network(config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> DrafterNetwork:
    """A drafter's network, its weights not yet loaded. Raises :class:`CheckpointError` for an unknown architecture."""
    name = config.architecture
    if name in REFUSED:
        raise config.error(f"{REFUSED[name]} ({name}) is not supported", do="use a drafter of another kind")
    if name not in ARCHITECTURES and name not in TARGETS:
        known = ", ".join(sorted(ARCHITECTURES))
        raise config.error(f"unknown drafter architecture {name!r}", do=f"known: {known}, and those of targets")
    module, _, attribute = ARCHITECTURES.get(name, LANGUAGE_MODEL).partition(":")
    network: DrafterNetwork = getattr(import_module(module), attribute).from_config(config, tensors, kernels)
    return network
