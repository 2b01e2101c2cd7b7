"""Llama, Qwen2 and Qwen3: logits equal transformers' within 1e-4 in fp32, however ids are fed and whatever was taken
back before; each of many mistakes would show."""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scripted
import tiny
import torch
import transformers
from oracles import (
    LENGTH,
    TOLERANCE,
    WAYS,
    Pair,
    close,
    distance,
    feed,
    meets_golden,
    meets_half_precision,
    opened,
    write,
)
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from foldspec import FoldspecError
from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import reference as attention
from foldspec.kernels.rotate_append import reference as rotation
from foldspec.models.base import ForwardPlan
from foldspec.models.config import ModelConfig
from foldspec.models.layers import Projections, RMSNorm, SwiGLU
from foldspec.models.llama import Llama
from foldspec.models.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # short, so that all three regimes of the scaling are met
    "rope_theta": 500000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "beta_fast": 2.0,  # few pairs: the ramp must begin where some are
}
PLAIN = {"rope_type": "default", "rope_theta": 100000.0}
_WIDTHS: dict[str, Any] = {
    "vocab_size": 160,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}


def widths(hidden: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    named = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**_WIDTHS, **named, **others}


VARIANTS: dict[str, PreTrainedConfig] = {
    "llama3 rope, no groups": LlamaConfig(**widths(48, 4, 4, rope_parameters=LLAMA3, tie_word_embeddings=False)),
    "tied head, groups of 3": LlamaConfig(**widths(48, 6, 2, rope_parameters=PLAIN, tie_word_embeddings=True)),
    "biases, own head_dim, groups of 4": LlamaConfig(
        **widths(40, 8, 2, head_dim=12, attention_bias=True, mlp_bias=True, rope_parameters=PLAIN),
        tie_word_embeddings=False,
    ),
    "one kv head": LlamaConfig(
        **widths(56, 7, 1, rope_parameters=LLAMA3, tie_word_embeddings=True, attention_bias=True)
    ),
    "yarn": LlamaConfig(**widths(64, 4, 2, rope_parameters=YARN, tie_word_embeddings=False)),
    "qwen2, odd vocabulary": Qwen2Config(
        **widths(48, 6, 3, vocab_size=163, rope_parameters=PLAIN, tie_word_embeddings=False)
    ),
    "qwen2 tied, one kv head": Qwen2Config(
        **widths(40, 5, 1, vocab_size=151, rope_parameters=PLAIN, tie_word_embeddings=True, max_window_layers=1)
    ),
    "qwen3, odd vocabulary": Qwen3Config(
        **widths(40, 4, 2, vocab_size=157, head_dim=18, rope_parameters=PLAIN, tie_word_embeddings=False)
    ),
    "qwen3 tied, biases, yarn": Qwen3Config(
        **widths(48, 9, 3, head_dim=32, attention_bias=True, rope_parameters=YARN, tie_word_embeddings=True)
    ),
}
GOLDENS = ("llama31", "smollm2", "qwen2", "qwen2_tied", "qwen3")


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield Pair(write(tmp_path_factory.mktemp("llama"), VARIANTS[request.param]))


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
    output = tiny.forward(pair.model, opened(pair.model), [pair.ids], [0], taps=(0, 2))
    close(output.logits, pair.wanted(pair.ids))
    assert len(output.taps) == 2
    for tap, layer in zip(output.taps, (0, 2), strict=True):
        close(tap, pair.layers(pair.ids)[layer])


def test_only_the_wanted_rows_go_through_the_head(pair: Pair) -> None:
    wanted = pair.wanted(pair.ids)
    for rows in ((LENGTH - 1,), (0, 40, 41), ()):
        plan = ForwardPlan(Rows.of([0], [0], [LENGTH]), head_rows=rows)
        with torch.inference_mode():
            logits = pair.model(torch.tensor(pair.ids), plan, opened(pair.model)).logits
        close(logits, wanted[list(rows)] if rows else wanted[:0])


# ---------------------------------------------------------------------------------------------- configs and checkpoints


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(tiny.changed(json.loads(path.read_text()), **changes)))


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


