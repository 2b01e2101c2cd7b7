"""Frequencies and attention factors are transformers' to the last bit, in every spelling; what is not known, or said
twice, is refused."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from foldspec import FoldspecError
from foldspec.models.config import ModelConfig
from foldspec.models.rope import Rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTH = {"original_max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, **LENGTH}
SCALINGS: dict[str, tuple[int, dict[str, Any]]] = {  # head_dim, rope_parameters but for theta
    "llama3": (128, {**LLAMA3, **LENGTH}),
    "llama3, small": (64, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}),
    "llama3, the model's length": (64, LLAMA3),
    "yarn": (128, YARN),
    "yarn, the model's length": (128, {"rope_type": "yarn", "factor": 8}),
    "yarn, an attention factor": (64, {**YARN, "attention_factor": 1.37}),
    "yarn, mscale": (64, {**YARN, "mscale": 0.8, "mscale_all_dim": 0.4, "factor": 40}),
    "yarn, one mscale": (64, {**YARN, "mscale": 0.8}),
    "yarn, other ends": (64, {**YARN, "beta_fast": 16, "beta_slow": 2.0}),
    "yarn, ends not rounded": (64, {**YARN, "truncate": False}),
    "yarn, nothing stretched": (64, {**YARN, "factor": 1.0}),
    "yarn, a part of the head": (64, {**YARN, "partial_rotary_factor": 0.5}),
    "yarn, a factor from the lengths": (64, {**YARN, "factor": None}),
    "proportional": (512, {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
    "proportional, stretched": (32, {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 8.0}),
    "proportional, whole": (32, {"rope_type": "proportional"}),
}
THETAS = (10000.0, 1000000, 5000000.0)


def config_of(head_dim: int, scaling: dict[str, Any], **values: Any) -> transformers.Qwen3Config:
    widths = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    return transformers.Qwen3Config(max_position_embeddings=32768, rope_parameters=dict(scaling), **widths, **values)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_factors_of_every_kind(name: str, theta: float) -> None:
    head_dim, scaling = SCALINGS[name]
    oracle = config_of(head_dim, {**scaling, "rope_theta": theta})
    inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](oracle, torch.device("cpu"))
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    for spelling in (
        {"rope_parameters": {**scaling, "rope_theta": theta}},
        {"rope_parameters": scaling, "rope_theta": theta},
        {"rope_scaling": scaling, "rope_theta": theta},
        {"rope_scaling": older, "rope_theta": theta, "rope_parameters": None},
    ):
        rope = Rope.from_config(ModelConfig({"max_position_embeddings": 32768, **spelling}, "here"), head_dim)
        assert torch.equal(rope._inverse, inverse) and rope.factor == factor


@pytest.mark.parametrize("part", [0.25, 0.5, 1.0])
def test_a_part_of_the_head(part: float) -> None:
    """As in Qwen3.5, whose other keys in the same place say nothing of text."""
    scaling = {
        "rope_theta": 10000000,
        "partial_rotary_factor": part,
        "mrope_section": [2, 1, 1],
        "rope_type": "default",
    }
    oracle = transformers.Qwen3_5TextConfig(head_dim=64, rope_parameters=dict(scaling))
    inverse, factor = Qwen3_5TextRotaryEmbedding.compute_default_rope_parameters(oracle)
    nested = {"full_attention": scaling, "sliding_attention": {"rope_theta": 3.0}}
    for values, kind in (({"rope_parameters": scaling}, None), ({"rope_parameters": nested}, "full_attention")):
        rope = Rope.from_config(ModelConfig(values, "here"), 64, kind)
        assert torch.equal(rope._inverse, inverse) and rope.factor == factor == 1.0
    x = torch.randn(3, 2, 64)
    turned = rope.rotate(x, torch.tensor([5, 9, 2]))
    width = int(64 * part)
    assert torch.equal(turned[..., width:], x[..., width:]) and not torch.equal(turned[..., :width], x[..., :width])


@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_angles_far_out_are_transformers_own(name: str) -> None:
    """At positions of a long context fp32 angles differ by the order of operations: transformers' order counts."""
    head_dim, scaling = SCALINGS[name]
    scaling = {**scaling, "rope_theta": 500000.0}
    rotary = LlamaRotaryEmbedding(config_of(head_dim, scaling))
    rope = Rope.from_config(ModelConfig({"rope_parameters": scaling}, ""), head_dim)
    positions = torch.tensor([0, 1, 1023, 1024, 8191, 131071])
    cos, sin = rotary(torch.zeros(1), positions[None])
    mine = rope.at(positions)
    half = head_dim // 2
    assert torch.equal(mine[0][:, 0], cos[0, :, :half]) and torch.equal(mine[1][:, 0], sin[0, :, :half])


def test_the_factor_counts_once_a_side() -> None:
    """Rotated q and k bring it twice; q alone, against keys that are left un-rotated, brings it for both."""
    plain, yarn = (
        Rope.from_config(ModelConfig({"rope_parameters": {**scaling, "rope_theta": 1e4}}, ""), 16)
        for scaling in ({**YARN, "attention_factor": 1.0}, {**YARN, "attention_factor": 1.5})
    )
    q, k, at = torch.randn(1, 1, 16), torch.randn(1, 1, 16), torch.tensor([7])
    base = (plain.rotate(q, at) * plain.rotate(k, at * 0)).sum()
    torch.testing.assert_close((yarn.rotate(q, at) * yarn.rotate(k, at * 0)).sum(), 2.25 * base)
    torch.testing.assert_close((yarn.rotate(q, at, alone=True) * k).sum(), 2.25 * base)


def test_a_stated_length_stretches_what_a_model_may_hold() -> None:
    """Qwen3's card adds YaRN beside a max_position_embeddings that stays as it was."""
    yarn = {**YARN, "rope_theta": 1e4}
    unstated = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    for scaling, reach in ((yarn, 16384), (unstated, 0), ({"rope_theta": 1e4}, 0)):
        values = {"rope_parameters": scaling, "max_position_embeddings": 8192}
        assert Rope.from_config(ModelConfig(values, ""), 16).reach == reach


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no theta": ({"rope_theta": None}, "here: rope_theta is missing"),
    "a type of old": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic"}}, "here rope_parameters: rope type 'dynamic'"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, "here rope_scaling: rope type 'longrope'"),
    "llama3 without ends": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    "yarn without a factor": ({"rope_scaling": {"rope_type": "yarn"}}, "here rope_scaling: factor is missing"),
    "two that differ": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters and rope_scaling say different things",
    ),
    "one a layer type": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "a rope for each of full_att"),
    "no pair": ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "is no even number of 2 to 8"),
    "half a pair": ({"partial_rotary_factor": 0.4}, "is no even number of 2 to 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rope_that_is_missing_or_unknown_is_refused(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(FoldspecError, match=message):
        Rope.from_config(ModelConfig(tiny.changed(tiny.TARGET, **changes), "here"), 8)


def test_the_same_rope_in_both_places() -> None:
    yarn = {**YARN, "rope_theta": 1e4}
    both = {"rope_parameters": yarn, "rope_scaling": YARN}
    rope, one = (Rope.from_config(ModelConfig(v, "here"), 16) for v in (both, {"rope_parameters": yarn}))
    assert torch.equal(rope._inverse, one._inverse) and rope.factor == one.factor > 1
