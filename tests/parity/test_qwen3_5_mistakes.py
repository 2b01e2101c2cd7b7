"""Deliberate mistakes in Qwen3.5's maths, states and roundings: each is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from oracles import LENGTH, Pair, close, feed, like_the_source, opened
from qwen import FIRST, TOLERANCE, VARIANTS, write

from foldspec.cache.recurrent import Columns, RecurrentPool
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.gated_delta import State, reference
from foldspec.models import qwen3_5
from foldspec.models.layers import RMSNorm
from foldspec.models.qwen3_5 import Convolution, DeltaNet, GatedAttention
from foldspec.models.rope import Rope

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield Pair(write(tmp_path_factory.mktemp("qwen3_5"), FIRST))


def arguments(change: Callable[..., dict[str, Any]]) -> Callable[[Patch], None]:
    """A mistake in what the recurrence is given."""
    original = Kernels.gated_delta

    def wrong(self: Kernels, *values: Any) -> torch.Tensor:
        names = ("q", "k", "v", "g", "beta", "state")
        given = dict(zip(names, values, strict=True))
        return original(self, **{**given, **change(**given)})

    return lambda patch: patch.setattr(Kernels, "gated_delta", wrong)


def attribute(owner: Any, name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def not_taken_back(*, state: bool, columns: bool) -> Callable[[Patch], None]:
    """Everything that was recorded counts as kept."""
    begin, of = RecurrentPool.begin, RecurrentPool.state

    def begun(self: RecurrentPool, request: int, start: int, count: int) -> None:
        recorded = self._lives[request].recorded
        begin(self, request, start, count)
        self._lives[request].__dict__["wrong"] = recorded

    def wrong(self: RecurrentPool, layer: int, request: int) -> tuple[State, Columns]:
        right, history = of(self, layer, request)
        kept: int = self._lives[request].__dict__["wrong"]
        return right._replace(kept=kept) if state else right, history._replace(kept=kept) if columns else history

    def mistake(patch: Patch) -> None:
        patch.setattr(RecurrentPool, "begin", begun)
        patch.setattr(RecurrentPool, "state", wrong)

    return mistake


def split_flat(self: GatedAttention, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    both, k, v = self.stack(x)
    q, gate = both.chunk(2, dim=1)
    return self.q_norm(self._heads(q)), self._heads(gate), self.k_norm(self._heads(k)), self._heads(v)


def gate_first(self: GatedAttention, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    both, k, v = self.stack(x)
    gate, q = both.unflatten(1, (-1, 2 * self.head_dim)).split(self.head_dim, dim=-1)
    return self.q_norm(q), gate, self.k_norm(self._heads(k)), self._heads(v)


def tiled(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat(heads // len(x), 1)[:, :, None]


def by_mean(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def taps(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    """A mistake in the taps of the convolution."""
    original = Convolution.forward

    def wrong(self: Convolution, rows: torch.Tensor, columns: Columns) -> torch.Tensor:
        weight, self.weight.data = self.weight.data, change(self.weight.data)
        try:
            return original(self, rows, columns)
        finally:
            self.weight.data = weight

    return attribute(Convolution, "forward", wrong)


def functions(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    """``torch.sigmoid`` or ``F.silu`` in the model's file, replaced by another function."""
    right = getattr(torch, name, None) or getattr(F, name)

    def by_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return value(x) if function is right else function(x)

    return attribute(qwen3_5, "by_row", by_row)