@pytest.mark.parametrize("name", ["biases, own head_dim, groups of 4", "qwen2 tied, one kv head"])
def test_a_sharded_checkpoint(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, VARIANTS[name], max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2 and (folder / "model.safetensors.index.json").exists()
    pair = Pair(folder)
    close(feed(pair.model, opened(pair.model), pair.ids, [LENGTH]), pair.wanted(pair.ids))


def test_biases_that_no_key_announces(tmp_path: Path) -> None:
    """The same file under Llama's name, whose config says that there are none; and with one of them gone."""
    pair = Pair(write(tmp_path, VARIANTS["qwen2, odd vocabulary"]))
    edit(tmp_path, architectures=["LlamaForCausalLM"], attention_bias=False)
    model = tiny.load_target(tmp_path)
    close(feed(model, opened(model), pair.ids, [LENGTH]), pair.wanted(pair.ids))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM"):
        edit(tmp_path, architectures=[architecture])
        with pytest.raises(FoldspecError, match=r"1 missing tensors: model\.layers\.1\.self_attn\.v_proj\.bias"):
            tiny.load_target(tmp_path)


def test_a_head_in_the_file_wins_over_a_tied_config(tmp_path: Path) -> None:
    """Some exports declare tied embeddings and ship a head of their own."""
    folder = write(tmp_path / "untied", VARIANTS["llama3 rope, no groups"])
    pair = Pair(folder)
    edit(folder, tie_word_embeddings=True)
    model = tiny.load_target(folder)
    close(feed(model, opened(model), pair.ids, [LENGTH]), pair.wanted(pair.ids))


def test_the_norm_rounds_as_its_source_does_in_half_precision() -> None:
    source = transformers.models.llama.modeling_llama.LlamaRMSNorm(64, eps=1e-5).bfloat16()
    mine = RMSNorm(64, 1e-5, Kernels())
    draw = torch.Generator().manual_seed(0)
    source.weight.data = (1 + 0.2 * torch.randn(64, generator=draw)).bfloat16()
    mine.weight = torch.nn.Parameter(source.weight.data, requires_grad=False)
    x = (3 * torch.randn(50, 64, generator=draw)).bfloat16()
    assert torch.equal(mine(x), source(x).detach())


# --------------------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_checkpoints(name: str) -> None:
    """What transformers 5.24 computed when the golden files were made: logits, layer outputs, rollback, greedy ids."""
    meets_golden(tiny.GOLDEN / "tiny" / name)


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama31", "smollm2", "qwen2_tied"))]
)
def test_drafts_change_no_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.GOLDEN / "tiny" / name
    scripted.follows_a_script(folder, monkeypatch)
    scripted.speculates_like_plain(folder, scripted.drafter_for(folder, tmp_path))


@pytest.mark.parametrize("name", VARIANTS)
def test_half_precision_rounds_as_the_source_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meets_half_precision(write(tmp_path, VARIANTS[name], dtype=torch.bfloat16), monkeypatch)


@pytest.mark.parametrize("name", ["llama31", "qwen3"])
def test_in_half_precision_a_fused_attention_rounds_otherwise(name: str) -> None:
    """Scores that are kept in fp32 move bf16 logits by a few ulp: ours no more than transformers' own fused one."""
    folder, half = tiny.GOLDEN / "tiny" / name, torch.bfloat16
    eager = Pair(folder, half)
    ids = tiny.prompt(200, 512, seed=6)
    wanted = eager.wanted(ids).float()
    auto = transformers.AutoModelForCausalLM
    fused = auto.from_pretrained(folder, dtype=half, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        theirs = (fused(torch.tensor([ids])).logits[0].float() - wanted).abs().amax(-1).median()
    model = tiny.load_target(folder, dtype=half)
    ours = (feed(model, opened(model, dtype=half), ids, [200]) - wanted).abs().amax(-1).median()
    assert 0 < ours < 1.3 * theirs


# ------------------------------------------------------------------------------------------------------------- mistakes

Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch, Llama], None]


def rope_of(scaling: dict[str, Any], **changes: Any) -> Mistake:
    def apply(_: Patch, model: Llama) -> None:
        values = {"rope_parameters": tiny.changed(scaling, **changes), "max_position_embeddings": 512}
        model.rope = Rope.from_config(ModelConfig(values, ""), model.geometry.head_dim)

    return apply


def rope_factor(of: Callable[[float], float]) -> Mistake:
    def apply(_: Patch, model: Llama) -> None:
        model.rope = Rope(model.rope._inverse, of(model.rope.factor))

    return apply


def interleaved(patch: Patch, _: Llama) -> None:
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    patch.setattr(rotation, "rotate", rotate)


def backwards(patch: Patch, _: Llama) -> None:
    true = rotation.rotate
    patch.setattr(rotation, "rotate", lambda x, cos, sin: true(x, cos, -sin))


def values_turn_too(patch: Patch, _: Llama) -> None:
    true = Kernels.rotate_append

    def turned(self: Kernels, q: Any, k: Any, v: Any, cos_sin: Any, into: Any) -> torch.Tensor:
        return true(self, q, k, rotation.rotate(v, *cos_sin), cos_sin, into)

    patch.setattr(Kernels, "rotate_append", turned)


def read(change: Callable[[Any], dict[str, Any]]) -> Mistake:
    """Every read of attention with other bounds or another scale."""

    def apply(patch: Patch, _: Llama) -> None:
        true = Kernels.multi_read_attention
        patch.setattr(
            Kernels,
            "multi_read_attention",
            lambda self, batch: true(self, [[replace(r, **change(r)) for r in reads] for reads in batch]),
        )

    return apply


