"""What every context method keeps to, over random shapes: what its definition says of each pair of row and entry; plain
attention while the context fits; rows, batch mates and forks that do not meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import brute
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reading import Reading, draw

from foldspec.cache.rows import Rows
from foldspec.context import METHODS
from foldspec.context.base import DrafterLayer
from foldspec.models.rope import Rope

KERNELS = ("reference", "cpu")
LAYERS = tuple(DrafterLayer(own, causal) for own in (None, 3, 9, 40) for causal in (False, True))
WIDTH = 8
few = settings(max_examples=25)

blocks, windows, seeds = st.integers(1, 6), st.integers(1, 20), st.integers(0, 2**16)
lengths = st.one_of(st.integers(0, 12), st.integers(0, 60))
heads = st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2)])


@st.composite
def options(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Small budgets of a method."""
    window, whole = draw(windows), st.integers(1, 12)
    own: dict[str, dict[str, Any]] = {
        "full": {},
        "window": {"window": window},
        "fold": {"window": window, "alpha": draw(st.floats(1.0, 1e6)), "far_boundary": draw(boundaries)},
        "fold_auto": {
            "window": window,
            "auto_alphas": draw(st.permutations([0.0, 1.0, 2.0, 8.0]).map(tuple)),
            "far_boundary": draw(boundaries),
        },
        "shared_window": {"draft_window": window},
        "streaming": {"sinks": draw(st.integers(0, 5)), "recents": window},
        "yarn": {"yarn_ref": draw(st.sampled_from([100, 300, 1024]))},
        "rerope": {"window": window, "rerope_len": draw(st.integers(2, 80))},
        "infllm": {
            "window": window,
            "infllm_block": draw(st.integers(1, 6)),
            "infllm_init": draw(st.integers(0, 6)),
            "infllm_topk": draw(whole),
            "infllm_repr": draw(st.integers(0, 4)),
        },
        "cmr": {"cmr_chunk": draw(st.integers(1, 6)), "cmr_topk": draw(whole), "cmr_period": draw(st.integers(1, 4))},
    }
    chosen = {"context": name, **own[name]}
    if name in ("fold", "fold_auto", "streaming", "yarn", "rerope", "infllm", "cmr") and draw(st.booleans()):
        chosen["coverage"] = draw(st.sampled_from(["all", "full"]))
    return chosen


boundaries = st.sampled_from(["D", "complement"])


def reading(kernel: str, block: int, kv: int, chosen: dict[str, Any], **more: Any) -> Reading:
    one = Reading(kernel, block=block, heads=kv, width=WIDTH, layers=LAYERS, **chosen, **more)
    one.reader._attended = lambda request, position: attention(position + 1)  # type: ignore[method-assign]
    return one


def attention(entries: int) -> torch.Tensor:
    """What a target might have attended to."""
    return torch.rand(entries, generator=torch.Generator().manual_seed(entries), dtype=torch.float64)


def outputs(one: Reading, inputs: Sequence[torch.Tensor], request: int = 0) -> list[torch.Tensor]:
    """Of every layer, for a block after a context."""
    q, k, v = inputs
    n = len(k) - one.method.block
    if n:
        one.absorb(k[:n], v[:n], request)
    return [one.attend(q, k[n:], v[n:], layer=i, request=request) for i in range(len(LAYERS))]


# ------------------------------------------------------------------------------- the definition, entry by entry


ONE_SOFTMAX = ("full", "window", "shared_window", "streaming", "rerope", "infllm", "cmr")


@pytest.mark.parametrize("name", ONE_SOFTMAX)
@given(data=st.data())
@few
def test_rows_meet_entries_at_the_distances_of_the_definition(name: str, data: st.DataObject) -> None:
    """StreamingLLM renumbered, ReRoPE by a table of distances, and the others: each the second way to compute it."""
    block, n, (h, kv) = data.draw(blocks), data.draw(lengths), data.draw(heads)
    chosen = data.draw(options(name))
    if name == "infllm":  # all blocks: which ones are chosen is the golden numbers' affair
        chosen["infllm_topk"] = 100
        chosen.pop("coverage", None)
    inputs = draw(n, block, h, kv, WIDTH, data.draw(seeds))
    length = chosen.get("rerope_len", 0)
    found = outputs(reading(data.draw(st.sampled_from(KERNELS)), block, kv, chosen), inputs)
    for layer, out in zip(LAYERS, found, strict=True):
        wanted = brute.one_softmax(
            *inputs,
            brute.frequencies(WIDTH),
            brute.distances(name, n, block, layer.window, layer.causal, chosen),
            scale=lambda r: max(1.0, math.log(n + r + 1) / math.log(length)) if length else 1.0,
        )
        torch.testing.assert_close(out, wanted, atol=1e-11, rtol=0, msg=lambda m, at=layer: f"{at}: {m}")


