"""Llama's logits equal transformers' within 1e-4 in fp32, however ids are fed and whatever was taken back before."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file

from foldspec import Engine, FoldspecError, SamplingParams
from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardPlan, LanguageModel
from foldspec.models.config import ModelConfig
from foldspec.models.layers import RMSNorm
from foldspec.models.rope import Rope

TOLERANCE = 1e-4
PAGE, LENGTH = 16, 83
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # short, so that all three regimes of the scaling are met
    "rope_theta": 500000.0,
}
_WIDTHS = {
    "vocab_size": 160,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama3 rope, no groups": {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": False,
    },
    "tied head, groups of 3": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "biases, own head_dim, groups of 4": {
        "hidden_size": 40,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    },
    "one kv head": {
        "hidden_size": 56,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
}


class Pair:
    """The same checkpoint in foldspec and in transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, tiny.load_target(folder)
        oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.oracle = oracle.eval()

    @functools.cached_property
    def ids(self) -> list[int]:
        return tiny.prompt(LENGTH, self.model.vocabulary, seed=5)

    @torch.inference_mode()
    def wanted(self, ids: Sequence[int]) -> torch.Tensor:
        """One forward over everything, by transformers."""
        return self.oracle(torch.tensor([list(ids)])).logits[0]


def write(folder: Path, settings: dict[str, Any], **save: Any) -> Path:
    """A random checkpoint, written by transformers."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_WIDTHS, **settings))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    weights = tiny.random_tensors(shapes, seed=len(settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.save_pretrained(folder, **save)
    return folder


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield Pair(write(tmp_path_factory.mktemp("llama"), VARIANTS[request.param]))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def feed(model: LanguageModel, cache: PagedCache, ids: Sequence[int], sizes: Sequence[int], request: int = 0) -> Any:
    """Ids in pieces of these sizes (the last one repeats); logits of all rows."""
    pieces, at, step = [], 0, 0
    while at < len(ids):
        size = sizes[min(step, len(sizes) - 1)]
        pieces.append(tiny.forward(model, cache, [ids[at : at + size]], [request]).logits)
        at, step = at + size, step + 1
    return torch.cat(pieces)


def opened(model: LanguageModel, *requests: int, page_size: int = PAGE) -> PagedCache:
    cache = tiny.paged_cache(model, page_size=page_size)
    for request in requests or (0,):
        cache.open(request)
    return cache


WAYS = {
    "prefill": [LENGTH],
    "chunks of a page": [16],
    "chunks that straddle pages": [17],
    "chunks of 7": [7],
    "decode": [33, 1],
    "decode from nothing": [1],
    "blocks of 5": [31, 5],
    "blocks of 6": [32, 6],
    "blocks of 8": [15, 8],
}


@pytest.mark.parametrize("way", WAYS)
def test_logits_however_the_ids_are_fed(pair: Pair, way: str) -> None:
    cache = opened(pair.model)
    close(feed(pair.model, cache, pair.ids, WAYS[way]), pair.wanted(pair.ids))
    assert cache.tables.length(0) == LENGTH


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_pages_of_any_size(pair: Pair, page_size: int) -> None:
    cache = tiny.paged_cache(pair.model, pages=8, page_size=page_size)
    cache.open(0)
    close(feed(pair.model, cache, pair.ids, [40, 1, 6]), pair.wanted(pair.ids))


def test_the_reference_kernel_gives_the_same(pair: Pair) -> None:
    model = tiny.load_target(pair.folder, kernels="reference")
    close(feed(model, opened(model), pair.ids, [30, 1, 1, 8]), pair.wanted(pair.ids))


@pytest.mark.parametrize("context", [9, 15, 16, 26, 31, 32])
def test_logits_after_a_truncate(pair: Pair, context: int) -> None:
    """A block of 8 across a page's end, any part of it taken back, other ids in its place, again and again."""
    cache, ids = opened(pair.model), pair.ids[:context]
    feed(pair.model, cache, ids, [context])
    for kept in (0, 3, 1, 8, 5, 2, 7, 4, 6):
        block = tiny.prompt(8, pair.model.vocabulary, seed=kept)
        logits = tiny.forward(pair.model, cache, [block], [0]).logits
        close(logits, pair.wanted([*ids, *block])[len(ids) :])
        ids = [*ids, *block[:kept]]
        cache.truncate(0, len(ids))
        assert cache.tables.length(0) == len(ids)


def test_ragged_requests_in_one_forward_equal_each_alone(pair: Pair) -> None:
    """A prefill, a block and one token at once, each request at another length; pages interleave as they grow."""
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
        close(torch.cat(pieces), pair.wanted(ids))