def gate_before_norm(self: Kernels, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(gate) * up


def parameter(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    original = DeltaNet.forward

    def wrong(self: DeltaNet, *values: Any) -> torch.Tensor:
        right = getattr(self, name).data
        getattr(self, name).data = value(right)
        try:
            return original(self, *values)
        finally:
            getattr(self, name).data = right

    return attribute(DeltaNet, "forward", wrong)


def turned(part: float) -> Callable[[Patch], None]:
    original = Rope.from_config.__func__  # type: ignore[attr-defined]

    def wrong(cls: type[Rope], config: Any, head_dim: int, layer_type: str | None = None) -> Rope:
        rope = {**config.values["rope_parameters"], "partial_rotary_factor": part}
        changed = type(config)({**config.values, "rope_parameters": rope}, config.where)
        found: Rope = original(cls, changed, head_dim, layer_type)
        return found

    return attribute(Rope, "from_config", classmethod(wrong))


MISTAKES: dict[str, Callable[[Patch], None]] = {
    "norms multiply by w, not 1 + w": attribute(RMSNorm, "scale", lambda self: self.weight),
    "the gated norm by 1 + w too": attribute(RMSNorm, "scale", lambda self: self.weight + 1),
    "queries and gates in two halves": attribute(GatedAttention, "gated_inputs", split_flat),
    "the gate before the query": attribute(GatedAttention, "gated_inputs", gate_first),
    "attention's gate through silu": functions("sigmoid", lambda x: F.silu(x) if x.dim() == 3 else torch.sigmoid(x)),
    "no gate on attention": functions("sigmoid", lambda x: torch.ones_like(x) if x.dim() == 3 else torch.sigmoid(x)),
    "heads tiled, not repeated": attribute(reference, "spread", tiled),
    "the whole head rotated": turned(1.0),
    "two numbers of a head fewer rotated": turned(0.2),
    "convolution history not taken back": not_taken_back(state=False, columns=True),
    "state not taken back": not_taken_back(state=True, columns=False),
    "taps in reverse": taps(lambda w: w.flip(-1)),
    "no convolution": taps(lambda w: torch.zeros_like(w).index_fill_(-1, torch.tensor([w.shape[-1] - 1]), 1.0)),
    "no silu after the convolution": functions("silu", lambda x: x),
    "decay of the other sign": arguments(lambda g, **_: {"g": -g}),
    "no decay": arguments(lambda g, **_: {"g": torch.zeros_like(g)}),
    "A_log without its exponential": parameter("A_log", lambda a: a.abs().clamp(min=1e-3).log()),
    "no dt_bias": parameter("dt_bias", torch.zeros_like),
    "beta always 1": arguments(lambda beta, **_: {"beta": torch.ones_like(beta)}),
    "beta up to 2": arguments(lambda beta, **_: {"beta": 2 * beta}),
    "decay and rate exchanged": arguments(lambda g, beta, **_: {"g": -beta, "beta": g.exp()}),
    "keys of mean square 1": attribute(reference, "normalised", by_mean),
    "k before q": arguments(lambda q, k, **_: {"q": k, "k": q}),
    "the gate through a sigmoid": attribute(Kernels, "silu_mul", gate_before_norm),
}


def run(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill, a block of which two rows stand, another, and the rest; what transformers gives for it."""
    model = tiny.load_target(pair.folder, "reference")
    ids, cache = pair.ids[:48], opened(model)
    found = [tiny.forward(model, cache, [ids[:30]], [0]).logits]
    found.append(tiny.forward(model, cache, [[*ids[30:32], 5, 9, 3]], [0]).logits[:2])
    cache.truncate(0, 32)
    found += [tiny.forward(model, cache, [ids[a:b]], [0]).logits for a, b in ((32, 33), (33, 40), (40, 48))]
    return torch.cat(found), pair.wanted(ids)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(first: Pair, mistake: str, monkeypatch: Patch) -> None:
    MISTAKES[mistake](monkeypatch)
    found, wanted = run(first)
    assert not (found - wanted).abs().max() < 10 * TOLERANCE


def test_without_a_mistake_there_is_nothing_to_notice(first: Pair) -> None:
    close(*run(first), TOLERANCE)


# ------------------------------------------------------------------------------------------------------ half precision


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    folder = tmp_path_factory.mktemp("half")
    return [Pair(write(folder / str(i), name, torch.bfloat16), torch.bfloat16) for i, name in enumerate(VARIANTS)]


def near(pairs: list[Pair], sizes: Sequence[int]) -> float:
    """The share of rows whose logits are transformers'; no argmax is another where that decides anything."""
    found = []
    for pair in pairs:
        model = tiny.load_target(pair.folder, "eager", torch.bfloat16)
        for seed in range(6):
            ids = tiny.prompt(LENGTH, model.vocabulary, seed=seed)
            logits = feed(model, opened(model, dtype=torch.bfloat16), ids, sizes)
            found.append(like_the_source(logits, pair.wanted(ids)))
    return sum(share for share, _ in found) / len(found) if all(agrees for _, agrees in found) else 0.0


@pytest.mark.parametrize("sizes", [[LENGTH], [40, 7]], ids=str)
def test_half_precision_rounds_as_its_source_does(halves: list[Pair], sizes: list[int]) -> None:
    assert near(halves, sizes) >= 0.99


def cast_early(self: Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)


ROUNDINGS: dict[str, Callable[[Patch], None]] = {
    "norms cast before they multiply": attribute(Kernels, "rms_norm", cast_early),
    "the gated norm casts after": attribute(RMSNorm, "scale", lambda self: self.weight.float() + int(self._wide)),
    "rates in fp32": functions("sigmoid", lambda x: torch.sigmoid(x if x.dim() == 3 else x.float())),
}


@pytest.mark.parametrize("mistake", ROUNDINGS)
def test_another_order_of_casts_is_noticed(halves: list[Pair], mistake: str, monkeypatch: Patch) -> None:
    ROUNDINGS[mistake](monkeypatch)
    assert near(halves, [LENGTH]) < 0.9
