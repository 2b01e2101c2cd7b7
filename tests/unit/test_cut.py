"""Dummies of fewer layers: the last ones, every kind among them, of their true shapes; taps on layers that exist."""

from __future__ import annotations

import pytest
import torch

from foldspec.checkpoints.cut import cut, fold_taps
from foldspec.checkpoints.registry import load_registry
from foldspec.checkpoints.shapes import layer_kinds, list_tensors
from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import FoundPair, find_pair
from foldspec.options import EngineOptions

SOURCES = load_registry().checkpoints


def dummy(name: str | None, layers: int | None = None, **names: str) -> FoundPair:
    options = EngineOptions(load_format="dummy", dummy_layers=layers)
    sides = {"target": None, "drafter": None, **names}
    return find_pair(name, options=options, kernels=Kernels(), **sides)


def shapes(module: torch.nn.Module, first: int = 0) -> dict[str, tuple[int, ...]]:
    """Of a model whose layers are counted from ``first`` on; those before are left out."""
    found = {}
    for name, tensor in module.state_dict().items():
        before, layers, rest = name.rpartition("layers.")
        if layers:
            number, _, own = rest.partition(".")
            if int(number) < first:
                continue
            name = f"{before}layers.{int(number) - first}.{own}"
        found[name] = tuple(tensor.shape)
    return found


@pytest.mark.parametrize("name", ["qwen3.5-9b-dflash", "qwen3-8b-dflash", "smollm2-135m"])
def test_a_cut_pair_is_the_end_of_the_whole_one(name: str) -> None:
    whole, short = dummy(name), dummy(name, 2)
    assert short.dummy and short.model.layer_count == 2 and "2 of" in short.notices[-1]
    assert shapes(short.model) == shapes(whole.model, whole.model.layer_count - 2)
    assert whole.network is not None and short.network is not None
    assert shapes(short.network) == shapes(whole.network, len(whole.network.layer_facts) - 2)
    assert short.network.layer_facts == whole.network.layer_facts[-2:]
    before, after = whole.network.facts.taps, short.network.facts.taps
    assert len(before) == len(after) and list(after) == sorted(after) and set(after) == {0, 1}
    assert all(p.is_meta for p in (*short.model.parameters(), *short.network.parameters()))  # nothing is held yet


def test_every_kind_of_layer_is_there() -> None:
    kinds = {name: cut(s.config, list_tensors(s.config, name), 2)[0] for name, s in SOURCES.items() if s.config}
    qwen = kinds["Qwen/Qwen3.5-9B"]["text_config"]
    assert qwen["layer_types"] == ["linear_attention", "full_attention"] and qwen["num_hidden_layers"] == 2
    for name in ("google/gemma-4-12B-it", "google/gemma-4-31B-it"):
        assert kinds[name]["text_config"]["layer_types"] == ["sliding_attention", "full_attention"]
    assert kinds["z-lab/Qwen3.5-9B-DFlash"]["layer_types"] == ["sliding_attention", "full_attention"]
    assert "layer_types" not in kinds["Qwen/Qwen3-8B"]


def test_kinds_where_no_list_is_given() -> None:
    kinds = layer_kinds({"num_hidden_layers": 9, "full_attention_interval": 4})
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [3, 7]
    kinds = layer_kinds({"num_hidden_layers": 14, "global_head_dim": 512})
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11, 13]
    assert layer_kinds({"num_hidden_layers": 2}) == ["full_attention"] * 2


def test_more_layers_than_there_are() -> None:
    config = SOURCES["Qwen/Qwen3-8B"].config
    same, weights = cut(config, list_tensors(config, "x"), 1000)
    assert same == config and weights.entries.keys() == list_tensors(config, "x").entries.keys()


def test_taps_keep_their_order() -> None:
    config = {"dflash_config": {"target_layer_ids": [1, 8, 15, 22, 29], "block_size": 4}, "num_target_layers": 32}
    assert fold_taps(config, 32, 2) == {
        "dflash_config": {"target_layer_ids": [0, 0, 0, 1, 1], "block_size": 4},
        "num_target_layers": 2,
    }
    assert fold_taps({"target_layer_ids": [1, 30]}, 32, 32) == {"target_layer_ids": [1, 30]}
    assert fold_taps({"hidden_size": 3}, 32, 2) == {"hidden_size": 3}


def test_checkpoints_by_name() -> None:
    found = dummy(None, 2, target="Qwen/Qwen3-8B", drafter="z-lab/Qwen3-8B-DFlash-b16")
    assert found.entry is None and found.network is not None and found.network.block == 16
    assert dummy("qwen3-8b-dflash", 2, drafter="none").network is None
    with pytest.raises(UsageError, match="some/where is not in the registry"):
        dummy(None, target="some/where")
    with pytest.raises(UsageError, match="add --load-format dummy"):
        EngineOptions(dummy_layers=2)


def test_a_drafter_that_does_not_run_is_left_out_and_named() -> None:
    found = dummy("qwen3-8b-uno", 2)
    assert found.network is None and found.drafter is None
    assert "kind adapter" in found.notices[0] and "decodes alone" in found.notices[0]
