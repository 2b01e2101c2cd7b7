"""config.json through checked getters: the first thing that is wrong is named with its file, and nothing is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from foldspec.errors import CheckpointError
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ARCHITECTURES, model_class
from foldspec.models.config import UNSUPPORTED, ModelConfig
from foldspec.models.layers import Geometry
from foldspec.models.llama import Llama


def config(**values: Any) -> ModelConfig:
    return ModelConfig(values, "config.json")


def test_values_of_the_right_kind_come_through() -> None:
    c = config(n=3, x=0.5, whole=2, yes=True, ids=[3, 1], part={"a": 1}, none=None, architectures=["A", "B"])
    assert c.whole("n") == 3 and c.number("x") == 0.5 and c.number("whole") == 2.0 and c.flag("yes") is True
    assert c.wholes("ids") == (3, 1) and c.architecture == "A"
    assert c.part("part").whole("a") == 1 and c.part("part").where == "config.json part"
    assert c.has("n") and not c.has("none") and not c.has("absent")


def test_absent_and_null_take_the_default_or_are_missing() -> None:
    c = config(none=None)
    for key in ("none", "absent"):
        assert c.whole(key, 7) == 7 and c.number(key, 1.5) == 1.5 and c.flag(key) is False and c.part(key).values == {}
        for read in (c.whole, c.number, c.wholes, lambda k: c.get(k, str)):
            with pytest.raises(CheckpointError, match=f"config.json: {key} is missing"):
                read(key)


WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"k": "3"}, "whole", "k", "k must be int, not '3'"),
    ({"k": 3.0}, "whole", "k", "k must be int, not 3.0"),
    ({"k": True}, "whole", "k", "k must be int, not True"),
    ({"k": 0}, "whole", "k", "k must be [^,]*1.*, not 0"),
    ({"k": -1}, "whole", "k", "k must be [^,]*1.*, not -1"),
    ({"k": "1e-5"}, "number", "k", "k must be int or float, not '1e-5'"),
    ({"k": False}, "number", "k", "k must be int or float, not False"),
    ({"k": 1}, "flag", "k", "k must be bool, not 1"),
    ({"k": "true"}, "flag", "k", "k must be bool, not 'true'"),
    ({"k": 3}, "wholes", "k", "k must be list, not 3"),
    ({"k": []}, "wholes", "k", "k must be a list of whole numbers"),
    ({"k": [1, 2.0]}, "wholes", "k", "k must be a list of whole numbers"),
    ({"k": [True]}, "wholes", "k", "k must be a list of whole numbers"),
    ({"k": [1]}, "part", "k", "k must be an object, not .1."),
]


@pytest.mark.parametrize(("values", "getter", "key", "message"), WRONG)
def test_values_of_the_wrong_kind_are_named(values: dict[str, Any], getter: str, key: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {message}") as error:
        getattr(config(**values), getter)(key)
    assert error.value.exit_code == 3


@pytest.mark.parametrize("value", [None, [], [3], "LlamaForCausalLM", [None]])
def test_an_architecture_that_cannot_be_read(value: Any) -> None:
    with pytest.raises(CheckpointError, match="architectures"):
        _ = config(architectures=value).architecture


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no config.json; name a checkpoint folder"),
        ("{", "cannot be read as JSON"),
        ("\udce9", "cannot be read as JSON"),
        ("[1, 2]", "is not a JSON object"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=message) as error:
        ModelConfig.read(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_keys_that_change_the_maths_are_refused_unless_they_change_nothing() -> None:
    for harmless in ({}, {"scale": None}, {"scale": 1.0}, {"scale": 1}):
        config(**harmless).refuse(scale=1.0)
    with pytest.raises(CheckpointError, match=r"config\.json: scale = 2\.0 is not supported"):
        config(scale=2.0).refuse(scale=1.0)


# ------------------------------------------------------------------------------------------------------------- wrappers


def test_a_wrapper_holds_the_settings_of_its_language_model() -> None:
    wrapper = config(text_config={"vocab_size": 3, "eos_token_id": 2}, vocab_size=9, hidden_size=7)
    assert wrapper.text().whole("vocab_size") == 3 and not wrapper.text().has("hidden_size")
    with pytest.raises(CheckpointError, match=r"config\.json text_config: hidden_size is missing"):
        wrapper.text().whole("hidden_size")
    plain = config(vocab_size=9)
    assert plain.text() is plain


@pytest.mark.parametrize(("top", "inner"), [(None, None), (True, None), (None, True), (True, False), (False, False)])
def test_a_head_is_tied_if_the_wrapper_or_its_text_says_so(top: bool | None, inner: bool | None) -> None:
    wrapper = config(tie_word_embeddings=top, text_config={"tie_word_embeddings": inner})
    assert wrapper.text().flag("tie_word_embeddings") is (True in (top, inner))


def test_the_dtype_in_either_spelling_and_place() -> None:
    for values in (
        {"dtype": "float16"},
        {"torch_dtype": "float16"},
        {"dtype": None, "torch_dtype": "float16"},
        {"text_config": {"dtype": "float16"}},
        {"dtype": "float16", "text_config": {"dtype": "float32"}},
    ):
        assert config(**values).dtype == "float16"
    assert config(text_config={}).dtype == config().dtype == "bfloat16"
    with pytest.raises(CheckpointError, match="dtype must be str, not 16"):
        _ = config(dtype=16).dtype


CHANGES = {
    "quantization_config": {"quant_method": "fp8"},
    "use_sliding_window": True,
    "num_kv_shared_layers": 18,
    "hidden_size_per_layer_input": 256,
    "use_double_wide_mlp": True,
    "enable_moe_block": True,
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_changes_the_maths_of_any_model_is_refused_by_name(key: str) -> None:
    assert set(CHANGES) == set(UNSUPPORTED)
    for where, values in (("", {key: CHANGES[key]}), (" text_config", {"text_config": {key: CHANGES[key]}})):
        with pytest.raises(CheckpointError, match=rf"config\.json{where}: {key} = .* is not supported"):
            config(**values).text()
    for harmless in (None, UNSUPPORTED[key]):
        assert config(**{key: harmless}).text().values == {key: harmless}


def test_names_in_checkpoints_that_differ_from_those_of_parameters() -> None:
    class Wrapped(Llama):
        renamed = {"model.language_model.": "model."}  # noqa: RUF012
        ignored = ("model.visual.", "mtp.")

    assert Wrapped.parameter_name("model.language_model.layers.0.norm.weight") == "model.layers.0.norm.weight"
    for same in ("model.layers.0.norm.weight", "lm_head.weight", "model.visually.weight", "xmtp.fc.weight"):
        assert Wrapped.parameter_name(same) == same
    for nothing in ("model.visual.blocks.0.weight", "mtp.fc.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"):
        assert Wrapped.parameter_name(nothing) is None
    assert Llama.parameter_name("mtp.fc.weight") == "mtp.fc.weight"


# -------------------------------------------------------------------------------------------------------------- targets


def target(**changes: Any) -> Any:
    c = ModelConfig(tiny.changed(tiny.TARGET, **changes), "config.json")
    return model_class(c).from_config(c, (), Kernels())


def test_what_a_target_reads_from_its_config() -> None:
    model = target(head_dim=12, tie_word_embeddings=True)
    assert (model.vocabulary, model.width, model.layer_count, model.max_positions) == (128, 32, 4, 4096)
    assert model.geometry == Geometry(32, 48, 4, 4, 2, 12, 1e-5)
    assert "lm_head.weight" not in model.state_dict() and not any("bias" in k for k in model.state_dict())
    assert "lm_head.weight" in target().state_dict() and target().geometry.head_dim == 8
    assert target(num_key_value_heads=None).geometry.kv_heads == 4


MISSING = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MISSING += ("rms_norm_eps", "max_position_embeddings", "rope_theta")


@pytest.mark.parametrize("key", MISSING)
def test_nothing_that_a_target_needs_is_guessed(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {key} is missing"):
        target(**{key: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of 3 kv heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2 is not supported"),
        ({"architectures": ["MambaForCausalLM"]}, "unknown target architecture 'MambaForCausalLM'; known: .*Llama"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
        ({"vocab_size": "128"}, "vocab_size must be int"),
        ({"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window = True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types other than full_attention"),
        ({"rope_interleaved": True}, "rope_interleaved = True is not supported"),
        ({"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor = 0.5 is not supported"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "config.json rope_scaling: partial_rotary_factor = 0.5"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window = True"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "config.json: head_dim is missing"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "num_kv_shared_layers": 1}, "num_kv_shared_layers = 1"),
    ],
)
def test_what_a_target_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        target(**changes)


def test_keys_that_change_nothing_here() -> None:
    harmless = {"sliding_window": 32, "max_window_layers": 1, "use_sliding_window": False, "rope_interleaved": False}
    assert target(**harmless, layer_types=["full_attention"] * 4, num_kv_shared_layers=0).layer_count == 4


def test_a_stretched_rope_stretches_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert target(rope_scaling=yarn).max_positions == 8192  # as Qwen3's card has it, beside 4096 that stays
    assert target(rope_scaling={**yarn, "factor": 1.5}).max_positions == 4096
    assert target(rope_scaling={"rope_type": "yarn", "factor": 4.0}).max_positions == 4096


BIASES = {  # a tensor of the file, and the parameters that there are then
    "": [],
    "self_attn.k_proj.bias": ["k_proj", "q_proj", "v_proj"],
    "self_attn.o_proj.bias": ["o_proj"],
    "mlp.up_proj.bias": ["down_proj", "gate_proj", "up_proj"],
}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tensor", BIASES)
def test_biases_are_there_if_the_file_has_them(architecture: str, tensor: str) -> None:
    """All of a kind: where one of q, k and v has a bias and another has not, that one is missing."""
    c = ModelConfig(tiny.changed(tiny.TARGET, architectures=[architecture], head_dim=8), "config.json")
    model = model_class(c).from_config(c, (f"model.layers.3.{tensor}",), Kernels())
    found = {name.split(".")[-2] for name in model.state_dict() if name.endswith(".bias")}
    assert sorted(found) == BIASES[tensor]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_known_target_can_be_imported(name: str) -> None:
    assert model_class(config(architectures=[name])).from_config is not None
