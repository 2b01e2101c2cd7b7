"""A DFlash drafter's config.json: both formats, both spellings of each, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gemma
import pytest
import tiny
import torch
from safetensors.torch import load_file

from foldspec import Engine, SamplingParams
from foldspec.context.base import DrafterLayer
from foldspec.drafters import ARCHITECTURES, make_network
from foldspec.drafters.dflash import DFlashConfig
from foldspec.drafters.dspark import HeadsConfig
from foldspec.drafters.gemma4_dspark import Gemma4Network
from foldspec.errors import CheckpointError, PairError, UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.models.config import ModelConfig
from foldspec.models.rope import Rope

FORMATS = {"z-lab": tiny.ZLAB, "DeepSpec": tiny.DEEPSPEC}
NESTED = ("block_size", "mask_token_id", "target_layer_ids")
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
SURE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
DSPARK = {**tiny.DEEPSPEC, "markov_rank": 8, **SURE}


def read(config: dict[str, Any], tensors: tuple[str, ...] = ()) -> DFlashConfig:
    return DFlashConfig.from_config(ModelConfig(config, "config.json"), tensors)


def with_drafter(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Changes where the format keeps a drafter's own fields."""
    if "dflash_config" not in config:
        return tiny.changed(config, **changes)
    return {**config, "dflash_config": tiny.changed(config["dflash_config"], **changes)}


def refuses(config: dict[str, Any], message: str, tensors: tuple[str, ...] = ()) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        make_network(ModelConfig(config, "config.json"), tensors, Kernels())
    assert "config.json" in str(error.value)


# --------------------------------------------------------------------------------------------------------- what is read


def test_zlab() -> None:
    config = read(tiny.ZLAB)
    assert (config.block, config.first_row, config.max_drafts) == (5, 1, 4)
    assert (config.mask_id, config.taps, config.vocabulary, config.target_layers) == (127, (0, 2), 128, 4)
    assert (config.own_embedding, config.own_head, config.draft_ids, config.attention_bias) == (False,) * 2 + (
        None,
        False,
    )
    assert config.layers == (DrafterLayer(),) * 3
    assert config.facts == config.facts.__class__("config.json", 32, 128, (0, 2), 4, 127)


def test_deepspec() -> None:
    config = read(tiny.DEEPSPEC, ("embed_tokens.weight", "lm_head.weight"))
    assert (config.block, config.first_row, config.max_drafts) == (5, 0, 5)
    assert (config.mask_id, config.taps) == (127, (0, 1, 2))
    assert config.own_embedding and config.own_head and config.draft_ids is None


def test_the_format_is_told_by_the_architecture_alone() -> None:
    """DeepSpec's DFlash files carry the class name of DSpark; where the fields stand decides nothing."""
    flat = {**tiny.ZLAB, "block_size": 6}
    assert read(flat).first_row == 1 and read(flat).block == 5
    assert read({**tiny.DEEPSPEC, "dflash_config": {"block_size": 9}}).block == 5
    assert read(tiny.changed(tiny.DEEPSPEC, markov_rank=None)).first_row == 0


def test_early_zlab_files_keep_the_block_size_at_the_top() -> None:
    config = with_drafter({**tiny.ZLAB, "block_size": 7}, block_size=None)
    assert read(config).block == 7
    assert read({**tiny.ZLAB, "block_size": 7}).block == 5  # the nested one wins


@pytest.mark.parametrize("name", FORMATS)
def test_both_spellings_of_the_rope(name: str) -> None:
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = {**FORMATS[name], "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    new = tiny.changed(
        FORMATS[name], rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    )
    positions = torch.arange(0, 90, 7)
    for a, b in zip(read(old).rope.at(positions), read(new).rope.at(positions), strict=True):
        assert torch.equal(a, b)
    plain = Rope.from_config(ModelConfig({"rope_theta": 5e5}, ""), 12)
    assert not torch.equal(read(old).rope.at(positions)[0], plain.at(positions)[0])


