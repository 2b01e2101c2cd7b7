"""FOLD's attention, from the method's reads through cache, rotation and kernel: golden numbers, equalities, edges.

Everything runs through the pieces that a drafter uses (``ContextReader``, ``DraftCache``, a rope), with caches that
hold NaN wherever nothing was written, pages of 16, and each kernel in turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import brute
import pytest
import tiny
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foldspec.cache.paged import CacheSpec
from foldspec.cache.rows import Rows
from foldspec.context import make_method
from foldspec.context.base import DrafterLayer
from foldspec.context.reader import ContextReader, Rotation
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import Entries, Output, ReadArgs
from foldspec.models.rope import Rope
from foldspec.noise import Noise
from foldspec.options import MethodOptions

GOLDEN: dict[str, Any] = json.loads((tiny.GOLDEN / "golden_methods.json").read_text())
KERNELS = ("reference", "cpu")
# torch's flash operator computes a row by how many others there are and where memory lies: it promises no bits
EXACT = ("reference", "native")
FULL_LAYER = (DrafterLayer(),)


class PartialRope:
    """Rotates the first components of a head and lets the others pass."""

    def __init__(self, inverse: torch.Tensor) -> None:
        self._rope, self._width = Rope(inverse), 2 * len(inverse)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
        return torch.cat(
            [self._rope.rotate(x[..., : self._width], positions, alone=alone), x[..., self._width :]], dim=-1
        )


class WatchedKernels(Kernels):
    """Remembers the last call."""

    def multi_read_attention(self, batch: Sequence[Sequence[ReadArgs]]) -> list[Output]:
        self.batch, self.outputs = batch, super().multi_read_attention(batch)
        return self.outputs


class Reading:
    """A context method over a cache of its own, fed with un-rotated q, k and v."""

    def __init__(
        self,
        kernel: str,
        *,
        block: int,
        heads: int,
        width: int,
        rope: Rotation | None = None,
        layers: Sequence[DrafterLayer] = FULL_LAYER,
        dtype: torch.dtype = torch.float64,
        requests: int = 3,
        **options: Any,
    ) -> None:
        self.method = make_method(MethodOptions(**options), layers, block)
        spec = CacheSpec(len(layers), heads, width, width, dtype)
        self.cache = tiny.PoisonedDraftCache(spec, pages=48, page_size=16, max_requests=requests, device="cpu")
        self.kernels = WatchedKernels(kernel, tiny.library())
        self.rope = rope or Rope(torch.from_numpy(brute.frequencies(width)).to(dtype))
        self.reader = ContextReader(self.method, self.cache, self.rope, self.kernels, width**-0.5)
        for request in range(requests):
            self.reader.open(request)

    def absorb(self, k: torch.Tensor, v: torch.Tensor, request: int = 0) -> None:
        """The next entries; every layer gets the same ones."""
        rows = Rows.of([request], [self.reader.length(request)], [len(k)])
        layers = len(self.method.layers)
        self.reader.absorb(rows, [k] * layers, [v] * layers)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int = 0, request: int = 0
    ) -> torch.Tensor:
        rows = Rows.of([request], [self.reader.length(request)], [self.method.block])
        self.reader.begin(rows)
        return self.reader.attend(layer, rows, q, k, v)

    def whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **where: int) -> torch.Tensor:
        """Context and block at once: k and v [n + B, ...]. The context comes in three pieces, as from a prefill."""
        n = len(k) - self.method.block
        for a, b in ((0, n // 2), (n // 2, n - n // 5), (n - n // 5, n)):
            if a < b:
                self.absorb(k[a:b], v[a:b])
        return self.attend(q, k[n:], v[n:], **where)


def draw(n: int, block: int, heads: int = 2, kv: int = 1, width: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """q, k and v, un-rotated, in float64."""
    source = torch.Generator().manual_seed(seed)
    shapes = (block, heads, width), (n + block, kv, width), (n + block, kv, width)
    return [torch.randn(*shape, generator=source, dtype=torch.float64) for shape in shapes]


# --------------------------------------------------------------------------------------------------------------- golden


def numbers(case: dict[str, Any], key: str) -> torch.Tensor:
    """[B, heads(, width)] of a golden case."""
    return torch.tensor([[float(head[key]) for head in row["heads"]] for row in case["rows"]], dtype=torch.float64)


def tensors(case: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.tensor(case[name], dtype=torch.float64) for name in "qkv"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", GOLDEN["fold"], ids=lambda case: case["name"])
def test_fold_gives_the_golden_numbers(case: dict[str, Any], kernel: str) -> None:
    inverse = torch.from_numpy(brute.frequencies(case["rotary_dim"], case["theta"]))
    reading = Reading(
        kernel,
        block=case["B"],
        heads=case["hkv"],
        width=case["d"],
        rope=PartialRope(inverse),
        layers=(DrafterLayer(window=case["native_window"]),),
        context="fold",
        window=case["W"],
        alpha=case["alpha"],
        far_boundary=case["far_boundary"],
    )
    out = reading.whole(*tensors(case))
    wanted = torch.tensor([[head["o"] for head in row["heads"]] for row in case["rows"]], dtype=torch.float64)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=0)

    (reads,), (output,) = reading.kernels.batch, reading.kernels.outputs
    torch.testing.assert_close(output.lse[0], numbers(case, "logZ_window"), atol=1e-6, rtol=0)
    context = [case["n"] - first for first in reading.method.reads(0, case["n"])[0].first]
    assert context == [row["n_window_context"] for row in case["rows"]]
    far_counts = [row["n_far"] for row in case["rows"]]
    if not any(far_counts):
        assert len(reads) == 1  # nothing is far: the second read is not even made
        return
    far = reading.method.reads(0, case["n"])[1]
    assert [max(0, l - f) for f, l in zip(far.first, far.last, strict=True)] == far_counts
    assert list(far.query_at) == [row["far_distance"] for row in case["rows"]]
    far_mass = output.lse[1] * reads[1].exponent
    torch.testing.assert_close(far_mass, numbers(case, "logZ_far"), atol=1e-6, rtol=0)
    weight = torch.sigmoid(far_mass - output.lse[0])
    torch.testing.assert_close(weight, numbers(case, "far_weight"), atol=1e-6, rtol=0)


def test_the_golden_cases_are_the_ones_meant() -> None:
    names = [case["name"] for case in GOLDEN["fold"]]
    assert len(names) == 11 and {"huge_logits", "native_window_layer_complement", "native_window_layer_gap"} < set(
        names
    )


@pytest.mark.parametrize("case", GOLDEN["fold_index"], ids=lambda case: f"n={case['n']} W={case['W']} B={case['B']}")
def test_the_sets_of_every_row_have_the_golden_sizes(case: dict[str, Any]) -> None:
    n, block = case["n"], case["B"]
    method = make_method(MethodOptions(context="fold", window=case["W"], alpha=2.0), FULL_LAYER, block)
    near, *far = method.reads(0, n)
    assert [n - first for first in near.first] == case["n_window_context"] and near.last == (n,) * block
    counts = [max(0, l - f) for f, l in zip(far[0].first, far[0].last, strict=True)] if far else [0] * block
    assert counts == case["n_far"]
    assert counts.count(0) == case["rows_with_empty_far"] and max(counts) == case["far_kv_len"]
    if far:
        assert far[0].query_at == tuple(range(case["D"], case["D"] + block)) and far[0].keys == "unrotated"


MICRO = [("plain", "full", 1.0), ("window", "window", 1.0)]
MICRO += [(f"fold_alpha_{alpha}", "fold", float(alpha)) for alpha in (1, 2, 4)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("name", "context", "alpha"), MICRO)
def test_the_worked_example(name: str, context: str, alpha: float, kernel: str) -> None:
    case = GOLDEN["micro"]
    rope = Rope(torch.tensor(case["inv_freq"], dtype=torch.float64))
    reading = Reading(
        kernel, block=case["B"], heads=1, width=case["d"], rope=rope, context=context, window=case["W"], alpha=alpha
    )
    out = reading.whole(*tensors(case))
    torch.testing.assert_close(out, torch.tensor(case["out"][name], dtype=torch.float64), atol=1e-6, rtol=0)
    if context == "fold":
        assert list(reading.method.reads(0, case["n"])[1].last) == case["n_far"]


# -------------------------------------------------------------------------------- while the context fits, FOLD is plain

W, B = 20, 5
D = W + B
FITS = (0, 1, 15, 16, 17, W - 1, W)


@pytest.mark.parametrize("kernel", EXACT)
@pytest.mark.parametrize("own", [None, 3, 12, 40], ids=lambda own: f"native window {own}")
@pytest.mark.parametrize("n", FITS)
def test_while_the_context_fits_it_is_plain_attention_bit_for_bit(n: int, own: int | None, kernel: str) -> None:
    layers = (DrafterLayer(own, causal=own is not None),)
    inputs = [x.float() for x in draw(n, B, heads=6, kv=2, seed=n)]
    outs = {}
    for context in ("full", "fold"):
        reading = Reading(
            kernel, block=B, heads=2, width=8, layers=layers, dtype=torch.float32, context=context, window=W, alpha=2.0
        )
        outs[context] = reading.whole(*inputs)
    assert torch.equal(outs["fold"], outs["full"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_entry_more_and_it_is_not(kernel: str) -> None:
    inputs = draw(W + 1, B)
    out = [
        Reading(kernel, block=B, heads=1, width=8, context=context, window=W, alpha=2.0).whole(*inputs)
        for context in ("full", "fold")
    ]
    torch.testing.assert_close(out[0][:-1], out[1][:-1], atol=1e-12, rtol=0)  # their far sets are still empty
    assert (out[0][-1] - out[1][-1]).abs().max() > 1e-3


@pytest.mark.parametrize("kernel", EXACT)
def test_a_drafter_of_a_context_that_fits_is_the_plain_drafter_bit_for_bit(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of whole blocks, on full, sliding and sliding bidirectional layers."""
    config = tiny.changed(
        tiny.ZLAB, layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=9
    )
    model = tiny.load_target(tiny.write_target(tmp_path / "target"))
    network = tiny.load_drafter(tiny.write_drafter(tmp_path / "drafter", config))
    seen: list[torch.Tensor] = []

    def watched(logits: torch.Tensor) -> list[int]:
        seen.append(logits)
        return logits.argmax(-1).tolist()

    monkeypatch.setattr("foldspec.drafters.dflash.greedy", watched)
    drafters = {}
    for context in ("full", "fold"):
        cache = tiny.draft_cache(network)
        drafters[context] = tiny.bind(network, model, cache, kernel, context=context, window=W, alpha=2.0)
    source = torch.Generator().manual_seed(7)
    taps = [torch.randn(3 * W, 32, generator=source) for _ in network.facts.taps]
    with torch.inference_mode():
        for request, n in enumerate((*FITS, W + 1, 2 * W)):
            seen.clear()
            for drafter in drafters.values():
                drafter.open(request % 8)
                for a, b in ((0, n // 2), (n // 2, n)):
                    if a < b:
                        drafter.absorb(Rows.of([request % 8], [a], [b - a]), [], [tap[a:b] for tap in taps])
                drafter.propose(Rows.of([request % 8], [n], [1]), [3], [4], [Noise(0)])
                drafter.close(request % 8)
            full, fold = seen
            assert torch.equal(full, fold) == (n <= W), n


# ------------------------------------------------------------------------------------------ alpha 1, and empty far sets


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [W, W + 1, W + B, 3 * W])
def test_alpha_one_is_one_softmax(n: int, kernel: str) -> None:
    """Distances p - j below D, exactly D + r beyond, all logits in one softmax."""
    q, k, v = draw(n, B, heads=6, kv=2, seed=n)
    inverse = brute.frequencies(8)
    wanted = torch.zeros_like(q)
    for r in range(B):
        for h in range(6):
            distances = [n + r - j if j >= n or n + r - j < D else D + r for j in range(n + B)]
            s = [
                float(brute.rotate(q[r, h].numpy(), x, inverse) @ k[j, h // 3].numpy()) / math.sqrt(8)
                for j, x in enumerate(distances)
            ]
            wanted[r, h] = torch.tensor(s, dtype=torch.float64).softmax(0) @ v[:, h // 3]
    out = Reading(kernel, block=B, heads=2, width=8, context="fold", window=W, alpha=1.0).whole(q, k, v)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", range(W + 1, D + 2))
def test_rows_with_an_empty_far_set_are_safe(n: int, dtype: torch.dtype, kernel: str) -> None:
    """The first B - (n - W) rows have no far entry, the others have: no NaN, no weight where nothing is."""
    q, k, v = (x.to(dtype) for x in draw(n, B, heads=6, kv=2, seed=n))
    if dtype == torch.bfloat16:  # only whether it is finite: rotating bf16 keys costs digits of its own
        reading = Reading(kernel, block=B, heads=2, width=8, dtype=dtype, context="fold", window=W, alpha=2.0)
        assert bool(reading.whole(q, k, v).isfinite().all())
        return
    reading = Reading(kernel, block=B, heads=2, width=8, dtype=dtype, context="fold", window=W, alpha=2.0)
    out = reading.whole(q, k, v)
    wanted = fold_by_hand(q, k, v, 2.0)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(out.double(), wanted.out, atol=tolerance, rtol=0)
    empty = max(0, B - (n - W))
    assert wanted.far_count == [0] * empty + list(range(1 + max(0, n - D), 1 + max(0, n - D) + B - empty))
    lse = reading.kernels.outputs[0].lse
    assert bool((lse[1, :empty] == -math.inf).all()) and bool(lse[1, empty:].isfinite().all())


def fold_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alpha: float) -> brute.Attended:
    """FOLD on a full-attention layer, from the papers' sets."""
    n = len(k) - len(q)
    return brute.fold(
        q,
        k,
        v,
        brute.frequencies(q.shape[-1]),
        near=lambda r, j: n + r - j < D,
        block=lambda r, m: True,
        far=lambda r, j: n + r - j >= D,
        far_at=lambda r: D + r,
        alpha=alpha,
    )


# ------------------------------------------------------------------------------------------------ a rope with a factor


@pytest.mark.parametrize("kernel", EXACT)
@pytest.mark.parametrize("part", [1.0, 0.5], ids=lambda part: f"{part} of the head")
@pytest.mark.parametrize("n", [W + 1, 3 * W])
def test_a_drafter_with_yarn_reads_far_keys_as_if_they_were_rotated(
    n: int, part: float, kernel: str, tmp_path: Path
) -> None:
    """YaRN's factor is in cos and sin, so at distance 0 a key would have it too: far keys, which are not rotated, must
    not lose it. By brute force, q and k are multiplied where they turn."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    yarn |= {"beta_fast": 1.0, "beta_slow": 0.1, "partial_rotary_factor": part}
    config = tiny.changed(tiny.ZLAB, rope_theta=None, rope_parameters=yarn, head_dim=16, max_position_embeddings=128)
    network = tiny.load_drafter(tiny.write_drafter(tmp_path, config))
    oracle = transformers.Qwen3Config(head_dim=16, max_position_embeddings=128, rope_parameters=dict(yarn))
    inverse, factor = ROPE_INIT_FUNCTIONS["yarn"](oracle, torch.device("cpu"))
    assert factor > 1.2 and len(inverse) == 8 * part

    q, k, v = draw(n, B, heads=4, kv=2, width=16, seed=n)
    reading = Reading(
        kernel,
        block=B,
        heads=2,
        width=16,
        rope=network.rope,
        dtype=torch.float32,
        context="fold",
        window=W,
        alpha=2.0,
    )
    found = reading.whole(q.float(), k.float(), v.float())

    turned = torch.ones(16, dtype=torch.float64)
    turned[: 2 * len(inverse)] = factor
    sets = {"near": lambda r, j: n + r - j < D, "far": lambda r, j: n + r - j >= D, "block": lambda r, m: True}
    place = {"far_at": lambda r: D + r, "alpha": 2.0}
    wanted = brute.fold(q * turned, k * turned, v, inverse.double().numpy(), **sets, **place)  # type: ignore[arg-type]
    torch.testing.assert_close(found.double(), wanted.out, atol=2e-5, rtol=0)
    lost = k * turned
    lost[: n - W] = k[: n - W]  # of rows that see far entries, the far keys among others
    other = brute.fold(q * turned, lost, v, inverse.double().numpy(), **sets, **place)  # type: ignore[arg-type]
    assert (other.out[-1] - wanted.out[-1]).abs().max() > 1e-3


# --------------------------------------------------------------------------------- layers of every kind, and long lives

WINDOWS = (None, 3, 9, 40)  # below B, below D = 13, beyond the context
LAYERS = [DrafterLayer(own, causal) for own in WINDOWS for causal in (False, True)]
SLIDING = [
    ("full", {}),
    ("window", {}),
    ("fold", {"far_boundary": "D"}),
    ("fold", {"far_boundary": "complement"}),
    ("fold", {"coverage": "full"}),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("context", "options"), SLIDING, ids=lambda x: x if isinstance(x, str) else " ".join(x.values())
)
def test_layers_of_every_kind_see_what_the_masks_say(context: str, options: dict[str, str], kernel: str) -> None:
    """All kinds of layers over one cache, at lengths that cross every boundary (W = 8, B = 5, D = 13)."""
    window, block = 8, 5
    for n in (0, 2, 7, 8, 9, 13, 14, 24, 47):
        inputs = draw(n, block, seed=n)
        reading = Reading(
            kernel, block=block, heads=1, width=8, layers=LAYERS, context=context, window=window, alpha=2.0, **options
        )
        q, k, v = inputs
        if n:
            reading.absorb(k[:n], v[:n])
        for i, layer in enumerate(LAYERS):
            out = reading.attend(q, k[n:], v[n:], layer=i)
            wanted = brute.layer(
                *inputs, brute.frequencies(8), layer.window, layer.causal, context, window, **options
            ).out
            torch.testing.assert_close(out, wanted, atol=1e-12, rtol=0, msg=lambda m, at=(n, layer): f"{at}: {m}")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"far_boundary": "complement"}], ids=str)
def test_a_long_life(options: dict[str, str], kernel: str) -> None:
    """Block after block with 1 .. B new entries between: rings wrap, scratch rows are overwritten, pages fill."""
    window, block, end = 8, 5, 70
    layers = (DrafterLayer(), DrafterLayer(9, causal=True))
    reading = Reading(
        kernel, block=block, heads=1, width=8, layers=layers, context="fold", window=window, alpha=2.0, **options
    )
    _, k, v = draw(end, block)
    n = step = 0
    while n + block <= end:
        q, new_k, new_v = draw(0, block, seed=n + 1)
        inputs = q, torch.cat([k[:n], new_k]), torch.cat([v[:n], new_v])
        for i, layer in enumerate(layers):
            wanted = brute.layer(
                *inputs, brute.frequencies(8), layer.window, layer.causal, "fold", window, **options
            ).out
            torch.testing.assert_close(reading.attend(q, new_k, new_v, layer=i), wanted, atol=1e-12, rtol=0)
        step = step % block + 1
        reading.absorb(k[n : n + step], v[n : n + step])
        n += step


@pytest.mark.parametrize("kernel", KERNELS)
def test_requests_of_different_lengths_do_not_meet(kernel: str) -> None:
    lengths = (W + 3, 0, 3 * W)
    options = {"block": B, "heads": 1, "width": 8, "context": "fold", "window": W, "alpha": 2.0}
    drawn = [draw(n, B, seed=n) for n in lengths]
    reading = Reading(kernel, **options)
    for request, (n, (_, k, v)) in enumerate(zip(lengths, drawn, strict=True)):
        if n:
            reading.absorb(k[:n], v[:n], request)
    rows = Rows.of((0, 1, 2), lengths, (B,) * 3)
    reading.reader.begin(rows)
    q, k, v = (torch.cat([x[-B:] for x in each]) for each in zip(*drawn, strict=True))
    together = reading.reader.attend(0, rows, q, k, v)
    for i, inputs in enumerate(drawn):
        alone = Reading(kernel, **options).whole(*inputs)
        torch.testing.assert_close(together[i * B : (i + 1) * B], alone, atol=1e-12, rtol=0)


# ----------------------------------------------------------------------------------------------------------- properties


def far_read(keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, alpha: float) -> ReadArgs:
    """All entries, sharpened."""
    count, rows, scale = len(keys), len(q), q.shape[-1] ** -0.5
    runs = ((0, count),)
    return ReadArgs(
        q, Entries(keys, runs), Entries(values, runs), (0,) * rows, (count,) * rows, alpha * scale, 1 / alpha
    )


def drawn_read(count: int, seed: int) -> list[torch.Tensor]:
    q, k, v = draw(count, 2, width=6, seed=seed)
    return [q, k[:count], v[:count]]


def mass(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alpha: float) -> torch.Tensor:
    """L_F [B, heads]."""
    (output,) = Kernels(kernel).multi_read_attention([[far_read(k, v, q, alpha)]])
    return output.lse[0] / alpha


COUNTS, SEEDS, ALPHAS = st.integers(1, 40), st.integers(0, 2**20), st.floats(1.0, 30.0)


@pytest.mark.parametrize("kernel", KERNELS)
@given(count=COUNTS, seed=SEEDS, alpha=ALPHAS, more=st.floats(0.0, 30.0), gain=st.sampled_from([0.1, 1.0, 30.0]))
def test_the_far_mass_keeps_its_bounds(
    kernel: str, count: int, seed: int, alpha: float, more: float, gain: float
) -> None:
    """max s <= L_F <= max s + log(N) / alpha, and L_F does not grow with alpha."""
    q, k, v = drawn_read(count, seed)
    q = q * gain
    top = ((q[:, :, None] * k[:, 0]).sum(-1) / math.sqrt(6)).amax(-1)
    found = mass(kernel, q, k, v, alpha)
    slack = 1e-9 * (1 + top.abs())
    assert bool((top <= found + slack).all()) and bool((found <= top + math.log(count) / alpha + slack).all())
    assert bool((mass(kernel, q, k, v, alpha + more) <= found + slack).all())


@pytest.mark.parametrize("kernel", KERNELS)
@given(count=COUNTS, seed=SEEDS)
def test_a_very_sharp_read_is_its_best_entry(kernel: str, count: int, seed: int) -> None:
    q, k, v = drawn_read(count, seed)
    s = (q[:, :, None] * k[:, 0]).sum(-1) / math.sqrt(6)
    (output,) = Kernels(kernel).multi_read_attention([[far_read(k, v, q, 1e9)]])
    torch.testing.assert_close(output.lse[0] / 1e9, s.amax(-1), atol=1e-6, rtol=0)
    gap = s.topk(min(2, count), dim=-1).values
    clear = (gap[..., 0] - gap[..., -1] > 1e-6) | (count == 1)
    torch.testing.assert_close(output.out[clear], v[s.argmax(-1), 0][clear], atol=1e-9, rtol=0)


def extended(q: torch.Tensor, k: torch.Tensor, keys: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """One more component, 1 in every query and ``keys`` in the keys: adds keys * scale to the logits."""
    more = torch.as_tensor(keys, dtype=torch.float64) * torch.ones(*k.shape[:2], 1, dtype=torch.float64)
    return torch.cat([q, torch.ones(*q.shape[:2], 1, dtype=torch.float64)], -1), torch.cat([k, more], -1)


def folded(
    kernel: str, q: torch.Tensor, near: Sequence[torch.Tensor], far: Sequence[torch.Tensor], alpha: float
) -> torch.Tensor:
    """Two reads with the same, already rotated query."""
    reads = [far_read(*near, q, 1.0), far_read(*far, q, alpha)]
    (output,) = Kernels(kernel).multi_read_attention([reads])
    return output.out


@pytest.mark.parametrize("kernel", KERNELS)
@given(near=COUNTS, far=COUNTS, seed=SEEDS, alpha=ALPHAS, constant=st.floats(-300, 300))
def test_a_constant_on_all_logits_changes_nothing(
    kernel: str, near: int, far: int, seed: int, alpha: float, constant: float
) -> None:
    q, near_k, near_v = drawn_read(near, seed)
    _, far_k, far_v = drawn_read(far, seed + 1)
    outs = []
    for c in (0.0, constant):
        wide_q, wide_near = extended(q, near_k, c)
        _, wide_far = extended(q, far_k, c)
        values = [torch.cat([v, v[..., :1]], -1) for v in (near_v, far_v)]  # the kernel wants one width
        outs.append(folded(kernel, wide_q, (wide_near, values[0]), (wide_far, values[1]), alpha))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-8, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@given(far=COUNTS, seed=SEEDS, alpha=ALPHAS, at=st.integers(0, 40))
def test_a_far_entry_without_weight_changes_nothing(kernel: str, far: int, seed: int, alpha: float, at: int) -> None:
    q, near_k, near_v = drawn_read(5, seed)
    _, far_k, far_v = drawn_read(far, seed + 1)
    column = torch.zeros(far, 1, 1, dtype=torch.float64)
    wide_q, wide_far = extended(q, far_k, column)
    _, wide_near = extended(q, near_k, 0.0)
    near_v, far_v = (torch.cat([v, v[..., :1]], -1) for v in (near_v, far_v))
    plain = folded(kernel, wide_q, (wide_near, near_v), (wide_far, far_v), alpha)
    at = min(at, far)
    hidden = torch.tensor([[0.0] * 6 + [-1e6]], dtype=torch.float64)[None]
    more_k = torch.cat([wide_far[:at], hidden, wide_far[at:]])
    more_v = torch.cat([far_v[:at], torch.full_like(far_v[:1], 1e3), far_v[at:]])
    torch.testing.assert_close(folded(kernel, wide_q, (wide_near, near_v), (more_k, more_v), alpha), plain)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [D + 1, W + B + 7, 3 * W])
def test_the_order_of_the_oldest_entries_is_forgotten(kernel: str, n: int) -> None:
    """Entries 0 .. n - D are far for every row; with one entry of the window among them, order matters again."""
    q, k, v = draw(n, B, seed=n)
    source = torch.Generator().manual_seed(n)
    outs = []
    for count in (0, n - D + 1, n - D + 1 + B):
        order = torch.cat([torch.randperm(count, generator=source).flip(0), torch.arange(count, n + B)])
        reading = Reading(kernel, block=B, heads=1, width=8, context="fold", window=W, alpha=2.0)
        outs.append(reading.whole(q, k[order], v[order]))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-12, rtol=0)
    assert (outs[2] - outs[0]).abs().max() > 1e-3