def test_a_fork_goes_on_alone(pair: Pair) -> None:
    """Two requests from one prefix: neither sees what the other writes, nor does the prefix."""
    prefix, left, right = pair.ids[:37], pair.ids[37:60], pair.ids[60:]
    cache = opened(pair.model)
    feed(pair.model, cache, prefix, [20])
    cache.fork(0, 1)
    cache.fork(0, 2)
    close(feed(pair.model, cache, left, [5], request=1), pair.wanted([*prefix, *left])[37:])
    close(feed(pair.model, cache, right, [6], request=2), pair.wanted([*prefix, *right])[37:])
    close(feed(pair.model, cache, left, [9], request=0), pair.wanted([*prefix, *left])[37:])


def test_taps_are_the_raw_outputs_of_layers(pair: Pair) -> None:
    """Also of the last layer, which transformers' own list of hidden states gives after the final norm."""
    raw: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _m, _a, out, i=i: raw.__setitem__(i, out[0] if isinstance(out, tuple) else out)
        )
        for i, layer in enumerate(pair.oracle.model.layers)
    ]
    logits = pair.wanted(pair.ids)
    for hook in hooks:
        hook.remove()
    output = tiny.forward(pair.model, opened(pair.model), [pair.ids], [0], taps=(0, 2))
    close(output.logits, logits)
    assert len(output.taps) == 2
    for tap, layer in zip(output.taps, (0, 2), strict=True):
        close(tap, raw[layer].reshape(LENGTH, -1))


def test_only_the_wanted_rows_go_through_the_head(pair: Pair) -> None:
    wanted = pair.wanted(pair.ids)
    for rows in ((LENGTH - 1,), (0, 40, 41), ()):
        plan = ForwardPlan(Rows.of([0], [0], [LENGTH]), head_rows=rows)
        with torch.inference_mode():
            logits = pair.model(torch.tensor(pair.ids), plan, opened(pair.model)).logits
        close(logits, wanted[list(rows)] if rows else wanted[:0])


# ---------------------------------------------------------------------------------------------- configs and checkpoints


