"""Qwen3.5: logits and layer outputs equal transformers', however ids are fed and whatever was taken back; files in all
the forms that they come in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracles
import pytest
import tiny
import torch
from oracles import LENGTH, WAYS, Pair, close, feed, opened
from qwen import FIRST, FULL, LINEAR, TOLERANCE, VARIANTS, write
from safetensors.torch import load_file, save_file

from foldspec import FoldspecError
from foldspec.kernels.dispatch import Kernels
from foldspec.models.config import ModelConfig
from foldspec.models.qwen3_5 import Qwen3_5


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield Pair(write(tmp_path_factory.mktemp("qwen3_5"), request.param))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield Pair(write(tmp_path_factory.mktemp("qwen3_5"), FIRST))


# ------------------------------------------------------------------------------------------------ against transformers


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_text"])
def test_golden_checkpoints(name: str) -> None:
    oracles.meets_golden(tiny.GOLDEN / "tiny" / name, TOLERANCE)


@pytest.mark.parametrize("way", WAYS)
def test_logits_however_the_ids_are_fed(pair: Pair, way: str) -> None:
    close(feed(pair.model, opened(pair.model), pair.ids, WAYS[way]), pair.wanted(pair.ids), TOLERANCE)


@pytest.mark.parametrize("kernels", ["chunked", "reference"])
def test_logits_without_a_compiler(pair: Pair, kernels: str) -> None:
    model = tiny.load_target(pair.folder, kernels)
    for sizes in ([LENGTH], [33, 1], [40, 7]):
        close(feed(model, opened(model), pair.ids, sizes), pair.wanted(pair.ids), TOLERANCE)


@pytest.mark.parametrize("kernels", ["auto", "chunked"])
def test_a_long_prompt(first: Pair, kernels: str) -> None:
    """Forwards longer than what is recorded of them, and pieces of all kinds after them."""
    model, ids = tiny.load_target(first.folder, kernels), tiny.prompt(330, first.model.vocabulary)
    wanted = first.wanted(ids)
    for sizes in ([330], [200, 65, 1, 1, 33], [64, 63, 66], [129, 7]):
        close(feed(model, opened(model), ids, sizes), wanted, TOLERANCE)


@pytest.mark.parametrize("kernels", ["auto", "chunked"])
@pytest.mark.parametrize("context", [1, 2, 16, 33, 70])
def test_logits_after_a_truncate(pair: Pair, context: int, kernels: str) -> None:
    """A block of 8, any part of it taken back, other ids in its place, again and again."""
    model = tiny.load_target(pair.folder, kernels)
    cache, ids = opened(model), tiny.prompt(context, model.vocabulary, seed=5)
    feed(model, cache, ids, [context])
    for kept in (0, 3, 1, 8, 5, 2, 7, 4, 6, 0):
        block = tiny.prompt(8, model.vocabulary, seed=kept)
        logits = tiny.forward(model, cache, [block], [0]).logits
        close(logits, pair.wanted([*ids, *block])[len(ids) :], TOLERANCE)
        ids = [*ids, *block[:kept]]
        cache.truncate(0, len(ids))


def test_a_prompt_can_be_taken_back_as_far_as_it_is_recorded(first: Pair) -> None:
    for kernels in ("auto", "chunked"):
        model, ids = tiny.load_target(first.folder, kernels), tiny.prompt(150, first.model.vocabulary)
        for kept in (150 - 64, 100, 117, 149):
            cache = opened(model)
            feed(model, cache, ids, [150])
            with pytest.raises(AssertionError, match="more rows taken back"):
                cache.truncate(0, 150 - 65)
            cache.truncate(0, kept)
            close(feed(model, cache, ids[kept:], [9]), first.wanted(ids)[kept:], TOLERANCE)


def test_ragged_requests_in_one_forward_equal_each_alone(pair: Pair) -> None:
    """A prefill, a block and one token at once, each request at another length."""
    everyone = [tiny.prompt(n, pair.model.vocabulary, seed=9) for n in (70, 41, 52)]
    cuts = [(0, 0, 30, 30, 37, 70), (0, 17, 25, 31, 32, 41), (0, 1, 2, 8, 40, 52)]
    cache = opened(pair.model, 4, 7, 5)
    found: list[list[torch.Tensor]] = [[], [], []]
    for step in range(5):
        parts = [ids[cut[step] : cut[step + 1]] for ids, cut in zip(everyone, cuts, strict=True)]
        live = [i for i, part in enumerate(parts) if part]
        logits = tiny.forward(pair.model, cache, [parts[i] for i in live], [(4, 7, 5)[i] for i in live]).logits
        for i, piece in zip(live, logits.split([len(parts[i]) for i in live]), strict=True):
            found[i].append(piece)
    for ids, pieces in zip(everyone, found, strict=True):
        close(torch.cat(pieces), pair.wanted(ids), TOLERANCE)


def test_a_fork_goes_on_alone(pair: Pair) -> None:
    """Two requests from one prefix, of which some was taken back: neither sees what the other writes."""
    prefix, left, right = pair.ids[:37], pair.ids[37:60], pair.ids[60:]
    cache = opened(pair.model)
    feed(pair.model, cache, [*prefix, 1, 2, 3], [20, 15, 5])
    cache.truncate(0, 37)
    cache.fork(0, 1)
    cache.fork(0, 2)
    close(feed(pair.model, cache, left, [5], request=1), pair.wanted([*prefix, *left])[37:], TOLERANCE)
    close(feed(pair.model, cache, right, [6], request=2), pair.wanted([*prefix, *right])[37:], TOLERANCE)
    close(feed(pair.model, cache, left, [9], request=0), pair.wanted([*prefix, *left])[37:], TOLERANCE)


def test_a_closed_request_leaves_nothing_to_the_next(first: Pair) -> None:
    cache = opened(first.model)
    feed(first.model, cache, first.ids, [30])
    cache.close(0)
    for request in range(1, 9):  # every slot
        cache.open(request)
        close(feed(first.model, cache, first.ids[:20], [9], request), first.wanted(first.ids[:20]), TOLERANCE)


def test_taps_are_the_raw_outputs_of_layers(pair: Pair) -> None:
    layers = range(pair.model.layer_count)
    taps = tiny.forward(pair.model, opened(pair.model), [pair.ids], [0], taps=layers).taps
    for found, wanted in zip(taps, pair.layers(pair.ids), strict=True):
        close(found, wanted, TOLERANCE)


# ------------------------------------------------------------------------------------------------ files as they come


def changed_config(folder: Path, into: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    copy = shutil.copytree(folder, into)
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(change(config)))
    return copy


def test_a_wrapper_gives_what_its_language_model_gives(first: Pair, tmp_path: Path) -> None:
    """Its settings in text_config, another prefix, and parts that are left unread. In both kinds of file."""
    tensors = load_file(first.folder / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    assert "lm_head.weight" in wrapped and "model.language_model.norm.weight" in wrapped
    junk = {
        "model.visual.blocks.0.attn.q_proj.bias": torch.ones(3),
        "mtp.layers.0.self_attn.k_proj.bias": torch.ones(3),
    }
    for number, (names, wrap) in enumerate([(wrapped, True), (tensors, True), (wrapped, False)]):

        def change(config: dict[str, Any], wrap: bool = wrap) -> dict[str, Any]:
            if not wrap:
                return config
            return {
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "model_type": "qwen3_5",
                "text_config": config,
            }

        folder = changed_config(first.folder, tmp_path / str(number), change)
        save_file({**names, **junk}, folder / "model.safetensors")
        model = tiny.load_target(folder)
        assert torch.equal(*(feed(m, opened(m), first.ids, [40]) for m in (model, first.model)))


def test_products_that_share_a_place(tmp_path: Path) -> None:
    """Widths of whole panels: the weights of a layer's projections are one, and its outputs are parts of wider rows."""
    pair = Pair(tiny.write_target(tmp_path, tiny.QWEN3_5))
    assert isinstance(pair.model, Qwen3_5)
    mixers = [part for block in pair.model.model.layers for part in (block.linear_attn, block.self_attn) if part]
    assert len(mixers) == 5 and all(mixer.stack._joined for mixer in mixers)
    close(feed(pair.model, opened(pair.model), pair.ids, [40, 7]), pair.wanted(pair.ids), TOLERANCE)


