"""Every value a user can set is checked, once, and the message says what was wrong with which option."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from foldspec.errors import CheckpointError, FoldspecError, PairError, ResourceError, UsageError
from foldspec.options import EngineOptions, MethodOptions, SamplingParams
from foldspec.values import leniency, token_count

WRONG: list[tuple[type[Any], str, Any, str]] = [
    (SamplingParams, "max_tokens", -1, "max_tokens: must be a whole number of at least 0, not -1"),
    (SamplingParams, "max_tokens", 2.5, "max_tokens: must be a whole number"),
    (SamplingParams, "max_tokens", True, "max_tokens: must be a whole number"),
    (SamplingParams, "stop_ids", (3, -2), "stop_ids: must be a whole number of at least 0, not -2"),
    (SamplingParams, "stop_ids", ("3",), "stop_ids: must be a whole number"),
    (SamplingParams, "ignore_eos", "false", "ignore_eos: must be true or false, not 'false'"),
    (SamplingParams, "temperature", -0.1, "temperature: must be a finite number of at least 0, not -0.1"),
    (SamplingParams, "temperature", 10**400, "temperature: must be a finite number of at least 0"),
    (SamplingParams, "temperature", "warm", "temperature: must be"),
    (SamplingParams, "top_k", 2.0, "top_k: must be a whole number of at least 0"),
    (SamplingParams, "top_p", 0, "top_p: must be a finite number above 0 and at most 1, not 0"),
    (SamplingParams, "min_p", 1.5, "min_p: must be a finite number of at least 0 and at most 1"),
    (SamplingParams, "repetition_penalty", 0, "repetition_penalty: must be a finite number above 0, not 0"),
    (SamplingParams, "presence_penalty", math.inf, "presence_penalty: must be a finite number"),
    (SamplingParams, "frequency_penalty", None, "frequency_penalty: must be a finite number"),
    (SamplingParams, "logit_bias", 5, "logit_bias: must map ids to what is added"),
    (SamplingParams, "logit_bias", {"5": 1.0}, "logit_bias: must be a whole number"),
    (SamplingParams, "logit_bias", {5: math.nan}, "logit_bias: must be a finite number"),
    (SamplingParams, "seed", -1, "seed: must be a whole number of at least 0"),
    (SamplingParams, "seed", 1 << 64, "seed: must have at most 64 bits"),
    (MethodOptions, "draft_temperature", math.nan, "draft_temperature: must be a finite number of at least 0"),
    (MethodOptions, "draft_top_k", 3, "draft_top_k: is for drafts that are drawn; give a draft temperature above 0"),
    (MethodOptions, "draft_top_p", 0.5, "draft_top_p: is for drafts that are drawn"),
    (MethodOptions, "draft_noise", "shared", "draft_noise: shared goes with the rule match alone"),
    (MethodOptions, "draft_noise", "mine", "draft_noise: must be one of own, shared, not 'mine'"),
    (SamplingParams, "stop", ("END", ""), "stop: must be text of at least one character, not ''"),
    (SamplingParams, "stop", "", "stop: must be text"),
    (SamplingParams, "stop", (3,), "stop: must be text"),
    (SamplingParams, "stop", None, "stop: must be a list or a tuple, not None"),
    (SamplingParams, "stop_ids", 3, "stop_ids: must be a list or a tuple, not 3"),
    (SamplingParams, "stop_ids", "3", "stop_ids: must be a whole number"),
    (SamplingParams, "stop", ("a\ufffd",), "stop: 'a\ufffd' is not valid Unicode text"),
    (SamplingParams, "stop", ("\ud83d",), "stop: "),
    (SamplingParams, "min_tokens", -1, "min_tokens: must be a whole number of at least 0, not -1"),
    (SamplingParams, "min_tokens", 257, "min_tokens: is above max_tokens, which is 256"),
    (SamplingParams, "logprobs", -1, "logprobs: must be a whole number of at least 0, not -1"),
    (SamplingParams, "logprobs", True, "logprobs: must be a whole number"),
    (MethodOptions, "context", [], "context: must be a name, not []"),
    (MethodOptions, "accept", None, "accept: must be a name"),
    (MethodOptions, "drafter", ["lookup"], "drafter: must be a name"),
    (MethodOptions, "drafter", {}, "drafter: must be a name"),
    (MethodOptions, "window", 0, "window: must be a whole number of at least 1, not 0"),
    (MethodOptions, "window", -24, "window: must be"),
    (MethodOptions, "window", 24.0, "window: must be"),
    (MethodOptions, "alpha", 0.99, "alpha: must be a finite number of at least 1, not 0.99"),
    (MethodOptions, "alpha", 0, "alpha: must be"),
    (MethodOptions, "alpha", -2, "alpha: must be"),
    (MethodOptions, "alpha", math.nan, "alpha: must be a finite number of at least 1, not nan"),
    (MethodOptions, "alpha", math.inf, "alpha: must be"),
    (MethodOptions, "alpha", "2", "alpha: must be"),
    (MethodOptions, "alpha", True, "alpha: must be"),
    (MethodOptions, "coverage", "some", "coverage: must be one of all, full, not 'some'"),
    (MethodOptions, "far_boundary", "d", "far_boundary: must be one of D, complement, not 'd'"),
    (MethodOptions, "layer_window", (8, 0), "layer_window: must be a whole number of at least 1, not 0"),
    (MethodOptions, "layer_window", 8, "layer_window: must be a list or a tuple, not 8"),
    (MethodOptions, "layer_alpha", (2.0, 0.5), "layer_alpha: must be a finite number of at least 1, not 0.5"),
    (MethodOptions, "layer_alpha", "2", "layer_alpha: must be a finite number"),
    (MethodOptions, "auto_alphas", (2.0, 0.5), "auto_alphas: must be a finite number of at least 1, not 0.5"),
    (MethodOptions, "auto_alphas", (False,), "auto_alphas: must be a finite number"),
    (MethodOptions, "auto_alphas", (), "auto_alphas: must name one at least"),
    (MethodOptions, "auto_alphas", (2.0, 0.0, 2), "auto_alphas: must name one at least, and each once"),
    (MethodOptions, "draft_window", 0, "draft_window: must be a whole number of at least 1"),
    (MethodOptions, "sinks", -1, "sinks: must be a whole number of at least 0"),
    (MethodOptions, "recents", 0, "recents: must be a whole number of at least 1"),
    (MethodOptions, "yarn_ref", 0, "yarn_ref: must be a whole number of at least 1"),
    (MethodOptions, "rerope_len", 1, "rerope_len: must be a whole number of at least 2"),
    (MethodOptions, "infllm_block", 0, "infllm_block: must be a whole number of at least 1"),
    (MethodOptions, "infllm_init", -1, "infllm_init: must be a whole number of at least 0"),
    (MethodOptions, "infllm_topk", 0, "infllm_topk: must be a whole number of at least 1"),
    (MethodOptions, "infllm_repr", -1, "infllm_repr: must be a whole number of at least 0"),
    (MethodOptions, "cmr_chunk", 0, "cmr_chunk: must be a whole number of at least 1"),
    (MethodOptions, "cmr_topk", None, "cmr_topk: must be a whole number of at least 1"),
    (MethodOptions, "cmr_period", 0, "cmr_period: must be a whole number of at least 1"),
    (MethodOptions, "draft_tokens", -1, "draft_tokens: must be a whole number of at least 0"),
    (EngineOptions, "dtype", "float64", "dtype: must be one of auto, float32, bfloat16, float16"),
    (EngineOptions, "threads", 0, "threads: must be a whole number of at least 1"),
    (EngineOptions, "threads", 10**6, "threads: must be at most"),
    (EngineOptions, "max_context", 0, "max_context: must be"),
    (EngineOptions, "prefill_chunk", 0, "prefill_chunk: must be"),
    (EngineOptions, "page_size", 8, "page_size: must be a whole number of at least 16, not 8"),
    (EngineOptions, "page_size", 48, "page_size: must be a power of two, not 48"),
    (EngineOptions, "device", "gpu", "device: must be auto, cpu, cuda or cuda:N, not 'gpu'"),
    (EngineOptions, "device", "cuda:x", "device: must be"),
    (EngineOptions, "device", "cuda:-1", "device: must be"),
    (EngineOptions, "device", "cuda:", "device: must be"),
    (EngineOptions, "device", "cuda:99999999999", "device: must be"),
    (EngineOptions, "device", "cpu:0", "device: must be"),
    (EngineOptions, "device", "", "device: must be"),
]


@pytest.mark.parametrize(("kind", "name", "value", "message"), WRONG)
def test_wrong_values_are_named(kind: type[Any], name: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        kind(**{name: value})
    assert str(error.value).startswith(message) and error.value.exit_code == 2


RIGHT: list[tuple[type[Any], str, Any]] = [
    (SamplingParams, "max_tokens", 0),
    (SamplingParams, "stop_ids", (0, 7)),
    (SamplingParams, "temperature", 1e-300),
    (SamplingParams, "top_p", 1e-9),
    (SamplingParams, "min_p", 1),
    (SamplingParams, "frequency_penalty", -2),
    (SamplingParams, "seed", (1 << 64) - 1),
    (MethodOptions, "draft_temperature", 2),
    (SamplingParams, "stop", ("a", "\n\n", "👩‍👩‍👧‍👦")),
    (SamplingParams, "min_tokens", 256),
    (SamplingParams, "logprobs", 0),
    (SamplingParams, "logprobs", None),
    (MethodOptions, "window", 1),
    (MethodOptions, "alpha", 1),
    (MethodOptions, "alpha", 1.5),
    (MethodOptions, "alpha", 1e6),
    (MethodOptions, "auto_alphas", (0,)),
    (MethodOptions, "coverage", "full"),
    (MethodOptions, "far_boundary", "complement"),
    (MethodOptions, "draft_tokens", 0),
    (EngineOptions, "page_size", 16),
    (EngineOptions, "page_size", 1024),
    (EngineOptions, "device", "cuda:3"),
    (EngineOptions, "device", "cuda"),
    (EngineOptions, "dtype", "bfloat16"),
    (EngineOptions, "max_context", 1),
]


@pytest.mark.parametrize(("kind", "name", "value"), RIGHT)
def test_values_at_the_edge_are_taken(kind: type[Any], name: str, value: Any) -> None:
    assert getattr(kind(**{name: value}), name) == value


def test_every_option_has_a_default_and_none_can_be_changed() -> None:
    for kind in (SamplingParams, MethodOptions, EngineOptions):
        options = kind()
        for field in dataclasses.fields(kind):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(options, field.name, None)


def test_the_defaults_are_the_ones_that_are_documented() -> None:
    method = MethodOptions()
    assert (method.context, method.coverage, method.far_boundary, method.accept) == (None, None, "D", "exact")
    assert (method.window, method.alpha, method.draft_tokens, method.yarn_ref) == (None, None, None, None)
    assert method.auto_alphas == (2.0, 1.0, 4.0, 0.0)
    assert (method.draft_window, method.sinks, method.recents, method.rerope_len) == (2048, 4, 2044, 4096)
    assert (method.infllm_block, method.infllm_init, method.infllm_topk, method.infllm_repr) == (128, 128, 16, 4)
    assert (method.cmr_chunk, method.cmr_topk, method.cmr_period) == (32, 64, 8)
    engine = EngineOptions()
    assert (engine.device, engine.dtype, engine.page_size, engine.kernels) == ("auto", "auto", 256, "auto")
    assert engine.offline is False and SamplingParams().max_tokens == 256


def test_plain_values_become_what_the_engine_keeps() -> None:
    assert SamplingParams(stop_ids=[5, 6]).stop_ids == (5, 6)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert EngineOptions(cache_dir="somewhere").cache_dir == Path("somewhere")  # type: ignore[arg-type]


def test_options_as_key_value_pairs() -> None:
    options = MethodOptions.from_pairs(
        {"window": "24", "alpha": "1.5", "coverage": "full", "far_boundary": "complement"}, context="fold", accept=None
    )
    assert options == MethodOptions(context="fold", window=24, alpha=1.5, coverage="full", far_boundary="complement")
    assert MethodOptions.from_pairs({}) == MethodOptions()
    by_layer = MethodOptions.from_pairs({"layer_window": "8/16/8", "layer_alpha": "1/2.5/4", "yarn_ref": "512"})
    assert by_layer == MethodOptions(layer_window=(8, 16, 8), layer_alpha=(1.0, 2.5, 4.0), yarn_ref=512)


@pytest.mark.parametrize(
    ("pairs", "known", "message"),
    [
        ({"sink": "4"}, {}, "--context-opt: unknown key 'sink'; known keys: window, alpha, coverage, far_boundary"),
        ({"sinks": "some"}, {}, "--context-opt sinks: 'some' is not a number"),
        ({"layer_alpha": "2/x"}, {}, "--context-opt layer_alpha: '2/x' is not a number"),
        ({"window": "wide"}, {}, "--context-opt window: 'wide' is not a number"),
        ({"window": "2.5"}, {}, "--context-opt window: '2.5' is not a number"),
        ({"alpha": "nan"}, {}, "alpha: must be a finite number"),
        ({"alpha": "0.5"}, {}, "alpha: must be a finite number of at least 1"),
        ({"window": "24"}, {"window": 24}, "--window and --context-opt window=: given twice"),
        ({"coverage": ""}, {}, "coverage: must be one of"),
    ],
)
def test_wrong_pairs_are_named(pairs: dict[str, str], known: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        MethodOptions.from_pairs(pairs, **known)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(FoldspecError, 1), (UsageError, 2), (CheckpointError, 3), (PairError, 3), (ResourceError, 4)],
)
def test_errors_say_what_where_and_what_to_do(kind: type[FoldspecError], code: int) -> None:
    error = kind("went wrong", where="here", do="do that")
    assert str(error) == "here: went wrong; do that" and error.exit_code == code
    assert str(kind("went wrong")) == "went wrong" and isinstance(error, FoldspecError)
    assert (error.what, error.where, error.do) == ("went wrong", "here", "do that")


def test_a_seed_is_kept_or_made_afresh_and_biases_are_kept_in_the_order_of_ids() -> None:
    assert SamplingParams(seed=7).seeded().seed == 7
    assert SamplingParams().seeded().seed is None  # greedy decoding needs none
    assert SamplingParams().seeded(chance=True).seed is not None
    fresh = {SamplingParams(temperature=1.0).seeded().seed for _ in range(20)}
    assert len(fresh) == 20 and all(isinstance(seed, int) and 0 <= seed < 1 << 53 for seed in fresh)
    params = SamplingParams(logit_bias={9: 1.5, 2: -1})
    assert params.logit_bias == ((2, -1), (9, 1.5)) and params == SamplingParams(logit_bias=params.logit_bias)


def test_shared_noise_is_for_match_with_drafts_that_are_drawn() -> None:
    assert MethodOptions(accept="match", draft_temperature=1, draft_noise="shared").draft_noise == "shared"
    with pytest.raises(UsageError, match="draft_noise: is for drafts that are drawn"):
        MethodOptions(accept="match", draft_noise="shared")


def test_numbers_of_tokens() -> None:
    wanted = {"512": 512, "8k": 8192, "8K": 8192, "10M": 10 << 20, "1m": 1 << 20, "-1": -1, "0": 0}
    assert {text: token_count(text) for text in wanted} == wanted
    for wrong in ("", "k", "M", "1.5k", "8kk", "10G", "8 k k"):
        with pytest.raises(ValueError, match="invalid literal"):
            token_count(wrong)


def test_options_of_rules() -> None:
    """As text, as values, and as they go over from one engine to another: not to another rule."""
    assert (leniency("0.4"), leniency("0.1/0.5")) == (0.4, (0.1, 0.5))
    of = MethodOptions.from_pairs({}, {"divergence": "tv", "residual": "verifier"}, accept="cactus", leniency=2.0)
    assert of.rule_options == {"leniency": 2.0, "divergence": "tv", "residual": "verifier"}
    assert of.changed(leniency=1.0).rule_options == of.rule_options | {"leniency": 1.0}
    assert of.changed(accept="exact").rule_options == {}
    assert of.changed(accept="linear", leniency=[0.3, 0]).leniency == (0.3, 0)
    assert of.changed(accept="cactus", window=9).rule_options == of.rule_options
    assert MethodOptions().rule_options == {}
    for wrong in ([], "0.5", True, (0.5, "x"), math.inf):
        with pytest.raises(UsageError, match="leniency"):
            MethodOptions(accept="linear", leniency=wrong)  # type: ignore[arg-type]