def respelled(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same rope in the spellings that published files have."""
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    yield {**config, "rope_theta": theta, "rope_scaling": rope if rope["rope_type"] != "default" else None}
    yield {**config, "rope_theta": theta, "rope_parameters": rope}
    older = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    yield {**config, "rope_theta": theta, "rope_scaling": older}


def test_old_and_new_spellings_of_the_rope(pair: Pair, tmp_path: Path) -> None:
    config = json.loads((pair.folder / "config.json").read_text())
    assert "rope_parameters" in config and "rope_theta" not in config  # what transformers 5 writes
    wanted = pair.wanted(pair.ids)
    for i, other in enumerate(respelled(config)):
        folder = shutil.copytree(pair.folder, tmp_path / str(i))
        (folder / "config.json").write_text(json.dumps(other))
        model = tiny.load_target(folder)
        close(feed(model, opened(model), pair.ids, [LENGTH]), wanted)


def test_a_rope_that_is_missing_or_unknown_is_refused() -> None:
    config = tiny.changed(tiny.TARGET, rope_theta=None)
    with pytest.raises(FoldspecError, match="rope_theta is missing"):
        Rope.from_config(ModelConfig(config, "here"), 8)
    for scaling in ({"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}):
        with pytest.raises(FoldspecError, match=r"here rope_scaling: rope type '\w+' is not supported"):
            Rope.from_config(ModelConfig({**tiny.TARGET, "rope_scaling": scaling}, "here"), 8)
    with pytest.raises(FoldspecError, match="low_freq_factor is missing"):
        scaling = {"rope_type": "llama3", "factor": 8.0}
        Rope.from_config(ModelConfig({**tiny.TARGET, "rope_scaling": scaling}, "here"), 8)


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path, VARIANTS["biases, own head_dim, groups of 4"], max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2 and (folder / "model.safetensors.index.json").exists()
    pair = Pair(folder)
    close(feed(pair.model, opened(pair.model), pair.ids, [LENGTH]), pair.wanted(pair.ids))


def test_a_head_in_the_file_wins_over_a_tied_config(tmp_path: Path) -> None:
    """Some exports declare tied embeddings and ship a head of their own."""
    folder = write(tmp_path / "untied", VARIANTS["llama3 rope, no groups"])
    pair = Pair(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model = tiny.load_target(folder)
    close(feed(model, opened(model), pair.ids, [LENGTH]), pair.wanted(pair.ids))


def test_angles_far_out_are_transformers_own() -> None:
    """At positions of a long context fp32 angles differ by the order of operations: transformers' order counts."""
    config = transformers.LlamaConfig(**_WIDTHS, **{**VARIANTS["llama3 rope, no groups"], "head_dim": 64})
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    rope = Rope.from_config(ModelConfig({"rope_parameters": LLAMA3}, ""), 64)
    positions = torch.tensor([0, 1, 1023, 1024, 8191, 131071])
    cos, sin = rotary(torch.zeros(1), positions[None])
    mine = rope.at(positions)
    assert torch.equal(mine[0][:, 0], cos[0, :, :32]) and torch.equal(mine[1][:, 0], sin[0, :, :32])


def test_the_norm_rounds_as_its_source_does_in_half_precision() -> None:
    source = transformers.models.llama.modeling_llama.LlamaRMSNorm(64, eps=1e-5).bfloat16()
    mine = RMSNorm(64, 1e-5, Kernels())
    draw = torch.Generator().manual_seed(0)
    source.weight.data = (1 + 0.2 * torch.randn(64, generator=draw)).bfloat16()
    mine.weight = torch.nn.Parameter(source.weight.data, requires_grad=False)
    x = (3 * torch.randn(50, 64, generator=draw)).bfloat16()
    assert torch.equal(mine(x), source(x).detach())


# --------------------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("name", ["llama31", "smollm2"])
def test_golden_checkpoints(name: str) -> None:
    """What transformers 5.24 computed when the golden files were made: logits, layer outputs, rollback, greedy ids."""
    folder = tiny.GOLDEN / "tiny" / name
    golden = load_file(folder / "golden.safetensors")
    ids = golden["input_ids"][0].tolist()
    model = tiny.load_target(folder)
    context = {"llama31": 64, "smollm2": 42}[name]

    whole = tiny.forward(model, opened(model), [ids], [0], taps=range(model.layer_count))
    close(whole.logits, golden["logits"][0])
    for i, tap in enumerate(whole.taps):
        close(tap, golden[f"hidden.layer.{i:02d}"][0])
    for sizes in ([24], [context, 1], [context, 5]):
        close(feed(model, opened(model), ids, sizes), golden["logits"][0])

    draft, other = golden["rollback.draft_ids"][0].tolist(), golden["rollback.cont_ids"][0].tolist()
    for kept in (0, 2, 5, 6):
        cache = opened(model)
        feed(model, cache, ids[:context], [context])
        close(tiny.forward(model, cache, [draft], [0]).logits, golden["rollback.verify.logits"][0])
        cache.truncate(0, context + kept)
        close(tiny.forward(model, cache, [other], [0]).logits, golden[f"rollback.k{kept}.logits"][0])

    wanted = golden["greedy.ids"][0].tolist()
    with Engine.load(target=str(folder), drafter="none") as engine:
        done = engine.generate(ids[:context], SamplingParams(max_tokens=len(wanted), ignore_eos=True))
    assert list(done.token_ids) == wanted


# --------------------------------------------------------------------------------------------------------- real weights


@pytest.mark.slow
def test_smollm2(embedded: Path) -> None:
    """The real target: prefill, chunks, decoding, blocks, and after a truncate."""
    pair = Pair(embedded)
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ids = transformers.AutoTokenizer.from_pretrained(embedded)(text)["input_ids"][:120]
    assert len(ids) == 120
    wanted = pair.wanted(ids)
    for sizes in ([120], [50], [100, 8], [113, 1]):
        close(feed(pair.model, opened(pair.model), ids, sizes), wanted)
    cache = opened(pair.model)
    feed(pair.model, cache, ids[:80], [80])
    for kept in (0, 4, 8):
        block = [(i + 1 + kept) % 1000 for i in ids[80:88]]
        length = cache.tables.length(0)
        tiny.forward(pair.model, cache, [block], [0])
        cache.truncate(0, length + kept)
        ids = [*ids[:length], *block[:kept], *ids[length + kept :]]
    length = cache.tables.length(0)
    assert length == 92
    close(tiny.forward(pair.model, cache, [ids[length:]], [0]).logits, pair.wanted(ids)[length:])


def test_logits_are_large_enough_for_the_tolerance_to_mean_something(pair: Pair) -> None:
    """Random weights must not make a model whose parts hardly count: leaving one out has to show."""
    wanted = pair.wanted(pair.ids)
    assert wanted.std() > 0.5
    shuffled = pair.wanted([*reversed(pair.ids[:-1]), pair.ids[-1]])
    assert (shuffled[-1] - wanted[-1]).abs().max() > 100 * TOLERANCE  # the order of the context is felt
    assert math.isfinite(float(wanted.abs().max()))