def test_layer_types_follow_from_the_interval(first: Pair, tmp_path: Path) -> None:
    def by_interval(config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "layer_types": None, "full_attention_interval": 3}

    model = tiny.load_target(changed_config(first.folder, tmp_path / "interval", by_interval))
    assert isinstance(model, Qwen3_5) and list(model.kinds) == VARIANTS[FIRST]["layer_types"]
    close(feed(model, opened(model), first.ids, [LENGTH]), first.wanted(first.ids), TOLERANCE)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a gate that is switched off": ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
    "an unknown layer": ({"layer_types": [LINEAR] * 6 + ["mamba"]}, "layer_types names 'mamba'"),
    "too few layers": ({"layer_types": [LINEAR, FULL]}, "layer_types has 2 entries for 7 layers"),
    "no layer types": ({"layer_types": None}, "full_attention_interval is missing"),
    "heads that do not divide": ({"linear_num_value_heads": 5}, "5 is not a multiple of 2 key heads"),
    "no rotated part": ({"rope_parameters": {"rope_theta": 1e4}}, "partial_rotary_factor is missing"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    "no width": ({"linear_key_head_dim": None}, "linear_key_head_dim is missing"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not supported"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_config_that_changes_the_maths_is_refused(first: Pair, case: str) -> None:
    changes, message = BAD[case]
    config = {**json.loads((first.folder / "config.json").read_text()), **changes}
    for values in (config, {"text_config": config}):
        with pytest.raises(FoldspecError, match=message):
            Qwen3_5.from_config(ModelConfig(values, "here"), (), Kernels())
