"""The other context methods, from their reads through cache, rotation and kernel: golden numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import brute
import pytest
import tiny
import torch
from reading import FULL_LAYER, Reading, draw

from foldspec.cache.paged import CacheSpec
from foldspec.context import make_method
from foldspec.context.base import Opened, Span
from foldspec.models.rope import Rope
from foldspec.options import MethodOptions

GOLDEN: dict[str, Any] = json.loads((tiny.GOLDEN / "golden_methods.json").read_text())
KERNELS = ("reference", "cpu")
SHARED = GOLDEN["baselines"]
# the golden name, the method and its options; the factor of `yarn`'s golden is 4, of a request of 64 tokens in all
BASELINES: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"context": "full"}),
    ("window_ablation", {"context": "window", "window": SHARED["W"]}),
    ("shared_window", {"context": "shared_window", "draft_window": 5}),
    ("streaming_llm", {"context": "streaming", "sinks": 2, "recents": 4}),
    ("rerope", {"context": "rerope", "window": SHARED["W"], "rerope_len": 8}),
]


def tensors(case: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.tensor(case[name], dtype=torch.float64) for name in "qkv"]


def reading(kernel: str, case: dict[str, Any], rope: Rope | None = None, **options: Any) -> Reading:
    rope = rope or Rope(torch.from_numpy(brute.frequencies(case["rotary_dim"], case["theta"])))
    return Reading(kernel, block=case["B"], heads=case["hkv"], width=case["d"], rope=rope, **options)


def check(out: torch.Tensor, wanted: Any) -> None:
    torch.testing.assert_close(out, torch.tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("name", "options"), BASELINES, ids=[name for name, _ in BASELINES])
def test_the_baselines_give_the_golden_numbers(name: str, options: dict[str, Any], kernel: str) -> None:
    check(reading(kernel, SHARED, **options).whole(*tensors(SHARED)), SHARED[name]["o"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_yarn_gives_the_golden_numbers(kernel: str) -> None:
    case = SHARED["yarn"]
    inverse = torch.from_numpy(brute.frequencies(SHARED["rotary_dim"], SHARED["theta"]))
    rope = Rope(inverse, theta=SHARED["theta"]).stretched(case["factor"], case["orig_max_pos"])
    torch.testing.assert_close(rope._inverse, torch.tensor(case["inv_freq"], dtype=torch.float64), atol=1e-9, rtol=1e-6)
    assert rope.factor == pytest.approx(case["attention_factor"], abs=1e-10)
    check(reading(kernel, SHARED, rope, context="full").whole(*tensors(SHARED)), case["o"])


@pytest.mark.parametrize("case", GOLDEN["yarn"]["tables"], ids=lambda c: f"{c['dim']} {c['factor']} {c['truncate']}")
def test_yarns_tables(case: dict[str, Any]) -> None:
    if not case["truncate"] or case["factor"] == 1:  # the drafter's own table, and an option that this method has not
        return
    rope = Rope(torch.from_numpy(brute.frequencies(case["dim"], case["base"])), theta=case["base"])
    found = rope.stretched(case["factor"], case["orig_max_pos"])
    wanted = torch.tensor(case["inv_freq_at_idx"], dtype=torch.float64)
    torch.testing.assert_close(found._inverse[case["idx"]], wanted, atol=0, rtol=1e-6)
    assert float(found._inverse.sum()) == pytest.approx(case["sum_inv_freq"], rel=1e-6)
    assert found.factor == pytest.approx(case["attention_factor"], abs=1e-10)


class Stretches:
    """A rope that tells which factor is asked of it."""

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
        raise AssertionError

    def stretched(self, stretch: float, length: int) -> Stretches:
        self.asked = stretch, length
        return Stretches()


@pytest.mark.parametrize("case", GOLDEN["yarn"]["factor_rule"], ids=lambda c: f"{c['P']} {c['G']} {c['Q']} {c['R']}")
def test_yarns_factor_is_fixed_by_what_a_request_may_come_to(case: dict[str, Any]) -> None:
    method = make_method(MethodOptions(context="yarn", yarn_ref=case["R"]), FULL_LAYER, case["Q"])
    rope = Stretches()

    def keys(layer: int, first: int, last: int, rotated: bool) -> torch.Tensor:
        raise AssertionError

    table = method.begin(Opened(case["P"] + case["G"], rope, 1.0, keys))
    if case["factor"] == 1:
        assert table is rope
    else:
        assert rope.asked == (pytest.approx(case["factor"], rel=1e-11), case["R"])
    assert method.rope(0, table, rope) is table


MICRO = [
    ("rerope_L4", {"context": "rerope", "window": 1, "rerope_len": 4}),
    ("streaming_1_2", {"context": "streaming", "sinks": 1, "recents": 2}),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("name", "options"), MICRO, ids=[name for name, _ in MICRO])
def test_the_worked_example(name: str, options: dict[str, Any], kernel: str) -> None:
    case = GOLDEN["micro"]
    rope = Rope(torch.tensor(case["inv_freq"], dtype=torch.float64))
    one = Reading(kernel, block=case["B"], heads=1, width=case["d"], rope=rope, **options)
    check(one.whole(*tensors(case)), case["out"][name])


# --------------------------------------------------------------------------------------------------------------- infllm


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", GOLDEN["infllm"], ids=lambda case: case["name"])
def test_infllm_gives_the_golden_numbers(case: dict[str, Any], kernel: str) -> None:
    names = {"W": "window", "n_init": "infllm_init", "block_size": "infllm_block", "topk": "infllm_topk"}
    repr_ = len(case["representatives"][0][0]) if case["representatives"] != "all" else 1
    one = reading(
        kernel, case, context="infllm", infllm_repr=repr_, **{mine: case[theirs] for theirs, mine in names.items()}
    )
    q, k, v = tensors(case)
    n, state = case["n"], one.reader._held[0].state
    one.absorb(k[:n], v[:n])
    if case["attention_received"] is not None:
        memory = one.method._layer(0, state, q)  # type: ignore[attr-defined]
        memory.since, memory.received = 0, torch.tensor(case["attention_received"], dtype=torch.float64)
    check(one.attend(q, k[n:], v[n:]), case["o"])

    near, *far = one.method.reads(0, state, n, q)
    attended = [sorted([*entries(far[0].index, l), *range(f, n)]) for f, l in zip(near.first, far[0].last, strict=True)]
    assert attended == case["attended_context"]
    memory = state.layers[0]
    if len(case["blocks"]) > case["topk"]:  # else all are read, and nothing is scored
        assert memory.blocks == len(case["blocks"])
        rotated = one.rope.rotate(q.mean(0, keepdim=True), torch.tensor([case["D"] - 1]), alone=True)[0]
        check(rotated, case["mean_query_rotated"])
        check(torch.einsum("hd,bhd->b", rotated, memory.means[: memory.blocks]), case["block_scores"])
        assert one.method._choose(memory, state.request, case["D"], q) == case["selected"]  # type: ignore[attr-defined]


def entries(index: tuple[Span, ...] | None, count: int) -> list[int]:
    """The first ``count`` entries of an index."""
    assert index is not None
    return [j for first, last in index for j in range(first, last)][:count]


# ------------------------------------------------------------------------------------------------------------------ cmr


def test_cmr_selects_the_golden_chunks() -> None:
    case = GOLDEN["cmr"]
    options = {"cmr_chunk": case["chunk"], "cmr_topk": case["top_chunks"], "cmr_period": case["refresh_every"]}
    one = Reading("reference", block=4, heads=1, width=8, context="cmr", **options)
    method, state = one.method, one.reader._held[0].state
    before = 0
    for event in case["events"]:
        n, weights = event["n"], event["attention_by_head"]
        if before:
            asked: list[int] = []
            method.committed(state, before, n, attention(weights, asked))
            assert len(asked) == event["refreshed"]
        (read,) = method.reads(0, state, n, None)
        assert read.index is not None
        assert entries(read.index, read.last[0]) == event["entries"]
        assert read.query_at[0] == event["first_block_position"] and read.block and read.keys == "rerotated"
        chunks = state.chunks if state.chunks is not None else method._last(n)  # type: ignore[attr-defined]
        assert chunks == event["selected_chunks"]
        before = n


def test_a_short_chunk_is_judged_by_the_mean_of_its_own_entries() -> None:
    """Whatever the last chunk's length; ties go to the lower index."""
    method = make_method(MethodOptions(context="cmr", cmr_chunk=4, cmr_topk=2), FULL_LAYER, 4)
    for n in range(9, 41):
        weights = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).round(decimals=1)
        weights[-1] = 0.9
        pieces = [weights[first : first + 4].tolist() for first in range(0, n, 4)]
        means = [round(sum(piece) / len(piece), 9) for piece in pieces]
        wanted = sorted(range(len(means)), key=lambda c: (-means[c], c))[:2]
        found = method._best(weights)  # type: ignore[attr-defined]
        assert sorted(means[c] for c in found) == sorted(means[c] for c in wanted), n
        if n % 4 == 1:
            assert len(means) - 1 in found  # one entry, of more than any mean


