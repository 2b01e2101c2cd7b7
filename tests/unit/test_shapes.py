"""Tensor lists from the registry's configs alone, against what was published and what foldspec's classes ask of a
file. (tests/parity/test_shapes.py compares them with transformers.)"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from foldspec import loading
from foldspec.checkpoints.headers import Weights, read_headers
from foldspec.checkpoints.registry import Pair, Source, load_registry
from foldspec.checkpoints.shapes import list_tensors, side_cache
from foldspec.drafters import ARCHITECTURES as DRAFTERS
from foldspec.drafters import KINDS
from foldspec.engine import cache_folder
from foldspec.errors import CheckpointError, PairError
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ARCHITECTURES as TARGETS
from foldspec.options import EngineOptions

REGISTRY = load_registry()
KERNELS = Kernels.of(EngineOptions())

# name: (tensors, bytes of all), where published: drafters by the sizes of their files, targets by their indices
PUBLISHED = {
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": (58, 2_097_252_864),
    "z-lab/Qwen3.5-9B-DFlash": (69, 2_583_809_024),
    "z-lab/Qwen3-8B-DFlash-b16": (58, 2_097_252_864),
    "deepseek-ai/dflash_qwen3_8b_block7": (60, 4_586_572_288),
    "deepseek-ai/dspark_qwen3_8b_block7": (64, 4_742_163_458),
    "deepseek-ai/dflash_gemma4_12b_block7": (70, 6_592_445_450),
    "deepseek-ai/dspark_gemma4_12b_block7": (74, 6_860_889_100),
    "NousResearch/Meta-Llama-3.1-8B-Instruct": (291, 16_060_522_496),
    "Qwen/Qwen3-8B": (399, 16_381_470_720),
    "Qwen/Qwen3.5-9B": (None, 19_306_216_416),
    "Qwen/Qwen2.5-32B-Instruct": (None, 65_527_752_704),
    "Dream-org/Dream-v0-Instruct-7B": (None, 15_231_233_024),
    "google/diffusiongemma-26B-A4B-it": (1047, None),
}


def listed(name: str, **changes: Any) -> Weights:
    return list_tensors({**REGISTRY.checkpoints[name].config, **changes}, name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_totals(name: str) -> None:
    tensors, size = PUBLISHED[name]
    weights = listed(name)
    assert tensors in (None, len(weights.entries)) and size in (None, weights.size)
    assert weights.size == sum(math.prod(e.shape) * (4 if e.dtype == "F32" else 2) for e in weights.entries.values())


def test_the_parts_of_diffusion_gemma() -> None:
    names = list(listed("google/diffusiongemma-26B-A4B-it").entries)
    scalars = [name for name in names if name.startswith("model.encoder.language_model.")]
    vision = [name for name in names if name.startswith(("model.encoder.vision_tower.", "model.encoder.embed_vision."))]
    conditioning = [name for name in names if ".self_conditioning." in name]
    layers = [name for name in names if name.startswith("model.decoder.layers.")]
    assert (len(scalars), len(vision), len(conditioning)) == (30, 356, 4)
    assert [sum(name.startswith(f"model.decoder.layers.{i}.") for name in layers) for i in (0, 4, 5, 29)] == [
        22
    ] * 2 + [21] * 2
    assert len(layers) + 2 == 657 and len(names) == 657 + 30 + 4 + 356


GIB = 1 << 30


@pytest.mark.parametrize(
    ("drafter", "entries", "layers", "gib"),
    [
        ("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", 131_072, None, 2.5),
        ("deepseek-ai/dflash_gemma4_12b_block7", 262_144, None, 2.5),
        ("deepseek-ai/dspark_gemma4_12b_block7", 262_144, None, 2.5),
        ("deepseek-ai/dflash_qwen3_8b_block7", 32_768, None, 0.625),  # the paper's 0.63
        ("z-lab/Qwen3.5-9B-DFlash", 262_144, None, 6.0),
        ("z-lab/Qwen3.5-9B-DFlash", 262_144, {5}, 1.0),  # the full layer alone
    ],
)
def test_the_papers_side_cache(drafter: str, entries: int, layers: set[int] | None, gib: float) -> None:
    assert side_cache(listed(drafter), entries, layers) == gib * GIB


@pytest.mark.parametrize("name", [n for n, s in REGISTRY.checkpoints.items() if s.kind == "dflash" and s.config])
def test_the_side_cache_is_what_the_drafter_keeps_of_an_entry(name: str) -> None:
    source = REGISTRY.checkpoints[name]
    checkpoint = loading._known(source)
    network = loading.make_network(checkpoint.config, tuple(checkpoint.weights.entries), KERNELS)
    assert side_cache(checkpoint.weights, 3) == 3 * network.cache_spec(torch.bfloat16).bytes_per_entry


@pytest.mark.parametrize("name", REGISTRY.pairs)
def test_the_classes_accept_the_lists_like_files(name: str) -> None:
    """Each name and shape of both lists, as of a file that is loaded; and the two fit together. What has no class yet
    is refused for that."""
    pair = REGISTRY.pairs[name]
    assert pair.drafter is not None
    target = pair.target.config["architectures"][0]
    if target in TARGETS:
        found = loading.built_in(pair, KERNELS, alone=True)
        state = found.model.state_dict()
        assert all(t.is_meta for t in state.values())
        ours = [e for n, e in found.target.weights.entries.items() if found.model.parameter_name(n) is not None]
        assert sum(t.numel() for t in state.values()) == sum(math.prod(e.shape) for e in ours)
    drafter = pair.drafter.config.get("architectures", ["DFlashDraftModel"])[0]
    runs = target in TARGETS and drafter in {*DRAFTERS, *TARGETS}
    if runs and pair.drafter.kind in KINDS:
        found = loading.built_in(pair, KERNELS)
        assert found.network is not None and (found.network.block or pair.block or 0) > 1
        facts = found.network.facts
        assert abs(found.model.vocabulary - facts.vocabulary) <= facts.padding
        return
    with pytest.raises(CheckpointError) as caught:
        loading.built_in(pair, KERNELS)
    words = ("unknown target architecture", "unknown drafter architecture", "which this version does not run")
    assert any(word in str(caught.value) for word in (*words, "enable_confidence_head"))


LLAMA = REGISTRY.pairs["llama-3.1-8b-dflash"]
assert LLAMA.drafter is not None


def with_config(source: Source, **changes: Any) -> Source:
    return dataclasses.replace(source, config={**source.config, **changes})


def with_drafter(**changes: Any) -> Pair:
    assert LLAMA.drafter is not None
    return dataclasses.replace(LLAMA, drafter=with_config(LLAMA.drafter, **changes))


def taps(*layers: int) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": 128002, "target_layer_ids": list(layers)}}


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        (with_drafter(hidden_size=2048), "it was made for hidden size 2048, the target has 4096"),
        (with_drafter(vocab_size=151936), "it was made for 151936 ids"),
        (with_drafter(num_target_layers=36), "it was made for 36 layers, the target has 32"),
        (with_drafter(**taps(1, 8, 31)), r"not all in 0 .. 30"),
        (with_drafter(**taps(8, 1)), "do not increase"),
    ],
)
def test_a_registry_whose_pair_does_not_fit(pair: Pair, says: str) -> None:
    with pytest.raises(PairError, match=says):
        loading.built_in(pair, KERNELS)


@pytest.mark.parametrize(
    "change",
    [
        lambda shapes: shapes.pop("norm.weight"),
        lambda shapes: shapes.update({"layers.0.self_attn.q_proj.bias": (4096,)}),
        lambda shapes: shapes.update({"fc.weight": (4096, 4 * 4096)}),
    ],
)
def test_a_list_that_the_classes_do_not_expect(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    from foldspec.checkpoints import shapes

    def wrong(config: Any) -> Any:
        made = shapes._dflash(config)
        change(made)
        return made

    monkeypatch.setitem(shapes._LISTS, "DFlashDraftModel", wrong)
    with pytest.raises(CheckpointError, match="tensors"):
        loading.built_in(LLAMA, KERNELS)


PREPARED = cache_folder() / "smollm2-135m-instruct"


@pytest.mark.skipif(not (PREPARED / "config.json").exists(), reason="the embedded target is not prepared here")
def test_the_embedded_target_is_as_the_registry_says() -> None:
    source, real = REGISTRY.checkpoints["smollm2-135m-instruct"], read_headers(PREPARED)
    assert source.contradictions(json.loads((PREPARED / "config.json").read_text())) == []
    weights = list_tensors(source.config, source.name)
    assert (weights.shapes, weights.dtypes) == (real.shapes, real.dtypes)


def test_configs_that_are_not_enough() -> None:
    with pytest.raises(CheckpointError, match="a/b: the tensors of Mamba cannot be listed from its config"):
        list_tensors({"architectures": ["Mamba"]}, "a/b")
    with pytest.raises(CheckpointError, match="a/b: the tensors of no architecture cannot"):
        list_tensors({}, "a/b")
    with pytest.raises(CheckpointError, match="a/b: its config lacks 'hidden_size'"):
        list_tensors({"architectures": ["LlamaForCausalLM"], "vocab_size": 3}, "a/b")
    with pytest.raises(CheckpointError, match="a/b: its config lacks 'float8'"):
        listed_config = {**REGISTRY.checkpoints["Qwen/Qwen3-8B"].config, "dtype": "float8"}
        list_tensors(listed_config, "a/b")
