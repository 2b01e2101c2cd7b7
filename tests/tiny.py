"""Tiny checkpoints, models and engines, for the tests of several rooms."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foldspec import Engine
from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.cache.side import DraftCache
from foldspec.checkpoints.weights import load_into, read_headers
from foldspec.context import make_method
from foldspec.context.base import ContextMethod
from foldspec.context.reader import ContextReader
from foldspec.drafters import make_network
from foldspec.drafters.base import DrafterNetwork
from foldspec.drafters.conditioned import ConditionedNetwork
from foldspec.drafters.dflash import DFlash
from foldspec.engine import cache_folder
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.kernels.multi_read_attention import Entries
from foldspec.models.base import ForwardPlan, LanguageModel, model_class
from foldspec.models.config import ModelConfig
from foldspec.models.layers import join, settle, wide
from foldspec.options import MethodOptions
from foldspec.sampling import ARGMAX, DraftSampling

GOLDEN = Path(__file__).parent / "golden"
PAIRS = GOLDEN / "pairs"
CPU = torch.device("cpu")

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN3_5: dict[str, Any] = {
    **TARGET,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 5,
    "full_attention_interval": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "rope_theta": None,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 4,
}
_DRAFTER: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "num_target_layers": 4,
}
ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    **_DRAFTER,
    "dflash_config": {"block_size": 5, "mask_token_id": 127, "target_layer_ids": [0, 2]},
}
DEEPSPEC: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    **_DRAFTER,
    "block_size": 5,
    "mask_token_id": 127,
    "target_layer_ids": [0, 1, 2],
    "markov_rank": 0,
}


def changed(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with other values; None takes a key away."""
    return {k: v for k, v in {**config, **changes}.items() if v is not None}


def random_tensors(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, torch.Tensor]:
    """Weights that make every part of a network count: biases, norms and attention are far from doing nothing."""
    tensors = {}
    for name, shape in shapes.items():
        draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        x = torch.randn(*shape, generator=draw)
        if name.endswith("bias"):
            tensors[name] = 0.3 * x
        elif "norm" in name:
            tensors[name] = 1 + 0.2 * x
        elif name.endswith("layer_scalar"):
            tensors[name] = 0.9 + 0.2 * x.clamp(-1.5, 1.5)
        elif "embed_tokens" in name:
            tensors[name] = 0.5 * x
        else:
            tensors[name] = 1.5 * x / shape[-1] ** 0.5
    return tensors


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def _shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in module.state_dict().items()}


def write_target(folder: Path, config: Mapping[str, Any] = TARGET, seed: int = 0) -> Path:
    """A random target."""
    read = ModelConfig(dict(config), str(folder))
    model = model_class(read).from_config(read, (), Kernels())
    return write_checkpoint(folder, config, random_tensors(_shapes(model), seed))


def write_drafter(folder: Path, config: Mapping[str, Any], seed: int = 1, extra: Sequence[str] = ()) -> Path:
    """A random drafter; ``extra`` names tensors that a file may or may not have."""
    shapes = _shapes(make_network(ModelConfig(dict(config), str(folder)), extra, Kernels()))
    tensors = random_tensors({k: v for k, v in shapes.items() if k != "d2t"}, seed)
    if "d2t" in extra:
        count, vocabulary = config["draft_vocab_size"], config["vocab_size"]
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randperm(vocabulary, generator=draw)[:count].sort().values
        tensors["d2t"] = ids - torch.arange(count)
    return write_checkpoint(folder, config, tensors)


@functools.cache
def library() -> Library:
    """The compiled kernels, kept where engines keep them."""
    return Library(cache_folder() / "kernels")


def kernels_of(name: str = "auto") -> Kernels:
    return Kernels(name, library())


def load_target(
    folder: Path, kernels: str = "auto", dtype: torch.dtype = torch.float32, architecture: str | None = None
) -> LanguageModel:
    """A target with its weights, as an engine would load it; ``architecture`` in place of the one that it declares."""
    config, weights = ModelConfig.read(folder), read_headers(folder)
    if architecture is not None:
        config.values["architectures"] = [architecture]
    model = model_class(config).from_config(config, tuple(weights.entries), kernels_of(kernels))
    join(model, dtype, dtype, "cpu")
    load_into(model, weights, dtype=dtype, device="cpu", wide=wide(model), rename=model.parameter_name)
    settle(model, kernels_of(kernels), dtype)
    return model


