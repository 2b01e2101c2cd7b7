"""Gemma 4's configs: either spelling of a layer's geometry, what is derived where it is absent, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gemma
import oracles
import pytest
import tiny
import torch

from foldspec.cache.paged import CacheSpec
from foldspec.errors import CheckpointError
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import model_class
from foldspec.models.config import ModelConfig
from foldspec.models.gemma4 import Gemma4, layers_of

SLIDING, FULL = "sliding_attention", "full_attention"


def read(**changes: Any) -> ModelConfig:
    return ModelConfig(tiny.changed(gemma.TARGET, **changes), "config.json")


def geometry(config: ModelConfig) -> list[tuple[int, int, int | None, bool]]:
    """(kv heads, head size, window, whether values are raw keys) of every layer."""
    layers = layers_of(config)
    return [(x.geometry.kv_heads, x.geometry.head_dim, x.window, x.raw_keys) for x in layers]


def test_a_layer_has_its_own_geometry() -> None:
    sliding, full = (2, 8, 4, False), (1, 16, None, True)
    published = geometry(read())
    assert published == [sliding, full, sliding, full]
    resaved = {"global_head_dim": None, "num_global_key_value_heads": None}
    for one, three in (("1", "3"), ("01", "03")):  # transformers pads them to one length
        own = {"head_dim": 16, "num_key_value_heads": 1}
        assert geometry(read(**resaved, per_layer_config={one: own, three: own})) == published
    own = {"head_dim": 8}
    assert geometry(read(**resaved, per_layer_config={"0": {"head_dim": 16}})) == [
        (2, 16, 4, False),
        (2, 8, None, True),
        sliding,
        (2, 8, None, True),
    ]
    assert geometry(read(**resaved, per_layer_config={})) == [sliding, (2, 8, None, True)] * 2


def test_key_value_heads_of_full_layers() -> None:
    """Their own only where values are raw keys."""
    for changes in ({"num_global_key_value_heads": None}, {"attention_k_eq_v": False}, {"attention_k_eq_v": None}):
        raw = "attention_k_eq_v" not in changes
        assert geometry(read(**changes))[1] == (2, 16, None, raw)


def test_layers_that_are_not_listed() -> None:
    """Every sixth is full, and the last one always."""

    def kinds(count: int, **changes: Any) -> list[str]:
        return [layer.kind for layer in layers_of(read(num_hidden_layers=count, **changes))]

    assert kinds(12, layer_types=None) == [*[SLIDING] * 5, FULL] * 2
    assert kinds(8, layer_types=None) == [*[SLIDING] * 5, FULL, SLIDING, FULL]
    assert kinds(2, layer_types=None) == [SLIDING, FULL]
    assert kinds(3, layer_types=[FULL, SLIDING, SLIDING]) == [FULL, SLIDING, FULL]


def test_layers_of_one_geometry_share_a_pool() -> None:
    model = model_class(read()).from_config(read(), (), Kernels())
    spec = model.cache_spec(torch.bfloat16)
    assert spec.pools == (CacheSpec(2, 2, 8, 8, torch.bfloat16, 4), CacheSpec(2, 1, 16, 16, torch.bfloat16))
    assert spec.pool_of == (0, 1, 0, 1)
    assert spec.bytes_per_entry == 2 * 1 * 32 * 2 and spec.bytes_per_request(10, 1000) == 13 * 2 * 2 * 16 * 2


def test_the_published_sizes() -> None:
    """12B: 40 sliding and 8 full layers; the rings of 1023 + n entries are all that sliding layers take."""
    config = read(
        vocab_size=262144,
        hidden_size=3840,
        intermediate_size=15360,
        num_hidden_layers=48,
        layer_types=None,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        global_head_dim=512,
        sliding_window=1024,
    )
    model = Gemma4.from_config(config, (), Kernels())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def projections(layer: int, names: str) -> list[tuple[int, ...] | None]:
        return [shapes.get(f"model.layers.{layer}.self_attn.{name}_proj.weight") for name in names]

    assert projections(0, "qkvo") == [(4096, 3840), (2048, 3840), (2048, 3840), (3840, 4096)]
    assert projections(5, "qkvo") == [(8192, 3840), (512, 3840), None, (3840, 8192)]
    assert model.lm_head is None
    spec = model.cache_spec(torch.bfloat16)
    assert spec.bytes_per_entry == 8 * 2 * 512 * 2 and spec.bytes_per_request(16, 10**6) == 1039 * 40 * 8 * 2 * 256 * 2


@pytest.mark.parametrize(("width", "rounded"), [(3840, 62.0), (5376, 73.5), (2816, 53.0)])
def test_the_scale_of_the_embedding_is_rounded_to_the_dtype_of_the_rows(width: int, rounded: float) -> None:
    model = Gemma4.from_config(read(hidden_size=width, vocab_size=3), (), Kernels())
    for dtype, wanted in ((torch.bfloat16, rounded), (torch.float32, width**0.5)):
        for part, shape in ((model.model.embed_tokens, (3, width)), (model.model.norm, (width,))):
            part.weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=False)
        assert torch.equal(model.embed(torch.tensor([2])), torch.full((1, width), wanted, dtype=dtype))
        assert torch.equal(model.embed(torch.tensor([2]), 0.25), torch.full((1, width), 0.25, dtype=dtype))


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_a_config_of_either_spelling_reads_the_same_checkpoint(tmp_path: Path) -> None:
    """As transformers writes it, and as published: in the wrapper and, with the names of an export, alone."""
    folder = gemma.write(tmp_path / "resaved", next(iter(gemma.VARIANTS)))
    wrapper = json.loads((folder / "config.json").read_text())
    text = wrapper["text_config"]
    own = text.pop("per_layer_config")
    assert own == {"05": {"head_dim": 24, "num_key_value_heads": 1}, "11": {"head_dim": 24, "num_key_value_heads": 1}}
    text |= {"global_head_dim": 24, "num_global_key_value_heads": 1}
    text.pop("layer_types")
    ids = tiny.prompt(40, 131)
    logits = []
    for i, config in enumerate((None, wrapper, {**text, "architectures": ["Gemma4UnifiedForCausalLM"]})):
        other = shutil.copytree(folder, tmp_path / str(i))
        if config is not None:
            (other / "config.json").write_text(json.dumps(config))
        model = tiny.load_target(other)
        logits.append(oracles.feed(model, oracles.opened(model), ids, [40]))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_names_of_other_towers_are_passed_over() -> None:
    for tower in ("vision_tower.x", "vision_embedder.x", "embed_vision.x", "audio_tower.x", "embed_audio.x"):
        assert Gemma4.parameter_name(f"model.{tower}.weight") is None
    same = "model.layers.0.layer_scalar"
    assert Gemma4.parameter_name("model.language_model.layers.0.layer_scalar") == same == Gemma4.parameter_name(same)


def test_a_head_in_the_file_is_the_head(tmp_path: Path) -> None:
    folder = gemma.write_target(tmp_path)
    config = ModelConfig.read(folder)
    for tensors, own in (((), False), (("lm_head.weight",), True)):
        for tied in (True, False, None):
            values = tiny.changed(config.values, tie_word_embeddings=tied)
            model = Gemma4.from_config(ModelConfig(values, ""), tensors, Kernels())
            assert (model.lm_head is not None) is own and (model.head_matrix is model.model.embed_tokens) is not own


# ------------------------------------------------------------------------------------------------------------- refusals

ROPES = gemma.TARGET["rope_parameters"]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input = 256 is not supported"),
    ({"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2 is not supported"),
    ({"use_double_wide_mlp": True}, "use_double_wide_mlp = True is not supported"),
    ({"enable_moe_block": True}, "enable_moe_block = True is not supported"),
    ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not supported"),
    ({"attention_bias": True}, "attention_bias = True is not supported"),
    ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention of text is not supported"),
    ({"rope_parameters": {**ROPES, FULL: {"rope_type": "longrope", "rope_theta": 1e6}}}, "rope type 'longrope'"),
    ({"rope_parameters": {SLIDING: ROPES[SLIDING]}}, "rope_theta is missing"),
    ({"layer_types": [FULL] * 3}, "layer_types has 3 entries for 4 layers"),
    ({"layer_types": [FULL, "linear_attention", FULL, FULL]}, "unknown layer type 'linear_attention'"),
    ({"sliding_window": None}, "sliding_window is missing"),
    ({"sliding_window": 0}, "sliding_window must be"),
    ({"head_dim": None}, "head_dim is missing"),
    ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
    ({"global_head_dim": None}, "global_head_dim is missing"),
    ({"num_global_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of 3 kv heads"),
    ({"per_layer_config": {"4": {"head_dim": 16}}}, "'4' is none of 4 layers"),
    ({"per_layer_config": {"-1": {"head_dim": 16}}}, "'-1' is none of 4 layers"),
    ({"per_layer_config": {"1": {"intermediate_size": 16}}}, "intermediate_size of one layer is not supported"),
    ({"final_logit_softcapping": -1.0}, "final_logit_softcapping must be a positive number"),
    ({"final_logit_softcapping": "30"}, "final_logit_softcapping must be"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes)[:60] for changes, _ in REFUSED])
def test_what_changes_the_maths_or_is_impossible_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Gemma4.from_config(read(**changes), (), Kernels())
    wrapper = ModelConfig({"text_config": read(**changes).values}, "config.json")
    with pytest.raises(CheckpointError, match=message):
        Gemma4.from_config(wrapper, (), Kernels())


@pytest.mark.parametrize(
    ("name", "keys"),
    [("gemma4_ple", {"num_kv_shared_layers", "hidden_size_per_layer_input"}), ("gemma4_moe", {"enable_moe_block"})],
)
def test_flavours_that_are_not_built_are_refused_by_their_keys(name: str, keys: set[str]) -> None:
    """The published configs of models with per-layer embeddings, shared keys and experts, made small. Every key alone
    is enough."""
    config = ModelConfig.read(tiny.GOLDEN / "tiny" / name)
    named = set()
    for _ in range(len(keys)):
        with pytest.raises(CheckpointError) as caught:
            model_class(config).from_config(config, (), Kernels())
        key = str(caught.value).partition(" = ")[0].rpartition(" ")[2]
        named.add(key)
        (config.values if key in config.values else config.values["text_config"])[key] = None
    assert keys <= named