@given(data=st.data())
@few
def test_yarn_is_plain_attention_under_its_own_table(data: st.DataObject) -> None:
    """On full layers, with the temperature of what is rotated; sliding layers keep the drafter's own table."""
    block, n, (h, kv), longest = (
        data.draw(blocks),
        data.draw(lengths),
        data.draw(heads),
        data.draw(st.integers(60, 900)),
    )
    chosen = data.draw(options("yarn"))
    inputs = draw(n, block, h, kv, WIDTH, data.draw(seeds))
    factor = max(1.0, math.ceil((longest + block) / 256) * 256 / chosen["yarn_ref"])
    plain = brute.frequencies(WIDTH)
    found = outputs(reading("reference", block, kv, chosen, longest=longest), inputs)
    for layer, out in zip(LAYERS, found, strict=True):
        stretched = layer.window is None or chosen.get("coverage") == "all"
        table, gain = plain, 1.0
        if stretched and factor > 1:
            table = Rope(torch.from_numpy(plain), theta=10000.0).stretched(factor, chosen["yarn_ref"])._inverse.numpy()
            gain = 0.1 * math.log(factor) + 1
        wanted = brute.one_softmax(
            *inputs, table, brute.distances("yarn", n, block, layer.window, layer.causal, chosen), gain=gain
        )
        torch.testing.assert_close(out, wanted, atol=1e-11, rtol=0)


@given(data=st.data())
@few
def test_alpha_one_is_one_softmax(data: st.DataObject) -> None:
    """On every layer and with both boundaries: distances p - j near, D + r far (max(D, Wn) on sliding layers)."""
    block, n, (h, kv) = data.draw(blocks), data.draw(lengths), data.draw(heads)
    chosen = data.draw(options("fold")) | {"alpha": 1.0}
    inputs = draw(n, block, h, kv, WIDTH, data.draw(seeds))
    found = outputs(reading(data.draw(st.sampled_from(KERNELS)), block, kv, chosen), inputs)
    for layer, out in zip(LAYERS, found, strict=True):
        own, reach = layer.window, max(chosen["window"] + block, layer.window or 0)
        within = brute.distances("full", n, block, own, layer.causal, {})
        covered = own is None or chosen.get("coverage") != "full"
        boundary = own if own is not None and chosen["far_boundary"] == "complement" else reach

        def distance(r: int, j: int, own=own, reach=reach, within=within, covered=covered, boundary=boundary):  # type: ignore
            d = n + r - j
            if j < n and covered and d >= boundary:
                return reach + r
            return within(r, j) if j >= n or own is not None or d < reach else None

        wanted = brute.one_softmax(*inputs, brute.frequencies(WIDTH), distance)
        torch.testing.assert_close(out, wanted, atol=1e-11, rtol=0)


@pytest.mark.parametrize("alpha", [1e3, 1e9, 1e30, 1e308])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_however_large_alpha_is_the_far_read_is_its_best_entry(alpha: float, dtype: torch.dtype) -> None:
    """Its mass is that of one entry, so that the whole is one softmax over the window and that entry."""
    window, block, n = 8, 3, 40
    q, k, v = draw(n, block, 2, 1, WIDTH, seed=5)
    k[:20] *= 5  # a clear winner
    inverse = brute.frequencies(WIDTH)
    best = {}
    for r in range(block):
        far = [brute.rotate(q[r, 0].numpy(), window + block + r, inverse) @ k[j, 0].numpy() for j in range(n - 8 + r)]
        best[r] = max(range(len(far) - block), key=far.__getitem__)
    one = reading("cpu", block, 1, {"context": "fold", "window": window, "alpha": alpha}, dtype=dtype)
    out = outputs(one, [x[:, :1].to(dtype) for x in (q, k, v)])[0]
    reach = window + block

    def distance(r: int, j: int) -> float | None:
        if j >= n or n + r - j < reach:
            return n + r - j
        return reach + r if j == best[r] else None

    wanted = brute.one_softmax(q[:, :1], k, v, inverse, distance)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=0)


# --------------------------------------------------------------------------------- plain attention while it fits