def load_network(folder: Path, dtype: torch.dtype = torch.float32, kernels: str = "auto") -> DrafterNetwork:
    """A drafter's weights, as an engine would load them."""
    config, weights = ModelConfig.read(folder), read_headers(folder)
    network = make_network(config, tuple(weights.entries), kernels_of(kernels))
    join(network, dtype, dtype, "cpu")
    load_into(
        network,
        weights,
        dtype=dtype,
        device="cpu",
        wide=wide(network),
        rename=network.parameter_name,
        integer=network.integer,
    )
    settle(network, kernels_of(kernels), dtype)
    return network


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32, kernels: str = "auto") -> ConditionedNetwork:
    """The same of one that reads its context by a method."""
    network = load_network(folder, dtype, kernels)
    assert isinstance(network, ConditionedNetwork)
    return network


def load_pair(name: str) -> Engine:
    return Engine.load(target=str(PAIRS / name / "target"), drafter=str(PAIRS / name / "drafter"))


def paged_cache(
    model: LanguageModel,
    *,
    pages: int = 64,
    page_size: int = 16,
    dtype: Any = torch.float32,
    requests: int = 8,
    longest_pass: int = 512,
) -> PagedCache:
    """A target's cache whose slots hold NaN until they are written. Rings are the least that serve such requests."""
    cache = PagedCache(
        model.cache_spec(dtype),
        pages=pages,
        page_size=page_size,
        device="cpu",
        requests=requests,
        longest_pass=longest_pass,
    )
    poison(cache)
    return cache


def poison(cache: PagedCache) -> None:
    """Fill the pools with NaN, so that whatever is read without having been written shows."""
    for data in cache.tensors:
        data.fill_(torch.nan)


class PoisonedDraftCache(DraftCache):
    """A drafter's cache whose arrays hold NaN from the moment they exist."""

    def _empty(self, slots: int, width: int) -> torch.Tensor:
        return super()._empty(slots, width).fill_(torch.nan)


def draft_cache(
    network: ConditionedNetwork,
    *,
    pages: int = 64,
    page_size: int = 16,
    requests: int = 8,
    dtype: torch.dtype = torch.float32,
) -> DraftCache:
    spec = network.cache_spec(dtype)
    return PoisonedDraftCache(spec, pages=pages, page_size=page_size, max_requests=requests, device="cpu")


def method_of(network: ConditionedNetwork, **options: Any) -> ContextMethod:
    return make_method(MethodOptions(**options), network.layer_facts, network.block)


def bind(
    network: ConditionedNetwork,
    model: LanguageModel,
    cache: DraftCache,
    kernels: str = "auto",
    sampling: DraftSampling = ARGMAX,
    **options: Any,
) -> DFlash:
    """A drafter at work over a cache."""
    method = method_of(network, **options)
    reader = ContextReader(method, cache, network.rope, kernels_of(kernels), network.scale)
    drafter = network.drafter(model, reader, sampling)
    assert isinstance(drafter, DFlash)
    return drafter


@torch.inference_mode()
def forward(
    model: LanguageModel, cache: PagedCache, ids: Sequence[Sequence[int]], requests: Sequence[int], taps: Any = ()
) -> Any:
    """One forward over rows that follow what each request's cache holds."""
    starts = [cache.tables.length(request) for request in requests]
    rows = Rows.of(requests, starts, [len(piece) for piece in ids])
    return model(torch.tensor([i for piece in ids for i in piece]), ForwardPlan(rows, tuple(taps)), cache)


def dense(entries: Entries) -> torch.Tensor:
    """The entries in order, as one tensor."""
    return torch.cat([entries.data[slot : slot + count] for slot, count in entries.runs] or [entries.data[:0]])


@functools.cache
def golden_cases(pair: str) -> dict[str, dict[str, Any]]:
    """file stem -> golden file of a pair."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((PAIRS / pair / "golden").glob("*.json"))}


def prompt(length: int, vocabulary: int = 128, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, vocabulary, (length,), generator=draw).tolist()