@pytest.mark.parametrize("name", FORMATS)
def test_layer_kinds(name: str) -> None:
    """Sliding layers are causal inside the block and full ones are not, unless is_causal says otherwise for all."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = {**FORMATS[name], "layer_types": kinds, "sliding_window": 9, "use_sliding_window": False}
    assert read(config).layers == (DrafterLayer(9, True), DrafterLayer(None, False), DrafterLayer(9, True))
    for causal in (True, False):
        wanted = (DrafterLayer(9, causal), DrafterLayer(None, causal), DrafterLayer(9, causal))
        assert read({**config, "is_causal": causal}).layers == wanted
        assert read(with_drafter(config, causal=causal)).layers == wanted
        assert read(with_drafter({**config, "is_causal": causal}, causal=not causal)).layers == wanted  # it wins
    assert read({**FORMATS[name], "sliding_window": 9}).layers == (DrafterLayer(),) * 3  # absent types: all full
    with_window = {**FORMATS[name], "layer_types": ["full_attention"] * 3, "sliding_window": 9}
    assert read(with_window).layers == (DrafterLayer(),) * 3


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("own", [(), ("embed_tokens.weight",), ("lm_head.weight",)])
def test_embedding_and_head_exist_by_presence(name: str, own: tuple[str, ...]) -> None:
    network = make_network(ModelConfig(FORMATS[name], "config.json"), own, Kernels())
    state = network.state_dict()
    assert {key for key in ("embed_tokens.weight", "lm_head.weight") if key in state} == set(own)
    assert all(state[key].shape == (128, 32) for key in own)


@pytest.mark.parametrize("head", [(), ("lm_head.weight",)])
def test_a_restricted_vocabulary(head: tuple[str, ...]) -> None:
    config = ModelConfig({**tiny.DEEPSPEC, "draft_vocab_size": 40}, "config.json")
    network = make_network(config, ("d2t", *head), Kernels())
    assert network.state_dict()["d2t"].shape == (40,) and network.state_dict()["d2t"].dtype == torch.int64
    assert network.integer == {"d2t"}
    if head:
        assert network.state_dict()["lm_head.weight"].shape == (40, 32)


def test_the_tensors_are_those_of_the_specification() -> None:
    """58 of a five-layer z-lab drafter; with biases, one on each of the four projections."""
    config = {**tiny.ZLAB, "num_hidden_layers": 5}
    shapes = {k: tuple(t.shape) for k, t in make_network(ModelConfig(config, ""), (), Kernels()).state_dict().items()}
    assert len(shapes) == 58
    assert shapes["fc.weight"] == (32, 2 * 32) and shapes["hidden_norm.weight"] == shapes["norm.weight"] == (32,)
    attention = {
        k.removeprefix("layers.4.self_attn."): v for k, v in shapes.items() if k.startswith("layers.4.self_attn.")
    }
    assert attention == {
        "q_proj.weight": (48, 32),
        "k_proj.weight": (24, 32),
        "v_proj.weight": (24, 32),
        "o_proj.weight": (32, 48),
        "q_norm.weight": (12,),
        "k_norm.weight": (12,),
    }
    biased = make_network(ModelConfig({**config, "attention_bias": True}, ""), (), Kernels()).state_dict()
    assert len(biased) == 58 + 5 * 4
    deepspec = make_network(
        ModelConfig({**tiny.DEEPSPEC, "num_hidden_layers": 5}, ""), ("embed_tokens.weight", "lm_head.weight"), Kernels()
    )
    assert len(deepspec.state_dict()) == 60


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "architecture", ["DFlash3DraftModel", "Gemma3DSparkModel", "GPT2LMHeadModel", "dflashdraftmodel"]
)
def test_unknown_architectures(architecture: str) -> None:
    refuses(
        {**tiny.ZLAB, "architectures": [architecture]},
        f"unknown drafter architecture '{architecture}'; known: DFlashDraftModel, .*and those of targets",
    )
    assert {"DFlashDraftModel", "Qwen3DSparkModel", "Gemma4DSparkModel"} <= set(ARCHITECTURES)


def test_the_backbone_of_gemma_4() -> None:
    """Its layers are full ones: their head size and heads count, not those of sliding layers."""
    config = ModelConfig({**gemma.DRAFTER, **{k: DSPARK[k] for k in ("markov_rank", *SURE)}}, "config.json")
    network = make_network(config, ("embed_tokens.weight", "lm_head.weight", *MARKOV, *CONFIDENCE), Kernels())
    assert isinstance(network, Gemma4Network) and network.scale == 1.0 and network.config.max_drafts == 5
    shapes = {k: tuple(t.shape) for k, t in network.state_dict().items()}
    assert len(shapes) == 3 + 2 + 4 + 3 * 13
    assert shapes["layers.0.self_attn.k_proj.weight"] == (16, 32) and "layers.0.self_attn.v_proj.weight" not in shapes
    assert shapes["layers.0.self_attn.q_norm.weight"] == (16,) and shapes["layers.2.layer_scalar"] == (1,)
    both = make_network(ModelConfig({**gemma.DRAFTER, "attention_k_eq_v": False}, ""), (), Kernels()).state_dict()
    assert both["layers.0.self_attn.v_proj.weight"].shape == (32, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "with sliding layers on Gemma 4"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
        ({"global_head_dim": None}, "global_head_dim is missing"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8 is not supported"),
        ({"block_size": None}, "block_size is missing"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"markov_rank": 8}, "markov_rank and the markov_head tensors do not agree"),
        ({"sample_from_anchor": True}, "sample_from_anchor = True is not supported"),
    ],
)
def test_drafters_on_gemma_4_that_are_refused(changes: dict[str, Any], message: str) -> None:
    refuses(tiny.changed(gemma.DRAFTER, **changes), message)


def test_dflash_2_is_refused_by_its_name() -> None:
    refuses({**tiny.ZLAB, "architectures": ["DFlash2DraftModel"]}, r"DFlash 2 \(DFlash2DraftModel\) is not supported")


SHARED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
SHARED += ("rms_norm_eps", "rope_theta")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("key", SHARED)
def test_missing_widths_are_not_guessed(name: str, key: str) -> None:
    refuses(tiny.changed(FORMATS[name], **{key: None}), f"{key} is missing")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("key", NESTED)
def test_missing_block_mask_and_taps_are_not_guessed(name: str, key: str) -> None:
    refuses(with_drafter(FORMATS[name], **{key: None}), f"{key} is missing")


def test_a_zlab_file_without_its_part() -> None:
    refuses(tiny.changed(tiny.ZLAB, dflash_config=None), "is missing")
    refuses({**tiny.ZLAB, "dflash_config": [1]}, "dflash_config must be an object")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": -1}, "mask_token_id must be"),
        ({"mask_token_id": "<mask>"}, "mask_token_id must be int"),
        ({"block_size": 0}, "block_size must be"),
        ({"block_size": 5.0}, "block_size must be int"),
        ({"target_layer_ids": []}, "target_layer_ids must be"),
        ({"target_layer_ids": 3}, "target_layer_ids must be list"),
        ({"target_layer_ids": [0, 1.5]}, "target_layer_ids must be"),
        ({"attention_sink_bias": True}, "attention_sink_bias = True is not supported"),
        ({"use_swa": True}, "use_swa = True is not supported"),
        ({"swa_window_size": 512}, "swa_window_size = 512 is not supported"),
        ({"input_embedding_scale": "8"}, "input_embedding_scale"),
        ({"input_embedding_scale": 0.0}, "input_embedding_scale"),
        ({"output_multiplier": 0.5}, "output_multiplier = 0.5 is not supported"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping"),
    ],
)
def test_drafter_fields_that_are_wrong_or_change_the_maths(name: str, changes: dict[str, Any], message: str) -> None:
    refuses(with_drafter(FORMATS[name], **changes), message)


def test_a_scale_and_a_softcap_in_place_of_the_targets_own() -> None:
    """Of z-lab's format, whose embedding and head are the target's; those of the file itself are as they are."""
    both = {"input_embedding_scale": 62.0, "final_logit_softcapping": 30.0}
    found = read(with_drafter(tiny.ZLAB, **both))
    assert (found.embedding_scale, found.softcap) == (62.0, 30.0)
    assert (read(tiny.ZLAB).embedding_scale, read(tiny.ZLAB).softcap) == (None, None)
    for key, value in both.items():
        refuses(with_drafter(tiny.DEEPSPEC, **{key: value}), f"{key} = {value} is not supported")
        for own in ("embed_tokens.weight", "lm_head.weight"):
            refuses(with_drafter(tiny.ZLAB, **{key: value}), f"{key} = {value} is not supported", tensors=(own,))


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_fields_with_values_that_change_nothing(name: str) -> None:
    harmless = {"attention_sink_bias": False, "use_swa": False, "input_embedding_scale": 1.0, "output_multiplier": 1.0}
    assert read(with_drafter(FORMATS[name], **harmless)).block == 5
    assert read({**FORMATS[name], "final_logit_softcapping": None, "quantization_config": None}).block == 5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries for 3 layers"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 entries for 3 layers"),
        (
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "unknown layer type 'linear_attention'",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is missing"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 0}, "sliding_window must be"),
        ({"is_causal": "yes"}, "is_causal must be bool"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"quantization_config": {"bits": 8}}, "quantization_config = .* is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of 3 kv heads"),
        ({"head_dim": 13}, "head_dim 13 is odd"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope type 'dynamic' is not supported"),
        ({"attention_bias": "no"}, "attention_bias must be bool"),
    ],
)
def test_backbones_that_are_wrong_or_not_supported(name: str, changes: dict[str, Any], message: str) -> None:
    refuses({**FORMATS[name], **changes}, message)


def test_a_zlab_block_of_one_drafts_nothing() -> None:
    refuses(with_drafter(tiny.ZLAB, block_size=1), "block_size must be")
    assert read(with_drafter(tiny.DEEPSPEC, block_size=1)).max_drafts == 1


@pytest.mark.parametrize(
    ("changes", "tensors"),
    [
        ({"markov_rank": 256}, ()),
        ({"markov_rank": 0}, MARKOV[:1]),
        ({"markov_rank": None}, ("markov_head.gate_proj.bias",)),
    ],
)
def test_a_markov_head_is_in_config_and_file_or_in_neither(changes: dict[str, Any], tensors: tuple[str, ...]) -> None:
    refuses(tiny.changed(tiny.DEEPSPEC, **changes), "markov_rank and the markov_head tensors do not agree", tensors)


def test_the_heads_of_dspark() -> None:
    """The tensors of each kind; the released files have 64, of which 4 belong to heads."""
    plain = HeadsConfig(8, "vanilla", True, True)
    assert read(tiny.changed(DSPARK, markov_head_type="vanilla"), MARKOV + CONFIDENCE).heads == plain
    more = {
        "vanilla": {},
        "gated": {"gate_proj.weight": (8, 40), "gate_proj.bias": (8,)},
        "rnn": {"joint_proj.weight": (24, 48), "joint_proj.bias": (24,)},
    }
    for kind, own in more.items():
        config = ModelConfig({**DSPARK, "markov_head_type": kind}, "")
        state = make_network(config, (*MARKOV, *CONFIDENCE), Kernels()).state_dict()
        heads = {k: tuple(t.shape) for k, t in state.items() if k.startswith(("markov_head.", "confidence_head."))}
        assert heads == {
            **dict.fromkeys(MARKOV, (128, 8)),
            **{f"markov_head.{name}": shape for name, shape in own.items()},
            **dict(zip(CONFIDENCE, ((1, 40), (1,)), strict=True)),
        }
    alone = {**DSPARK, "markov_rank": 0, "confidence_head_with_markov": False}
    state = make_network(ModelConfig(alone, ""), CONFIDENCE, Kernels()).state_dict()
    assert state[CONFIDENCE[0]].shape == (1, 32)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"markov_head_type": "lstm"}, MARKOV + CONFIDENCE, "type 'lstm' is not supported; known: vanilla, gated, rnn"),
        ({}, MARKOV, "enable_confidence_head and the confidence_head tensors do not agree"),
        ({"enable_confidence_head": False}, MARKOV + CONFIDENCE, "the confidence_head tensors do not agree"),
        ({"enable_confidence_head": "yes"}, MARKOV + CONFIDENCE, "enable_confidence_head must be bool"),
        ({"confidence_head_with_markov": None}, MARKOV + CONFIDENCE, "confidence_head_with_markov is missing"),
        ({"markov_rank": 0}, CONFIDENCE, "confidence_head_with_markov is true, but there is no Markov head"),
    ],
)
def test_heads_that_are_refused(changes: dict[str, Any], tensors: tuple[str, ...], message: str) -> None:
    refuses(tiny.changed(DSPARK, **changes), message, tensors)
    refuses({**tiny.ZLAB, "enable_confidence_head": True}, "enable_confidence_head = True is not supported")


def test_a_confidence_stop_needs_a_confidence_head(tmp_path: Path) -> None:
    target = str(tiny.write_target(tmp_path / "target"))
    names = (*MARKOV, *CONFIDENCE)
    sure = str(tiny.write_drafter(tmp_path / "sure", DSPARK, extra=names))
    plain = str(tiny.write_drafter(tmp_path / "plain", tiny.DEEPSPEC))
    for drafter in (plain, "none", "lookup"):
        with pytest.raises(UsageError, match="confidence_stop: the drafter has no confidence head"):
            Engine.load(target=target, drafter=drafter, confidence_stop=0.5)
    with Engine.load(target=target, drafter=sure, confidence_stop=1.0) as engine:
        params = SamplingParams(max_tokens=6)
        done = engine.generate([1, 2, 3], params)
        assert done.tau == 1.0 and all(r.drafted == () for r in done.rounds) and len(done.rounds) == 5
        assert engine.using(draft_tokens=0).generate([1, 2, 3], params).token_ids == done.token_ids
        with pytest.raises(UsageError, match="no confidence head"):
            engine.using(drafter="lookup")
    with Engine.load(target=target, drafter=plain) as engine, pytest.raises(UsageError, match="no confidence head"):
        engine.using(confidence_stop=0.1)


def test_a_restricted_vocabulary_without_its_size() -> None:
    refuses(tiny.DEEPSPEC, "draft_vocab_size is missing", ("d2t",))


def loads(tmp_path: Path, config: dict[str, Any], *extra: str) -> None:
    """Through the engine, with the tensors that the config asks for and ``extra`` ones."""
    target = tiny.write_target(tmp_path / "target")
    drafter = tiny.write_drafter(tmp_path / "drafter", config)
    if extra:
        tensors = load_file(drafter / "model.safetensors")
        tiny.write_checkpoint(drafter, config, {**tensors, **{name: torch.zeros(2, 2) for name in extra}})
    Engine.load(target=str(target), drafter=str(drafter)).close()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([0, 3], "not all in 0 .. 2"),
        ([-1, 1], "not all in 0 .. 2"),
        ([2, 1], "do not increase"),
        ([1, 1], "do not increase"),
    ],
)
def test_taps_that_the_target_does_not_have(name: str, taps: list[int], message: str, tmp_path: Path) -> None:
    """-1 would be the embedding's output; the last layer's raw output is no published tap."""
    with pytest.raises(PairError, match=message):
        loads(tmp_path, with_drafter(FORMATS[name], target_layer_ids=taps))


@pytest.mark.parametrize("name", FORMATS)
def test_a_mask_outside_the_vocabulary(name: str, tmp_path: Path) -> None:
    loads(tmp_path, with_drafter(FORMATS[name], mask_token_id=127))
    with pytest.raises(PairError, match="mask id 128 is outside"):
        loads(tmp_path, with_drafter(FORMATS[name], mask_token_id=128))


@pytest.mark.parametrize("extra", ["layers.0.conv.weight", "candidate_selector.weight", "v_norm.weight"])
def test_tensors_that_nothing_reads(extra: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=extra):
        loads(tmp_path, tiny.DEEPSPEC, extra)


def test_draft_ids_outside_the_target(tmp_path: Path) -> None:
    config = {**tiny.DEEPSPEC, "draft_vocab_size": 40}
    target = tiny.write_target(tmp_path / "target")
    drafter = tiny.write_drafter(tmp_path / "drafter", config, extra=("d2t",))
    tensors = load_file(drafter / "model.safetensors")
    for wrong in (100, -1):
        ids = torch.zeros(40, dtype=torch.int64)
        ids[39 if wrong > 0 else 0] = wrong
        tiny.write_checkpoint(drafter, config, {**tensors, "d2t": ids})
        with pytest.raises(CheckpointError, match="d2t maps outside the 128 ids of the target"):
            Engine.load(target=str(target), drafter=str(drafter))


def test_a_config_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.ZLAB))
    config = ModelConfig.read(tmp_path)
    assert read(config.values).block == 5
    assert make_network(config, (), Kernels()).facts.where == str(tmp_path / "config.json")