def fits(chosen: dict[str, Any], n: int, block: int, own: int | None, longest: int) -> bool:
    """Whether a method is then the drafter as it was trained, by its definition."""
    name = chosen["context"]
    if name in ("window", "fold", "fold_auto", "infllm"):
        own_far = (
            name in ("fold", "fold_auto")
            and chosen["far_boundary"] == "complement"
            and chosen.get("coverage") != "full"
        )
        return n <= chosen["window"] and (own is None or not own_far)
    if name == "shared_window":
        return n <= chosen["draft_window"]
    if name == "streaming":
        return n <= chosen["sinks"] + chosen["recents"]
    if name == "yarn":
        return -(-(longest + block) // 256) * 256 <= chosen["yarn_ref"]
    if name == "rerope":
        return own is None and n <= chosen["window"] and n + block <= chosen["rerope_len"]
    if name == "cmr":
        return own is None and n <= chosen["cmr_chunk"] * chosen["cmr_topk"]
    return True


@pytest.mark.parametrize("name", [name for name in METHODS if name != "full"])
@given(data=st.data())
@few
def test_while_the_context_fits_every_method_is_plain_attention(name: str, data: st.DataObject) -> None:
    block, (h, kv), longest = data.draw(blocks), data.draw(heads), data.draw(st.sampled_from([90, 240, 700]))
    chosen = data.draw(options(name))
    budget = {
        "shared_window": chosen.get("draft_window"),
        "streaming": chosen.get("sinks", 0) + chosen.get("recents", 0),
        "yarn": 60,
        "cmr": chosen.get("cmr_chunk", 0) * chosen.get("cmr_topk", 0),
    }.get(name, chosen.get("window"))
    n = data.draw(st.integers(0, min(60, budget or 0)))
    inputs = draw(n, block, h, kv, WIDTH, data.draw(seeds))
    same = [fits(chosen, n, block, layer.window, longest) for layer in LAYERS]
    assume(any(same))
    kernel = data.draw(st.sampled_from(KERNELS))
    plain = outputs(reading(kernel, block, kv, {"context": "full"}), inputs)
    found = outputs(reading(kernel, block, kv, chosen, longest=longest), inputs)
    for equal, one, other in zip(same, found, plain, strict=True):
        if equal:
            torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "full"])
def test_and_once_it_does_not_fit_it_is_another(name: str) -> None:
    budgets = {"window": 8, "alpha": 2.0, "draft_window": 8, "sinks": 2, "recents": 6, "yarn_ref": 100}
    budgets |= {"rerope_len": 30, "infllm_block": 2, "infllm_init": 2, "infllm_topk": 2, "cmr_chunk": 2, "cmr_topk": 4}
    inputs = draw(40, 4, seed=3)
    plain = outputs(reading("reference", 4, 1, {"context": "full"}), inputs)[0]
    assert (outputs(reading("reference", 4, 1, {"context": name, **budgets}), inputs)[0] - plain).abs().max() > 1e-3


# ------------------------------------------------------------------------------------- rows, mates, order, forks


@pytest.mark.parametrize("name", METHODS)
@given(data=st.data())
@few
def test_rows_do_not_meet(name: str, data: st.DataObject) -> None:
    """Another query in one row changes no other row; but blocks of ``infllm`` are chosen by all rows together, so there
    all are read."""
    block, n, (h, kv) = data.draw(st.integers(2, 6)), data.draw(lengths), data.draw(heads)
    chosen = data.draw(options(name))
    if name == "infllm":
        chosen["infllm_topk"] = 100
    q, k, v = draw(n, block, h, kv, WIDTH, data.draw(seeds))
    row = data.draw(st.integers(0, block - 1))
    other = q.clone()
    other[row] += 1
    kernel = data.draw(st.sampled_from(KERNELS))
    one, two = (outputs(reading(kernel, block, kv, chosen), (x, k, v)) for x in (q, other))
    for a, b in zip(one, two, strict=True):
        rest = [r for r in range(block) if r != row]
        torch.testing.assert_close(a[rest], b[rest], atol=1e-13, rtol=0)


@pytest.mark.parametrize("name", METHODS)
@given(data=st.data())
@few
def test_batch_mates_do_not_meet(name: str, data: st.DataObject) -> None:
    """Requests of several lengths and histories in one batch: each is what it is alone, in every round."""
    block, (h, kv) = data.draw(blocks), data.draw(heads)
    chosen = data.draw(options(name))
    starts = [data.draw(lengths) for _ in range(3)]
    steps = [[data.draw(st.integers(1, block)) for _ in range(3)] for _ in range(3)]
    kernel = data.draw(st.sampled_from(KERNELS))
    drawn = [
        draw(start + sum(own), block, h, kv, WIDTH, 7 * i)
        for i, (start, own) in enumerate(zip(starts, steps, strict=True))
    ]
    together = reading(kernel, block, kv, chosen)
    found = _rounds(together, drawn, starts, steps, [0, 1, 2])
    for i in range(3):
        alone = _rounds(reading(kernel, block, kv, chosen), [drawn[i]], [starts[i]], [steps[i]], [0])
        for mine, own in zip(found, alone, strict=True):
            torch.testing.assert_close(mine[:, i], own[:, 0], atol=1e-12, rtol=0)