def attention(weights: list[list[float]] | None, asked: list[int]) -> Callable[[], torch.Tensor]:
    def attended() -> torch.Tensor:
        asked.append(1)
        return torch.tensor(weights, dtype=torch.float64).mean(0)

    return attended


@pytest.mark.parametrize("kernel", KERNELS)
def test_cmr_reads_its_chunks_at_consecutive_positions(kernel: str) -> None:
    """Round after round, with growing and changing selections, against loops over single entries."""
    source = torch.Generator().manual_seed(0)
    block, end = 5, 90
    one = Reading(kernel, block=block, heads=1, width=8, context="cmr", cmr_chunk=4, cmr_topk=3, cmr_period=2)
    one.reader._attended = lambda request, position: torch.rand(position + 1, generator=source)  # type: ignore
    _, k, v = draw(end, block)
    inverse = brute.frequencies(8)
    n, step, seen = 0, 14, set()
    while n + step + block <= end:
        one.absorb(k[n : n + step], v[n : n + step])
        n += step
        q, new_k, new_v = draw(0, block, seed=n)
        (read,) = one.method.reads(0, one.reader._held[0].state, n, q)
        kept = entries(read.index, read.last[0])
        seen.add(tuple(kept))
        rows = [*kept, *range(n, n + block)]
        wanted = brute.fold(
            q,
            torch.cat([k[kept], new_k]),
            torch.cat([v[kept], new_v]),
            inverse,
            near=lambda r, j: True,
            block=lambda r, m: True,
        ).out
        assert len(rows) <= 3 * 4 + 4 * 4 + 2 * block
        torch.testing.assert_close(one.attend(q, new_k, new_v), wanted, atol=1e-12, rtol=0)
        step = step % block + 1
    assert len(seen) > 15


# ----------------------------------------------------------------------------------------------------- memory, in bytes


@pytest.mark.parametrize("case", GOLDEN["side_cache"], ids=lambda case: case["name"])
def test_un_rotated_copies_take_the_golden_bytes(case: dict[str, Any]) -> None:
    spec = CacheSpec(case["layers"], case["hkv"], case["d"], case["d"], torch.bfloat16)
    assert spec.bytes_per_entry * case["tokens"] == case["bytes_bf16"] == case["gib"] * 2**30