def entries(r: Any) -> int:
    return sum(count for _, count in r.keys.runs)


def tiled(patch: Patch, _: Llama) -> None:
    def gather(e: Any, heads: int, dtype: torch.dtype) -> torch.Tensor:
        dense = tiny.dense(e).transpose(0, 1).to(dtype)
        return dense.repeat(heads // len(dense), 1, 1)

    patch.setattr(attention, "gather", gather)


def width_per_head(patch: Patch, model: Llama) -> None:
    """The scale from hidden_size / heads where head_dim is another."""
    read(lambda _: {"scale": (model.geometry.width / model.geometry.heads) ** -0.5})(patch, model)


def normed(change: Callable[[Projections, Any, Any, Any], tuple[Any, Any, Any]]) -> Mistake:
    """q, k and v [n, heads, d] as projected, and what becomes of them in the place of the head norms."""

    def apply(patch: Patch, _: Llama) -> None:
        def inputs(self: Projections, x: torch.Tensor) -> tuple[Any, Any, Any]:
            q, k, v = (self._heads(y) for y in self.stack(x))
            return change(self, q, k, v)

        patch.setattr(Projections, "inputs", inputs)

    return apply


def whole_row(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """The mean square of all heads together."""
    mean = x.pow(2).mean((-1, -2), keepdim=True)
    return x * torch.rsqrt(mean + norm.eps) * norm.weight


def norm_after_rotation(patch: Patch, model: Llama) -> None:
    normed(lambda _, q, k, v: (q, k, v))(patch, model)
    true, parts = Kernels.rotate_append, itertools.cycle([layer.self_attn for layer in model.model.layers])

    def late(self: Kernels, q: Any, k: Any, v: Any, cos_sin: Any, into: Any) -> torch.Tensor:
        part, slots = next(parts), list(into.slots)
        q = true(self, q, k, v, cos_sin, into)
        into.keys[slots] = part.k_norm(into.keys[slots])
        return part.q_norm(q)

    patch.setattr(Kernels, "rotate_append", late)


def offset_norms(patch: Patch, _: Llama) -> None:
    patch.setattr(RMSNorm, "scale", lambda self: self.weight + 1)


def without(*names: str) -> Mistake:
    """Parameters that end so are zero."""

    def apply(_: Patch, model: Llama) -> None:
        found = [p for name, p in model.named_parameters() if name.endswith(names)]
        assert found
        for parameter in found:
            parameter.zero_()

    return apply


def passes(*names: str) -> Mistake:
    """Modules that end so give back what they are given."""

    def apply(patch: Patch, model: Llama) -> None:
        found = [part for name, part in model.named_modules() if name.endswith(names)]
        assert found
        for part in found:
            patch.setattr(part, "forward", lambda x: x)

    return apply


def other_activation(patch: Patch, _: Llama) -> None:
    patch.setattr(Kernels, "silu_mul", lambda self, gate, up: torch.nn.functional.gelu(gate) * up)


def gate_and_up(patch: Patch, _: Llama) -> None:
    true = Kernels.silu_mul
    patch.setattr(Kernels, "silu_mul", lambda self, gate, up: true(self, up, gate))


def residual_is_normed(patch: Patch, _: Llama) -> None:
    true = SwiGLU.forward
    patch.setattr(SwiGLU, "forward", lambda self, x, plus: true(self, x, x))


def positions_begin_anew(patch: Patch, _: Llama) -> None:
    def positions(self: Rows, device: Any) -> torch.Tensor:
        return torch.cat([torch.arange(count) for count in self.counts])

    patch.setattr(Rows, "positions", positions)


def kept(extra: int) -> Mistake:
    """A truncate that keeps other than what it is told."""

    def apply(patch: Patch, _: Llama) -> None:
        true = PagedCache.truncate
        patch.setattr(PagedCache, "truncate", lambda self, request, n: true(self, request, n + extra))

    return apply


def tied(_: Patch, model: Llama) -> None:
    model.lm_head = None


def taps_before(patch: Patch, model: Llama) -> None:
    true = model.forward

    def forward(ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> Any:
        return true(ids, replace(plan, taps=tuple(max(i - 1, 0) for i in plan.taps)), cache)

    patch.setattr(model, "forward", forward)


def taps_normed(patch: Patch, model: Llama) -> None:
    """What transformers' list of hidden states has in its last place."""
    true = model.forward

    def forward(ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> Any:
        output = true(ids, plan, cache)
        *taps, last = output.taps
        return replace(output, taps=(*taps, model.model.norm(last)))

    patch.setattr(model, "forward", forward)


def scaled_embedding(patch: Patch, model: Llama) -> None:
    true = model.embed
    patch.setattr(model, "embed", lambda ids: true(ids) * model.width**0.5)


BIASED, QWEN2, QWEN3 = "biases, own head_dim, groups of 4", "qwen2, odd vocabulary", "qwen3, odd vocabulary"
LLAMA, YARNED, SMOL = "llama3 rope, no groups", "yarn", "tied head, groups of 3"
MISTAKES: dict[str, tuple[str, Mistake]] = {
    "neighbours are pairs": (LLAMA, interleaved),
    "keys ahead of queries": (LLAMA, backwards),
    "values turn too": (LLAMA, values_turn_too),
    "theta of another model": (SMOL, rope_of(PLAIN, rope_theta=10000.0)),
    "llama3 without scaling": (LLAMA, rope_of(LLAMA3, rope_type="default")),
    "llama3 as proportional": (LLAMA, rope_of(LLAMA3, rope_type="proportional")),
    "llama3 with high and low frequency factors of 1 and 8": (LLAMA, rope_of(LLAMA3, high_freq_factor=8.0)),
    "yarn without scaling": (YARNED, rope_of(YARN, rope_type="default")),
    "yarn for another length": (YARNED, rope_of(YARN, original_max_position_embeddings=128)),
    "yarn with a ramp of defaults": (YARNED, rope_of(YARN, beta_fast=None)),
    "yarn with ends that are not rounded": (YARNED, rope_of(YARN, truncate=False)),
    "yarn without its factor": (YARNED, rope_factor(lambda _: 1.0)),
    "yarn's factor twice": (YARNED, rope_factor(lambda factor: factor**2)),
    "positions begin anew": (LLAMA, positions_begin_anew),
    "rows see the next": (LLAMA, read(lambda r: {"last": tuple(min(n + 1, entries(r)) for n in r.last)})),
    "rows do not see themselves": (LLAMA, read(lambda r: {"last": tuple(max(n - 1, 1) for n in r.last)})),
    "the first entry is not seen": (LLAMA, read(lambda r: {"first": tuple(min(1, n - 1) for n in r.last)})),
    "kv heads tiled": (SMOL, tiled),
    "scale from the width": (QWEN3, width_per_head),
    "no scale": (LLAMA, read(lambda _: {"scale": 1.0})),
    "no head norm": (QWEN3, normed(lambda _, q, k, v: (q, k, v))),
    "head norm of q alone": (QWEN3, normed(lambda a, q, k, v: (a.q_norm(q), k, v))),
    "head norms exchanged": (QWEN3, normed(lambda a, q, k, v: (a.k_norm(q), a.q_norm(k), v))),
    "head norm of v": (QWEN3, normed(lambda a, q, k, v: (a.q_norm(q), a.k_norm(k), a.k_norm(v)))),
    "head norms over all heads": (
        QWEN3,
        normed(lambda a, q, k, v: (whole_row(a.q_norm, q), whole_row(a.k_norm, k), v)),
    ),
    "head norms after the rotation": (QWEN3, norm_after_rotation),
    "norms hold w - 1": (LLAMA, offset_norms),
    "no bias of q": (QWEN2, without("q_proj.bias")),
    "no bias of k": (QWEN2, without("k_proj.bias")),
    "no bias of v": (QWEN2, without("v_proj.bias")),
    "no bias of o": (BIASED, without("o_proj.bias")),
    "no bias of the MLP": (BIASED, without("up_proj.bias")),
    "no norm before the MLP": (LLAMA, passes("post_attention_layernorm")),
    "no norm at the end": (LLAMA, passes("model.norm")),
    "gelu": (LLAMA, other_activation),
    "gate and up exchanged": (LLAMA, gate_and_up),
    "the residual is normed": (LLAMA, residual_is_normed),
    "embedding scaled": (LLAMA, scaled_embedding),
    "tied head": (QWEN3, tied),
    "taps before layers": (LLAMA, taps_before),
    "last tap after the norm": (LLAMA, taps_normed),
    "one draft too many is kept": (LLAMA, kept(1)),
    "one too few": (LLAMA, kept(-1)),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Each variant, once it is asked for; and foldspec is right about it."""

    @functools.cache
    def make(name: str) -> Pair:
        pair = Pair(write(tmp_path_factory.mktemp("llama"), VARIANTS[name]))
        assert distance(tiny.load_target(pair.folder, kernels="reference"), pair) < TOLERANCE
        return pair

    return make


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_show(name: str, pairs: Callable[[str], Pair], monkeypatch: Patch) -> None:
    """Each alone, in a model that is right without it."""
    variant, mistake = MISTAKES[name]
    pair = pairs(variant)
    model = tiny.load_target(pair.folder, kernels="reference")
    assert isinstance(model, Llama)
    mistake(monkeypatch, model)
    assert distance(model, pair) > 30 * TOLERANCE


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