def _rounds(
    one: Reading,
    drawn: Sequence[Sequence[torch.Tensor]],
    starts: Sequence[int],
    steps: Sequence[Sequence[int]],
    requests: Sequence[int],
) -> list[torch.Tensor]:
    """Of each round, what a block of each request gets in each layer: [layers, requests, B, heads, width]."""
    found, at = [], list(starts)
    for i, request in enumerate(requests):
        if at[i]:
            one.absorb(drawn[i][1][: at[i]], drawn[i][2][: at[i]], request)
    for number in range(len(steps[0])):
        rows = Rows.of(requests, at, [one.method.block] * len(requests))
        q, k, v = (torch.cat([inputs[j][-one.method.block :] for inputs in drawn]) for j in range(3))
        one.reader.begin(rows)
        layers = [one.reader.attend(i, rows, q, k, v) for i in range(len(LAYERS))]
        found.append(torch.stack(layers).unflatten(1, (len(requests), one.method.block)))
        rows = Rows.of(requests, at, [own[number] for own in steps])
        pieces = [slice(a, a + own[number]) for a, own in zip(at, steps, strict=True)]
        k, v = (torch.cat([inputs[j][piece] for inputs, piece in zip(drawn, pieces, strict=True)]) for j in (1, 2))
        one.reader.absorb(rows, [k] * len(LAYERS), [v] * len(LAYERS))
        at = [a + own[number] for a, own in zip(at, steps, strict=True)]
    return found


@pytest.mark.parametrize("name", ["fold", "rerope"])
@given(data=st.data())
@few
def test_the_order_of_entries_that_are_far_for_every_row_is_forgotten(name: str, data: st.DataObject) -> None:
    block, (h, kv), n = data.draw(blocks), data.draw(heads), data.draw(st.integers(10, 60))
    chosen = data.draw(options(name))
    q, k, v = draw(n, block, h, kv, WIDTH, data.draw(seeds))
    kernel = data.draw(st.sampled_from(KERNELS))
    plain = outputs(reading(kernel, block, kv, chosen), (q, k, v))
    for i, layer in enumerate(LAYERS):
        if layer.window is not None and chosen.get("coverage") == "full":
            continue
        far = max(chosen["window"] + block, layer.window or 0) if name == "fold" else chosen["window"] + block
        if layer.window is not None and (name == "rerope" or chosen["far_boundary"] == "complement"):
            far = layer.window
        count = max(0, n - far + 1)
        source = torch.Generator().manual_seed(n)
        order = torch.cat([torch.randperm(count, generator=source), torch.arange(count, n + block)])
        found = outputs(reading(kernel, block, kv, chosen), (q, k[order], v[order]))[i]
        torch.testing.assert_close(found, plain[i], atol=1e-11, rtol=0)


@pytest.mark.parametrize("name", METHODS)
@given(data=st.data())
@few
def test_a_fork_goes_on_as_if_it_had_come_alone(name: str, data: st.DataObject) -> None:
    """From a prefix that is kept in every copy, whatever the page that it ends in; and after giving up its pages."""
    block, n, (h, kv) = data.draw(blocks), data.draw(st.integers(1, 60)), data.draw(heads)
    chosen = data.draw(options(name))
    more = data.draw(st.integers(1, block))
    q, k, v = draw(n + more, block, h, kv, WIDTH, data.draw(seeds))
    kernel = data.draw(st.sampled_from(KERNELS))
    alone, forked = (reading(kernel, block, kv, chosen, requests=2) for _ in range(2))
    alone.absorb(k[:n], v[:n])
    forked.reader.close(0)
    forked.reader.close(1)
    forked.reader.open_prefix(1)
    forked.absorb(k[:n], v[:n], 1)
    forked.reader.fork(1, 0, 768)
    for i in range(len(LAYERS)):
        block_of = [x[-block:] for x in (q, k, v)]
        torch.testing.assert_close(forked.attend(*block_of, layer=i), alone.attend(*block_of, layer=i))
    for one in (alone, forked):
        one.absorb(k[n : n + more], v[n : n + more])
    forked.reader.suspend(0)
    forked.reader.open(0)
    forked.absorb(k[: n + more], v[: n + more])
    for i in range(len(LAYERS)):
        torch.testing.assert_close(forked.attend(*block_of, layer=i), alone.attend(*block_of, layer=i))
