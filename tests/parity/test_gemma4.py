"""Gemma 4's logits equal transformers' within 1e-4 in fp32, and bit for bit in bf16 where attention rounds as there,
however ids are fed and whatever was taken back before; every deliberate mistake shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import gemma
import oracles
import pytest
import scripted
import tiny
import torch
import torch.nn.functional as F
from oracles import LENGTH, WAYS, close, feed, opened

from foldspec.cache.paged import PagedCache
from foldspec.models import gemma4
from foldspec.models.base import ForwardOutput, ForwardPlan
from foldspec.models.gemma4 import Block, Gemma4
from foldspec.models.layers import RMSNorm, masked_attention
from foldspec.models.rope import Rope

FIRST, OTHER, _ = gemma.VARIANTS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {variant: gemma.write(tmp_path_factory.mktemp("gemma"), variant) for variant in gemma.VARIANTS}


@pytest.fixture(scope="module", params=gemma.VARIANTS)
def pair(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[oracles.Pair]:
    yield oracles.Pair(folders[request.param])


# -------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("way", WAYS)
def test_logits_however_the_ids_are_fed(pair: oracles.Pair, way: str) -> None:
    """In rings that hold no more than such pieces need, of windows of 4, 7 and 17 entries."""
    sizes = WAYS[way]
    cache = tiny.paged_cache(pair.model, longest_pass=max(sizes))
    cache.open(0)
    close(feed(pair.model, cache, pair.ids, sizes), pair.wanted(pair.ids))


def test_layers_and_the_reference_kernels(pair: oracles.Pair) -> None:
    """Taps are the stream after the scalar, raw, also of the last layer."""
    model = tiny.load_target(pair.folder, kernels="reference")
    close(feed(model, opened(model), pair.ids, [30, 1, 1, 8]), pair.wanted(pair.ids))
    output = tiny.forward(pair.model, opened(pair.model), [pair.ids], [0], taps=range(pair.model.layer_count))
    for tap, wanted in zip(output.taps, pair.layers(pair.ids), strict=True):
        close(tap, wanted)


BLOCK = 8


def after_rejections(pair: oracles.Pair, length: int, chunk: int) -> None:
    """A prompt in chunks; then blocks of 8 of which any number stays, others in their places, again and again, in rings
    that hold a window and a block or a chunk, no more."""
    cache, ids = tiny.paged_cache(pair.model, longest_pass=max(BLOCK, chunk)), pair.ids[:length]
    cache.open(0)
    feed(pair.model, cache, ids, [chunk])
    for kept in (0, 3, 1, 8, 5, 2, 7, 4, 6):
        block = tiny.prompt(BLOCK, pair.model.vocabulary, seed=kept)
        logits = tiny.forward(pair.model, cache, [block], [0]).logits
        close(logits, pair.wanted([*ids, *block])[len(ids) :])
        ids = [*ids, *block[:kept]]
        cache.truncate(0, len(ids))


@pytest.mark.parametrize("chunk", [3, 23])
@pytest.mark.parametrize("windows", [(1, -1), (1, 0), (1, 1), (3, 0), (3, 1)], ids=str)
def test_the_window_is_there_after_a_rejection(pair: oracles.Pair, windows: tuple[int, int], chunk: int) -> None:
    """Of contexts of W-1, W, W+1, 3W and more, in chunks shorter and longer than the window."""
    times, more = windows
    window = next(layer.window for layer in cast(Gemma4, pair.model).layout if layer.window)
    after_rejections(pair, times * window + more, chunk)


def test_ragged_requests_in_one_forward_and_a_fork(pair: oracles.Pair) -> None:
    """A prefill, a block and one token at once, each request at another length; then one of them goes on twice."""
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
    left, right = tiny.prompt(20, pair.model.vocabulary, seed=1), tiny.prompt(30, pair.model.vocabulary, seed=2)
    cache.fork(7, 1)
    close(feed(pair.model, cache, left, [5], request=1), pair.wanted([*everyone[1], *left])[41:])
    close(feed(pair.model, cache, right, [6], request=7), pair.wanted([*everyone[1], *right])[41:])


def test_the_oracle_is_sensitive(pair: oracles.Pair) -> None:
    wanted = pair.wanted(pair.ids)
    assert wanted.std() > 0.5
    shuffled = pair.wanted([*reversed(pair.ids[:-1]), pair.ids[-1]])
    assert (shuffled[-1] - wanted[-1]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["gemma4_12b", "gemma4_31b"])
def test_golden_checkpoints(name: str) -> None:
    """Wrappers with their other towers' tensors."""
    oracles.meets_golden(tiny.GOLDEN / "tiny" / name)


# ---------------------------------------------------------------------------------------------------------------- bf16


