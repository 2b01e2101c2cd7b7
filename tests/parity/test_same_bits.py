"""Verification is plain decoding, bit for bit: the logits and taps of a block of rows equal those of the same tokens
one by one, through a whole model, so that greedy output with speculation is plain decoding's by construction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gemma
import pytest
import tiny
import torch
from native import INSTRUCTIONS, ROWS, kernels, library

from foldspec import Engine
from foldspec.cache.paged import PagedCache
from foldspec.checkpoints.weights import load_into, read_headers
from foldspec.errors import UsageError
from foldspec.models.base import LanguageModel, model_class
from foldspec.models.config import ModelConfig
from foldspec.models.layers import join, layouts, matrices, wide

HELD = (torch.float32, torch.bfloat16)


def loaded(folder: Path, instructions: str, held: torch.dtype) -> LanguageModel:
    config, weights = ModelConfig.read(folder), read_headers(folder)
    model = model_class(config).from_config(config, tuple(weights.entries), kernels(instructions))
    join(model, held, torch.float32, "cpu")
    load_into(
        model,
        weights,
        dtype=torch.float32,
        device="cpu",
        held=held,
        matrices=matrices(model),
        wide=wide(model),
        layouts=layouts(model, held, torch.float32, "cpu", kernels(instructions)),
        rename=model.parameter_name,
    )
    return model


def one_by_one(model: LanguageModel, cache: PagedCache, ids: Sequence[int], taps: Sequence[int]) -> list[torch.Tensor]:
    """Logits, then the taps, of tokens decoded one at a time after what request 0 holds, by a fork of it."""
    cache.fork(0, 1)
    outputs = [tiny.forward(model, cache, [[i]], [1], taps) for i in ids]
    cache.close(1)
    return [
        torch.cat([o.logits for o in outputs]),
        *(torch.cat([o.taps[i] for o in outputs]) for i in range(len(taps))),
    ]


@pytest.mark.parametrize("held", HELD, ids=str)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_rows_of_a_tiny_llama(instructions: str, held: torch.dtype, tmp_path: Path) -> None:
    """Widths that no vector divides; prompts that end before, at and after the edge of a page and of a key block."""
    config = tiny.changed(tiny.TARGET, hidden_size=36, intermediate_size=53, num_attention_heads=6, head_dim=10)
    model = loaded(tiny.write_target(tmp_path, config), instructions, held)
    taps = (0, 2)
    for n in (1, 15, 16, 60, 64, 130):
        cache = tiny.paged_cache(model)
        cache.open(0)
        tiny.forward(model, cache, [tiny.prompt(n)], [0])
        ids = tiny.prompt(max(ROWS), seed=1)
        torch.set_num_threads(1)
        wanted = one_by_one(model, cache, ids, taps)
        for rows in ROWS:
            torch.set_num_threads(1 + rows % 3)
            output = tiny.forward(model, cache, [ids[:rows]], [0], taps)
            cache.truncate(0, n)
            for found, expected in zip((output.logits, *output.taps), wanted, strict=True):
                assert torch.equal(found, expected[:rows]), (n, rows)


@pytest.mark.parametrize("held", HELD, ids=str)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_rows_of_a_tiny_gemma(instructions: str, held: torch.dtype, tmp_path: Path) -> None:
    """Two head sizes, a window that begins anew for every row, a gate and a softcap over widths that no vector
    divides."""
    odd = {"hidden_size": 36, "intermediate_size": 53, "vocab_size": 131, "head_dim": 10}
    small = loaded(gemma.write_target(tmp_path / "4", **odd), instructions, held)
    large = loaded(gemma.write_target(tmp_path / "70", **odd, sliding_window=70), instructions, held)
    for model, n in ((small, 1), (small, 4), (small, 67), (large, 60), (large, 1016)):
        cache = tiny.paged_cache(model, pages=140, longest_pass=1016)
        cache.open(0)
        tiny.forward(model, cache, [tiny.prompt(n, 131)], [0])
        ids = tiny.prompt(max(ROWS), 131, seed=1)
        torch.set_num_threads(1)
        wanted = one_by_one(model, cache, ids, (0, 1, 2))
        for rows in ROWS:
            torch.set_num_threads(1 + rows % 3)
            output = tiny.forward(model, cache, [ids[:rows]], [0], (0, 1, 2))
            cache.truncate(0, n)
            for found, expected in zip((output.logits, *output.taps), wanted, strict=True):
                assert torch.equal(found, expected[:rows]), (n, rows)


@pytest.mark.parametrize("held", HELD, ids=str)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_rows_of_a_tiny_qwen3_5(instructions: str, held: torch.dtype, tmp_path: Path) -> None:
    """With blocks taken back before, at every length, whose rows the next block has to follow."""
    model = loaded(tiny.write_target(tmp_path, tiny.QWEN3_5), instructions, held)
    taps = (0, 1, 4)
    for n in (3, 33):
        cache = tiny.paged_cache(model)
        cache.open(0)
        tiny.forward(model, cache, [tiny.prompt(n)], [0])
        ids = tiny.prompt(max(ROWS), seed=1)
        wanted = one_by_one(model, cache, ids, taps)
        cache.fork(0, 2)
        for rows in ROWS:
            torch.set_num_threads(1 + rows % 3)
            output = tiny.forward(model, cache, [ids[:rows]], [0], taps)
            cache.truncate(0, n)
            for found, expected in zip((output.logits, *output.taps), wanted, strict=True):
                assert torch.equal(found, expected[:rows]), (n, rows)
        done = 0
        for kept, rest in ((1, 16), (2, 5), (5, 2), (3, 0), (8, 8), (4, 1), (7, 9), (3, 3)):  # 33 rows
            block = [*ids[done : done + kept], *tiny.prompt(rest, seed=rest)]
            output = tiny.forward(model, cache, [block], [2], taps)
            cache.truncate(2, n + done + kept)
            for found, expected in zip((output.logits, *output.taps), wanted, strict=True):
                assert torch.equal(found[:kept], expected[done : done + kept]), (n, done)
            done += kept
        assert done == max(ROWS)


@pytest.mark.parametrize("config", [tiny.TARGET, tiny.QWEN3_5], ids=["llama", "qwen3_5"])
def test_rows_of_several_requests_do_not_meet(config: dict[str, Any], tmp_path: Path) -> None:
    model = loaded(tiny.write_target(tmp_path, config), "portable", torch.float32)
    cache = tiny.paged_cache(model)
    lengths, blocks = (3, 70, 17), (5, 1, 8)
    for request, n in enumerate(lengths):
        cache.open(request)
        tiny.forward(model, cache, [tiny.prompt(n, seed=request)], [request])
    pieces = [tiny.prompt(count, seed=9) for count in blocks]
    together = tiny.forward(model, cache, pieces, [0, 1, 2]).logits.split(blocks)
    for request, n in enumerate(lengths):
        cache.truncate(request, n)
        assert torch.equal(tiny.forward(model, cache, [pieces[request]], [request]).logits, together[request])


@pytest.mark.parametrize("config", [tiny.TARGET, tiny.QWEN3_5], ids=["llama", "qwen3_5"])
def test_a_prompt_in_chunks_is_the_prompt_at_once(config: dict[str, Any], tmp_path: Path) -> None:
    model = loaded(tiny.write_target(tmp_path, config), "portable", torch.float32)
    cache = tiny.paged_cache(model)
    ids = tiny.prompt(300)
    cache.open(0)
    whole = tiny.forward(model, cache, [ids], [0]).logits
    cache.open(1)
    pieces = [tiny.forward(model, cache, [ids[a:b]], [1]).logits for a, b in ((0, 7), (7, 100), (100, 299), (299, 300))]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.slow
@pytest.mark.parametrize("held", HELD, ids=str)
def test_rows_of_the_real_target(held: torch.dtype, embedded: Path) -> None:
    best = next(i for i in INSTRUCTIONS if i in runnable())
    model = loaded(embedded, best, held)
    taps = (1, 14, 28)
    for n in (255, 1030):
        cache = tiny.paged_cache(model, pages=8, page_size=256)
        cache.open(0)
        tiny.forward(model, cache, [tiny.prompt(n, model.vocabulary)], [0])
        ids = tiny.prompt(16, model.vocabulary, seed=1)
        wanted = one_by_one(model, cache, ids, taps)
        for rows in range(1, 17):
            output = tiny.forward(model, cache, [ids[:rows]], [0], taps)
            cache.truncate(0, n)
            for found, expected in zip((output.logits, *output.taps), wanted, strict=True):
                assert torch.equal(found, expected[:rows]), (n, rows)


def runnable() -> set[str]:
    return {name for name in INSTRUCTIONS if library(name).reason is None}


# ------------------------------------------------------------------------------------------------ how weights are held


@pytest.mark.slow
def test_the_real_pair_is_held_as_bfloat16_unless_told_otherwise(embedded: Path) -> None:
    found = {}
    for weights in ("auto", "bfloat16", "float32"):
        with Engine.load(target=str(embedded), drafter="none", device="cpu", weights=weights, max_context=64) as engine:
            assert engine.settings()["dtype"] == "float32"
            model = engine._resources.found.model
            assert model.head_weight.dtype == getattr(torch, engine.settings()["weights"])
            assert {p.dtype for name, p in model.named_parameters() if "norm" in name} == {torch.float32}
            found[weights] = engine.settings()["weights"], engine.generate(tiny.prompt(9)).token_ids[:8]
    assert found["auto"] == found["bfloat16"] and found["auto"][0] == "bfloat16"
    assert found["float32"] == ("float32", found["auto"][1])  # the same numbers: bf16 is exact in fp32


def test_a_float32_checkpoint_is_not_narrowed_unless_asked(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path)
    for weights, held in (("auto", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        with Engine.load(target=str(target), drafter="none", device="cpu", weights=weights, max_context=64) as engine:
            assert engine.settings()["weights"] == held
            assert len(engine.generate(tiny.prompt(9)).token_ids) > 0


@pytest.mark.parametrize(("weights", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float16")])
def test_weights_that_the_arithmetic_does_not_take_are_refused(weights: str, dtype: str, tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path)
    with pytest.raises(UsageError, match=f"--weights: {weights} weights do not go with {dtype} arithmetic on cpu"):
        Engine.load(target=str(target), drafter="none", device="cpu", weights=weights, dtype=dtype)
    with pytest.raises(UsageError, match="weights: must be one of auto, float32, bfloat16"):
        Engine.load(target=str(target), drafter="none", device="cpu", weights="int8")


def test_without_a_compiler_weights_may_still_be_held_narrow(tmp_path: Path) -> None:
    """Slowly, and with the same numbers as far as torch gives them."""
    target = tiny.write_target(tmp_path)
    ids = []
    for compiler in ("no-such-compiler", None):
        with Engine.load(
            target=str(target), drafter="none", device="cpu", weights="bfloat16", max_context=64, compiler=compiler
        ) as engine:
            assert bool(engine.notices) == (compiler is not None)
            ids.append(engine.generate(tiny.prompt(9)).token_ids[:8])
    assert ids[0] == ids[1]
