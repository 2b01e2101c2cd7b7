"""Dream, SDAR and our masked Llama as drafters: golden denoising traces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import masked
import pytest
import tiny
import torch
from masked import GOLDEN, Bench
from safetensors.torch import load_file

from foldspec.cache.rows import Rows
from foldspec.effort import Effort
from foldspec.noise import Noise
from foldspec.sampling import DraftSampling


def followed(bench: Bench, trace: torch.Tensor, prompt: int) -> None:
    """The passes show the rows of a trace before each step, and the last row is what was drafted."""
    states = [row for row, after in zip(trace[:-1].tolist(), trace[1:].tolist(), strict=True) if row != after]
    wanted = trace[-1].tolist()
    assert bench.draft(wanted[:prompt], len(wanted) - prompt) == tuple(wanted[prompt:])
    assert len(bench.passes) == len(states)
    for (start, ids), state in zip(bench.passes, states, strict=True):
        assert ids == state[start : start + len(ids)]


@pytest.mark.parametrize("order", ["maskgit_plus", "topk_margin", "entropy"])
def test_dreams_golden_traces(order: str, tmp_path: Path) -> None:
    g = load_file(GOLDEN / "dream" / "golden.safetensors")
    bench = Bench(masked.golden_folder("dream", tmp_path), Effort(steps=6, order=order), 16)
    followed(bench, g[f"trace.{order}"], 24)
    assert all(start == 0 for start, _ in bench.passes)


SDAR: Mapping[str, Effort] = {
    "static.steps4": Effort(steps=4, order="static"),
    "static.steps2": Effort(steps=2, order="static"),
    **{f"dynamic.thr{x}": Effort(steps=4, confidence=x, order="dynamic") for x in (0.05, 0.08, 0.12)},
}


@pytest.mark.parametrize("name", SDAR)
def test_sdars_golden_traces(name: str, tmp_path: Path) -> None:
    g = load_file(GOLDEN / "sdar" / "golden.safetensors")
    bench = Bench(masked.golden_folder("sdar", tmp_path), SDAR[name], 14)
    followed(bench, g[f"trace.{name}"], 18)


# ------------------------------------------------------------------------------------------------------ what is stored

KINDS = ("dream", "dream, approximate", "sdar", "masked llama")
MANY = Effort(steps=2, order="entropy")


def bench_of(kind: str, at: Path, drafts: int = 6, effort: Effort = MANY, **more: Any) -> Bench:
    """A drafter of each kind; of masks, ids and targets it is the golden one's or a random one's."""
    if kind == "masked llama":
        target = tiny.load_target(tiny.write_target(at / "target"))
        return Bench(masked.write_masked_llama(at / "drafter"), effort, drafts, target=target, **more)
    name, _, cache = kind.partition(", ")
    method = {"prefix_cache": cache} if cache else {}
    return Bench(masked.golden_folder(name, at / "drafter"), effort, drafts, **method, **more)


def stored(bench: Bench, request: int) -> list[torch.Tensor]:
    """Keys and values of all layers, as far as the cache says that it holds them."""
    found = []
    for layer in range(bench.network.language.layer_count):
        found += [tiny.dense(entries) for entries in bench.cache.entries(layer, request)]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [5, 7, 8, 12])
def test_after_any_accepted_count_it_is_as_if_nothing_had_been_drafted(kind: str, length: int, tmp_path: Path) -> None:
    """Forced counts 0 .. B: what the round committed is absorbed; entries, ids and the next drafts are those of a
    drafter that has only ever seen the committed text."""
    bench = bench_of(kind, tmp_path)
    text = tiny.prompt(40, 128, seed=2)
    for kept in range(7):
        old, new = 2 * kept, 2 * kept + 1
        bench.drafter.open(old)
        bench.absorb(text[:length], old)
        drafts = bench.propose(text[length], 6, old).tokens
        assert bench.drafter.held(old) == length
        assert bench.drafter.stored(old) <= length, "nothing drafted stays"
        bench.drafter.truncate(old, length + 1 + kept)
        committed = [text[length], *drafts[:kept]]
        bench.absorb(committed, old)
        anchor = text[-1 - kept]
        bench.drafter.open(new)
        for token in [*text[:length], *committed]:
            bench.absorb([token], new)
        again, fresh = bench.propose(anchor, 6, old), bench.propose(anchor, 6, new)
        assert again.tokens == fresh.tokens
        assert bench.drafter.ids(old, 0) == bench.drafter.ids(new, 0) == [*text[:length], *committed]
        assert len(stored(bench, old)[0]) == (0 if "dream" in kind else (length + 1 + kept) // 4 * 4)
        for a, b in zip(stored(bench, old), stored(bench, new), strict=True):
            assert torch.equal(a, b) and bool(a.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_canvas_of_another_round_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """What came before in the same request, other anchors and longer drafts, does not show in the passes of a draft."""
    bench = bench_of(kind, tmp_path)
    ids = tiny.prompt(14, 128, seed=5)
    wanted = bench.draft(ids, 5)
    passes = list(bench.passes)
    bench.drafter.truncate(0, 13)
    for other in (3, 4):
        bench.propose(other, 6)
    bench.passes.clear()
    assert bench.propose(ids[-1], 5).tokens == wanted and bench.passes[-1] == passes[-1]
    mask = bench.network.mask_id
    assert all(mask not in pass_ids[: max(0, 14 - start)] for start, pass_ids in bench.passes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_cut_goes_on_as_another(kind: str, tmp_path: Path) -> None:
    """Also in the middle of a block that is stored."""
    bench = bench_of(kind, tmp_path)
    text, other = tiny.prompt(30, 128, seed=2), tiny.prompt(11, 128, seed=3)
    bench.draft(text, 6)
    for length in (26, 9):
        bench.drafter.truncate(0, length)
        assert bench.drafter.held(0) == length and bench.drafter.stored(0) <= length
        bench.absorb(other[:-1])
        found = bench.propose(other[-1], 6).tokens
        assert found == bench.draft([*text[:length], *other], 6, length)
        bench.drafter.truncate(0, length)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_together_and_chunks_of_any_size(kind: str, tmp_path: Path) -> None:
    """Ragged requests in one pass draft what each drafts alone; a prompt may come in pieces of any size."""
    bench = bench_of(kind, tmp_path)
    texts = [tiny.prompt(n, 128, seed=9) for n in (3, 30, 17, 9)]
    alone = [bench.draft(text, 6, request) for request, text in enumerate(texts)]
    short = bench.draft(texts[2], 2, 4)
    for size in (1, 5, 8, 100):
        for request, text in enumerate(texts):
            bench.drafter.close(request)
            bench.drafter.open(request)
            for start in range(0, len(text) - 1, size):
                bench.absorb(text[start : min(start + size, len(text) - 1)], request)
        rows = Rows.of(range(4), [len(text) - 1 for text in texts], [1] * 4)
        with torch.inference_mode():
            proposals = bench.drafter.propose(rows, [text[-1] for text in texts], [6, 0, 2, 6], [Noise(0)] * 4)
        assert [p.tokens for p in proposals] == [alone[0], (), short, alone[3]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_shared_unless_the_grid_is_another(kind: str, tmp_path: Path) -> None:
    bench = bench_of(kind, tmp_path)
    ids = tiny.prompt(30, 128, seed=6)
    wanted = bench.draft(ids, 6)
    bench.drafter.open_prefix(1)
    bench.absorb(ids[:-1], 1)
    held = bench.drafter.stored(1)
    bench.drafter.fork(1, 2, ids[:-1])
    bench.passes.clear()
    assert bench.propose(ids[-1], 6, 2).tokens == wanted
    assert bench.passes[0][0] == held == (0 if "dream" in kind else 28)
    if kind in ("sdar", "masked llama"):
        other = network_bench(bench, block_length=6)
        other.drafter.fork(1, 3, ids[:-1])
        fresh = network_bench(bench, block_length=6).draft(ids, 6, 4)
        assert other.propose(ids[-1], 6, 3).tokens == fresh


def network_bench(bench: Bench, **method: Any) -> Bench:
    """Another method over the same weights and cache."""
    return Bench(None, MANY, 6, like=bench, **method)


# --------------------------------------------------------------------------------------------------- ids and positions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_the_mask_nor_what_the_target_lacks_is_proposed(
    kind: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the network gives just those nearly all probability."""
    effort = Effort(steps=2, order="static")
    bench = bench_of(kind, tmp_path, sampling=DraftSampling(temperature, effort=effort))
    bench.drafter.vocabulary = vocabulary = 300 if "llama" not in kind else 100
    language = bench.network.language
    forward = language.forward

    def bent(*arguments: Any) -> Any:
        output = forward(*arguments)
        output.logits[:, bench.network.mask_id] += 100
        output.logits[:, vocabulary:] += 90
        return output

    monkeypatch.setattr(language, "forward", bent)
    bench.drafter.open(0)
    bench.absorb([1, 2, 3, 4, 5])
    proposal = bench.propose(6, 6)
    assert len(proposal.tokens) == 6 and bench.network.mask_id not in proposal.tokens
    assert all(0 <= token < vocabulary for token in proposal.tokens)
    if temperature:
        last = [proposal.law(i) for i in range(6) if proposal.law(i).token is None]
        assert last and all(law.prob(bench.network.mask_id) == 0 == law.prob(vocabulary) for law in last)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_only_the_target_has(kind: str, tmp_path: Path) -> None:
    """Its table may be longer: what the drafter lacks is read as its last id."""
    bench, last = bench_of(kind, tmp_path), 127 if "llama" in kind else 511
    ids = tiny.prompt(14, 100, seed=8)
    beyond, known = [*ids[:6], last + 1, *ids[6:]], [*ids[:6], last, *ids[6:]]
    assert bench.draft(beyond, 5, 0) == bench.draft(known, 5, 1)
    assert bench.drafter.ids(0, 0) == beyond[:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_position_ends_a_draft(kind: str, tmp_path: Path) -> None:
    bench = bench_of(kind, tmp_path)
    bench.network.language.max_positions = 20
    text = tiny.prompt(20, 100, seed=8)
    for length, count in ((13, 6), (14, 6), (15, 5), (19, 1), (20, 0)):
        assert len(bench.draft(text[:length], 6, length)) == count
