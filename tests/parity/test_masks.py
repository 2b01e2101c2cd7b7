"""Qwen2 and Qwen3 under the masks of diffusion models: logits equal transformers' under the same mask within 1e-4 in
fp32, however whole blocks are fed; and those of the golden Dream and SDAR."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import tiny
import torch
from oracles import Pair, close, opened, write
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen3Config

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.models.base import ForwardPlan, LanguageModel
from foldspec.models.mask import CAUSAL, FULL, Mask, grid

WIDTHS = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
FAMILIES = {"qwen2": Qwen2Config(**WIDTHS), "qwen3": Qwen3Config(**WIDTHS, head_dim=16)}  # type: ignore[arg-type]
KERNELS = ["native", "cpu", "reference"]
MASKS = [CAUSAL, grid(3), grid(4), grid(16), grid(100), FULL]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield Pair(write(tmp_path_factory.mktemp("masks"), FAMILIES[request.param]))


@torch.inference_mode()
def wanted(pair: Pair, ids: Sequence[int], mask: Mask) -> torch.Tensor:
    """transformers' logits of all ids at once, under a 4-d mask made here."""
    block = torch.arange(len(ids)) // (mask.block or len(ids))
    hidden = block[None, :] > block[:, None]
    four = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
    return pair.oracle(torch.tensor([list(ids)]), attention_mask=four).logits[0]


@torch.inference_mode()
def forward(
    model: LanguageModel, cache: PagedCache, ids: Sequence[Sequence[int]], requests: Sequence[int], mask: Mask
) -> torch.Tensor:
    starts = [cache.tables.length(request) for request in requests]
    plan = ForwardPlan(Rows.of(requests, starts, [len(piece) for piece in ids]), mask=mask)
    return model(torch.tensor([i for piece in ids for i in piece]), plan, cache).logits


def pieces(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_one_pass(pair: Pair, mask: Mask, kernels: str) -> None:
    model = tiny.load_target(pair.folder, kernels=kernels)
    close(forward(model, opened(model), [pair.ids], [0], mask), wanted(pair, pair.ids, mask))


@pytest.mark.parametrize(("block", "size"), [(4, 4), (4, 20), (3, 9), (16, 32), (17, 17)])
def test_whole_blocks_in_chunks(pair: Pair, block: int, size: int) -> None:
    """The last chunk holds a block in part; it reads what there is of it, as in one pass."""
    cache, mask = opened(pair.model), grid(block)
    found = torch.cat([forward(pair.model, cache, [piece], [0], mask) for piece in pieces(pair.ids, size)])
    close(found, wanted(pair, pair.ids, mask))


@pytest.mark.parametrize(("mask", "kept"), [(grid(4), 40), (grid(16), 48)], ids=str)
def test_a_partial_block_again_and_again(pair: Pair, mask: Mask, kept: int) -> None:
    """What is not to stay is truncated away: the block's other ids then read nothing of it."""
    cache = opened(pair.model)
    forward(pair.model, cache, [pair.ids[:kept]], [0], mask)
    for seed, count in enumerate((3, 1, 4, 2)):
        own = tiny.prompt(count, pair.model.vocabulary, seed=seed)
        close(forward(pair.model, cache, [own], [0], mask), wanted(pair, [*pair.ids[:kept], *own], mask)[kept:])
        cache.truncate(0, kept)


def test_ragged_requests(pair: Pair) -> None:
    everyone = [tiny.prompt(n, pair.model.vocabulary, seed=3) for n in (30, 9, 17)]
    for mask in (grid(4), FULL):
        cache = opened(pair.model, 5, 1, 8)
        found = forward(pair.model, cache, everyone, [5, 1, 8], mask)
        for ids, logits in zip(everyone, found.split([30, 9, 17]), strict=True):
            close(logits, wanted(pair, ids, mask))


def test_a_chunk_that_is_not_whole_blocks_shows(pair: Pair) -> None:
    cache, mask = opened(pair.model), grid(4)
    found = torch.cat([forward(pair.model, cache, [piece], [0], mask) for piece in pieces(pair.ids, 18)])
    assert float((found - wanted(pair, pair.ids, mask)).abs().max()) > 0.01
    assert float((wanted(pair, pair.ids, CAUSAL) - wanted(pair, pair.ids, mask)).abs().max()) > 0.01


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_spans(mask: Mask, window: int | None) -> None:
    """Row by row, from the definition: p's block and everything before it, of which a window keeps the end."""
    for start in (0, 3, 8, 31):
        end = start + 7
        first, last = mask.spans(start, 7, window)
        for p, f, l in zip(range(start, end), first, last, strict=True):
            size = mask.block
            own = set(range(start, end)) if size is None else {j for j in range(end) if j // size == p // size}
            before = {j for j in range(min(own)) if window is None or min(own) - j < window}
            assert set(range(f, l)) == before | own, (mask, start, p)


# --------------------------------------------------------------------------------------------------------- golden files


def golden(name: str, architecture: str) -> tuple[LanguageModel, dict[str, torch.Tensor]]:
    folder = tiny.GOLDEN / "tiny" / name
    return tiny.load_target(folder, architecture=architecture), load_file(folder / "golden.safetensors")


@pytest.mark.parametrize(
    ("name", "architecture", "mask"), [("dream", "Qwen2ForCausalLM", FULL), ("sdar", "Qwen3ForCausalLM", grid(4))]
)
def test_golden_logits_and_layers(name: str, architecture: str, mask: Mask) -> None:
    model, g = golden(name, architecture)
    ids = g["input_ids"][0].tolist()
    plan = ForwardPlan(Rows.of([0], [0], [len(ids)]), tuple(range(model.layer_count)), mask=mask)
    with torch.inference_mode():
        found = model(torch.tensor(ids), plan, opened(model))
    close(found.logits, g["logits"][0])
    for i, tap in enumerate(found.taps):
        close(tap, g[f"hidden.layer.{i:02d}"][0])
    close_but = float((forward(model, opened(model), [ids], [0], CAUSAL) - g["logits"][0]).abs().max())
    assert close_but > 1, "the mask matters"


def test_golden_block_over_a_cache() -> None:
    model, g = golden("sdar", "Qwen3ForCausalLM")
    stored, cache = int(g["cache.len"]), opened(model)
    forward(model, cache, [g["input_ids"][0, :stored].tolist()], [0], grid(4))
    close(forward(model, cache, [g["cached.block_ids"][0].tolist()], [0], grid(4)), g["cached.block_logits"][0])


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("block", [None, 1, 4])
def test_rows_before_a_block_read_nothing_behind_themselves(block: int | None, window: int | None) -> None:
    """Entry by entry, for any number of rows."""
    for start in (0, 5):
        for count in range(1, 9):
            for causal in range(4):
                first, last = Mask(block, causal).spans(start, count, window)
                assert len(first) == len(last) == count
                for row in range(count):
                    p, alone = start + row, start + causal
                    begin = p if p < alone or block == 1 else alone if block is None else p - p % block
                    size = 1 if p < alone else block or count
                    reach = range(10**6) if window is None else range(window)
                    wanted = {
                        j
                        for j in range(start + count)
                        if (j <= p if p < alone else j < begin + size) and (j >= begin or begin - j in reach)
                    }
                    assert wanted == set(range(first[row], last[row]))