@pytest.mark.parametrize("variant", gemma.VARIANTS)
def test_bfloat16_rounds_where_the_source_does(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms multiply before they cast, the embedding's scale is rounded, the softcap is taken of rounded logits."""
    oracles.meets_half_precision(gemma.write(tmp_path, variant, dtype=torch.bfloat16), monkeypatch)


def test_a_scale_that_is_not_rounded_is_seen_in_bfloat16(tmp_path: Path) -> None:
    pair = oracles.Pair(gemma.write(tmp_path, OTHER, dtype=torch.bfloat16), torch.bfloat16)
    model: Any = tiny.load_target(pair.folder, "eager", torch.bfloat16)
    model.embed = lambda ids: (model.model.embed_tokens(ids).float() * model.width**0.5).bfloat16()
    found = feed(model, opened(model, dtype=torch.bfloat16), pair.ids, [LENGTH])
    assert oracles.like_the_source(found, pair.wanted(pair.ids))[0] < 0.9


# --------------------------------------------------------------------------------------------------------- speculation


def test_speculation_changes_no_token(folders: dict[str, Path], tmp_path: Path) -> None:
    """With a random DFlash drafter, whose drafts are mostly taken back."""
    drafter = scripted.drafter_for(folders[OTHER], tmp_path)
    scripted.speculates_like_plain(folders[OTHER], drafter)


@pytest.mark.parametrize(
    ("variant", "chunk"),
    [(OTHER, 3), (OTHER, 50), pytest.param(FIRST, 50, marks=pytest.mark.slow)],
)
def test_blocks_taken_back_at_every_length_change_no_token(
    folders: dict[str, Path], variant: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 rounds of drafts of which the first k are right, after prompts in chunks shorter and longer than the
    window."""
    scripted.follows_a_script(folders[variant], monkeypatch, prefill_chunk=chunk)


# ------------------------------------------------------------------------------------------------------------- mistakes


def blocks(model: Gemma4) -> list[Block]:
    return cast(list[Block], list(model.model.layers))


def on_blocks(change: Callable[[Any], None]) -> Callable[[Gemma4, pytest.MonkeyPatch], None]:
    def mutate(model: Gemma4, patch: pytest.MonkeyPatch) -> None:
        for block in blocks(model):
            change(block)

    return mutate


def offset_norms(model: Gemma4, patch: pytest.MonkeyPatch) -> None:
    for part in model.modules():
        if isinstance(part, RMSNorm):
            part._offset = True


def rope(kind: str, inverse: Callable[[int], torch.Tensor]) -> Callable[[Gemma4, pytest.MonkeyPatch], None]:
    def mutate(model: Gemma4, patch: pytest.MonkeyPatch) -> None:
        for turning in model.ropes:
            if turning[0] == kind:
                model.ropes[turning] = Rope(inverse(turning[1]))

    return mutate


def powers(theta: float, width: int, of: int | None = None) -> torch.Tensor:
    return theta ** (-torch.arange(0, width, 2).float() / (of or width))


def attention(**change: Any) -> Callable[[Gemma4, pytest.MonkeyPatch], None]:
    def mutate(model: Gemma4, patch: pytest.MonkeyPatch) -> None:
        def other(q: Any, cache: Any, layer: Any, rows: Any, kernels: Any, scale: float, *rest: Any) -> Any:
            scale = q.shape[-1] ** -0.5 if "scale" in change else scale
            window, mask = rest
            window = window + change.get("window", 0) if window and change.get("window", 0) is not None else None
            return masked_attention(q, cache, layer, rows, kernels, scale, window, mask)

        patch.setattr(gemma4, "masked_attention", other)

    return mutate


def value_norm(change: Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]) -> Any:
    return on_blocks(lambda block: setattr(block.self_attn, "v_norm", Kept(change(block.self_attn))))


class Kept(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def without(name: str) -> Callable[[Gemma4, pytest.MonkeyPatch], None]:
    def change(block: Any) -> None:
        owner = block.self_attn if hasattr(block.self_attn, name) else block
        setattr(owner, name, torch.nn.Identity())

    return on_blocks(change)


def swap_norms(block: Any) -> None:
    block.post_attention_layernorm, block.pre_feedforward_layernorm = (
        block.pre_feedforward_layernorm,
        block.post_attention_layernorm,
    )


def scalar(where: str) -> Callable[[Gemma4, pytest.MonkeyPatch], None]:
    """Elsewhere than at the end: on the branch of the MLP alone, or on the stream between the two halves."""

    def change(block: Any) -> None:
        value = block.layer_scalar.clone()
        block.layer_scalar.fill_(1.0)
        if where != "nowhere":
            norm = getattr(block, where)
            setattr(block, where, Kept(lambda x: norm(x) * value))

    return on_blocks(change)


def heads(model: Gemma4, patch: pytest.MonkeyPatch) -> None:
    """Query head h with kv head h % kv heads, as if keys were tiled."""
    for block in blocks(model):
        project, output = block.self_attn.inputs, block.self_attn.output
        count = block.layer.geometry.heads // block.layer.geometry.kv_heads
        order = torch.arange(block.layer.geometry.heads).view(count, -1).T.flatten()

        def inputs(x: Any, project: Any = project, order: Any = order) -> Any:
            q, k, v = project(x)
            return q[:, order], k, v

        def back(o: Any, output: Any = output, order: Any = order) -> Any:
            return output(o[:, order.argsort()])

        cast(Any, block.self_attn).inputs, cast(Any, block.self_attn).output = inputs, back


def gate(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Gemma4, pytest.MonkeyPatch], None]:
    return on_blocks(lambda block: setattr(block.mlp, "_gated", lambda gate, up: f(gate) * up))


def attribute(name: str, value: Any) -> Callable[[Gemma4, pytest.MonkeyPatch], None]:
    return lambda model, patch: setattr(model, name, value)


MISTAKES: dict[str, Callable[[Gemma4, pytest.MonkeyPatch], None]] = {
    "norms of 1 + w": offset_norms,
    "all of a full layer's head turns": rope("full_attention", lambda d: powers(1e6, d)),
    "the first quarter turns as a block": rope("full_attention", lambda d: powers(1e6, d // 4)),
    "exponents over what turns": rope(
        "full_attention", lambda d: torch.cat([powers(1e6, d // 4), torch.zeros(d // 2 - (d // 4 + 1) // 2)])
    ),
    "full layers with the theta of sliding ones": rope(
        "full_attention", lambda d: torch.cat([powers(1e4, d // 4, d), torch.zeros(d // 2 - (d // 4 + 1) // 2)])
    ),
    "sliding layers with the theta of full ones": rope("sliding_attention", lambda d: powers(1e6, d)),
    "a quarter of a sliding layer's head turns": rope("sliding_attention", lambda d: powers(1e4, d // 4)),
    "attention scaled by d^-1/2": attention(scale=True),
    "a window longer by one": attention(window=1),
    "a window shorter by one": attention(window=-1),
    "no window": attention(window=None),
    "no softcap": attribute("softcap", None),
    "another softcap": attribute("softcap", 30.0),
    "no embedding scale": attribute("embedding_scale", 1.0),
    "the square of the embedding's scale": attribute("embedding_scale", 48.0),
    "raw values": value_norm(lambda attention: lambda v: v),
    "values with the norm of keys": value_norm(lambda attention: attention.k_norm),
    "values normed over all heads": value_norm(lambda _: lambda v: F.rms_norm(v, v.shape[1:])),
    "no norm of queries": without("q_norm"),
    "no norm of keys": without("k_norm"),
    "no norm after attention": without("post_attention_layernorm"),
    "no norm before the MLP": without("pre_feedforward_layernorm"),
    "no norm after the MLP": without("post_feedforward_layernorm"),
    "norms after attention and before the MLP swapped": on_blocks(swap_norms),
    "no scalar": scalar("nowhere"),
    "the scalar on the MLP's branch": scalar("post_feedforward_layernorm"),
    "the scalar on attention's branch": scalar("post_attention_layernorm"),
    "keys tiled over query heads": heads,
    "silu": gate(F.silu),
    "gelu in its other form": gate(F.gelu),
}


@pytest.fixture(scope="module")
def other(folders: dict[str, Path]) -> oracles.Pair:
    return oracles.Pair(folders[OTHER])


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_mistake_is_seen(other: oracles.Pair, mistake: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cast(Gemma4, tiny.load_target(other.folder, "reference"))
    if mistake is not None:
        MISTAKES[mistake](model, monkeypatch)
    found = feed(model, opened(model), other.ids, [LENGTH])
    difference = (found - other.wanted(other.ids)).abs().max()
    assert difference > 2e-3 if mistake is not None else difference < 1e-5


def raw_taps(patch: pytest.MonkeyPatch) -> None:
    forward = Gemma4.forward

    def other(self: Gemma4, ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> ForwardOutput:
        output = forward(self, ids, plan, cache)
        scalars = [blocks(self)[i].layer_scalar for i in plan.taps]
        return ForwardOutput(output.logits, tuple(t / s for t, s in zip(output.taps, scalars, strict=True)))

    patch.setattr(Gemma4, "forward", other)


LATER: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "taps before the scalar": raw_taps,
    "nothing is taken back": lambda patch: patch.setattr(PagedCache, "truncate", lambda *_: None),
    "one row too few is taken back": lambda patch: patch.setattr(
        PagedCache, "truncate", lambda self, request, length: self.tables.truncate(request, length + 1)
    ),
}


@pytest.mark.parametrize("mistake", [None, *LATER])
def test_a_mistake_that_logits_of_a_prefill_do_not_show(
    other: oracles.Pair, mistake: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake is not None:
        LATER[mistake](monkeypatch)
    distance = oracles.distance(tiny.load_target(other.folder), other)
    assert distance > 2e-3 if mistake is not None else distance < 1e-4
