"""One copy of the context with a ring, and the paper's two full copies: the same numbers, and the memory as stated.

Both layouts read the same keys and values from other places, so that sums may be cut elsewhere: equal to 1e-6 in fp32.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import brute
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import Reading, draw

from foldspec import Completion, Engine, SamplingParams
from foldspec.cache.rows import Rows
from foldspec.catalog import describe
from foldspec.checkpoints.registry import find
from foldspec.context import METHODS, uses
from foldspec.context.base import ContextMethod, DrafterLayer
from foldspec.context.reader import ContextReader
from foldspec.drafters.base import Room
from foldspec.drafters.conditioned import ConditionedNetwork
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import Output, ReadArgs
from foldspec.loading import built_in
from foldspec.memory import size
from foldspec.options import EngineOptions, MethodOptions
from foldspec.resources import filled_in

LAYERS = tuple(DrafterLayer(own, causal) for own, causal in ((None, False), (None, True), (9, False), (40, True)))
OPTIONS: dict[str, dict[str, Any]] = {
    "fold": {"alpha": 2.0},
    "rerope": {"rerope_len": 30},
    "infllm": {"infllm_block": 4, "infllm_init": 3, "infllm_topk": 2, "infllm_repr": 2},
}
TOLERANCE = 1e-6
few = settings(max_examples=10)


def test_the_methods_with_a_far_read_of_unrotated_keys_take_the_option() -> None:
    assert {name for name in METHODS if "layout" in uses(name)} == set(OPTIONS)


# ------------------------------------------------------------------------------------------------- through the reader


def edges(window: int, block: int) -> list[int]:
    """Lengths on each side of: nothing, the window, D, where a ring of D + B wraps, and pages of 16."""
    at = {0, window, window + block, window + 2 * block, 16, 32, 64}
    return sorted({max(0, n + step) for n in at for step in (-1, 0, 1)})


def reading(kernel: str, name: str, layout: str, block: int, kv: int, width: int, window: int, **more: Any) -> Reading:
    chosen = {"context": name, "window": window, "layout": layout, **OPTIONS[name], **more}
    return Reading(kernel, block=block, heads=kv, width=width, layers=LAYERS, dtype=torch.float32, **chosen)


def lives(one: Reading, inputs: Sequence[torch.Tensor], start: int, steps: Sequence[int]) -> list[torch.Tensor]:
    """Of every round, what each layer gives the blocks of two requests, one of which began from a kept prompt."""
    (q, k, v), block, found = inputs, one.method.block, []
    one.reader.suspend(1)
    one.reader.open_prefix(9)
    for request in (0, 9):
        if start:
            one.absorb(k[:start], v[:start], request)
    one.reader.close(1)
    one.reader.fork(9, 1, 768)
    one.reader.close(9)
    at = start
    for step in steps:
        rows = Rows.of([0, 1], [at, at], [block, block])
        one.reader.begin(rows)
        q2, k2, v2 = (torch.cat([x, x]) for x in (q, k[at : at + block], v[at : at + block]))
        found += [one.reader.attend(i, rows, q2, k2, v2) for i in range(len(LAYERS))]
        rows = Rows.of([0, 1], [at, at], [step, step])
        k2, v2 = (torch.cat([x[at : at + step]] * 2) for x in (k, v))
        one.reader.absorb(rows, [k2] * len(LAYERS), [v2] * len(LAYERS))
        at += step
    return found


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("name", OPTIONS)
@given(data=st.data())
@few
def test_both_layouts_give_the_same_numbers(name: str, kernel: str, data: st.DataObject) -> None:
    """Over random shapes, at lengths around every boundary, in round after round: also where a request goes on from a
    kept prompt, which keeps values once."""
    block, window = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
    h, kv = data.draw(st.sampled_from([(1, 1), (4, 2), (6, 2), (7, 1)]))
    width, start = data.draw(st.sampled_from([2, 8, 16])), data.draw(st.sampled_from(edges(window, block)))
    steps = data.draw(st.lists(st.integers(1, block), min_size=1, max_size=4))
    more = {"coverage": data.draw(st.sampled_from(["all", "full"]))}
    if name == "fold":
        more["far_boundary"] = data.draw(st.sampled_from(["D", "complement"]))
    drawn = draw(start + sum(steps), block, h, kv, width, data.draw(st.integers(0, 2**16)))
    inputs = [x.float() for x in drawn]
    single, paper = (
        lives(reading(kernel, name, layout, block, kv, width, window, **more), inputs, start, steps)
        for layout in ("single", "paper")
    )
    for one, other in zip(single, paper, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=TOLERANCE)
        assert bool(one.isfinite().all())


@pytest.mark.parametrize("n", edges(8, 4))
def test_the_papers_layout_is_the_definition(n: int) -> None:
    """FOLD's two reads against dense sums in float64, from two copies as from one."""
    q, k, v = draw(n, 4, 4, 2, 8, seed=n)
    for layout in ("single", "paper"):
        one = Reading("cpu", block=4, heads=2, width=8, context="fold", window=8, alpha=2.0, layout=layout)
        wanted = brute.layer(q, k, v, brute.frequencies(8), None, False, "fold", 8)
        torch.testing.assert_close(one.whole(q, k, v), wanted.out, atol=1e-11, rtol=0)


def _once(reader: ContextReader) -> Callable[..., None]:
    """A fork that forgets that values are kept twice."""

    def fork(prefix: int, request: int, longest: int | None = None) -> None:
        reader._begin(request, longest)
        reader._cache.fork(prefix, request, reader._layouts)

    return fork


def test_a_copy_that_is_not_filled_is_seen() -> None:
    """The far read of the paper's layout reads the second copy and nothing else: where it is not written, NaN comes."""
    inputs = [x.float() for x in draw(40, 4, 4, 2, 8)]
    one = reading("cpu", "fold", "paper", 4, 2, 8, 8)
    one.reader.fork = _once(one.reader)  # type: ignore[method-assign]
    assert any(bool(out.isnan().any()) for out in lives(one, inputs, 40, [2]))
    for pool in ("_values", "_side_values"):
        one = reading("cpu", "fold", "paper", 4, 2, 8, 8)
        q, k, v = inputs
        one.absorb(k[:40], v[:40])
        getattr(one.cache, pool).fill_(torch.nan)
        assert bool(one.attend(q, k[40:], v[40:]).isnan().any())


# -------------------------------------------------------------------------------------------------- through the engine

WINDOW, NEW = 24, 20
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)
LENGTHS = (1, 16, 24, 25, 30, 31, 37, 130)


@pytest.fixture(scope="module", params=["a_llama_zlab", "f_qwen3_5_zlab_mixed"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    folder = tiny.PAIRS / request.param
    options: dict[str, Any] = {"window": WINDOW, "page_size": 16, "prefill_chunk": 64, "max_batch": 4}
    target, drafter = str(folder / "target"), str(folder / "drafter")
    with Engine.load(target=target, drafter=drafter, device="cpu", **options) as engine:
        yield engine


def heard(engine: Engine, patch: pytest.MonkeyPatch, run: Callable[[], Any]) -> tuple[Any, list[Output]]:
    """What a run returns, and the output of every attention of its drafter and its target."""
    outputs: list[Output] = []
    attend = Kernels.multi_read_attention

    def listen(self: Kernels, batch: Sequence[Sequence[ReadArgs]]) -> list[Output]:
        found = attend(self, batch)
        outputs.extend(found)
        return found

    with patch.context() as within:
        within.setattr(Kernels, "multi_read_attention", listen)
        return run(), outputs


@pytest.mark.parametrize("name", OPTIONS)
def test_an_engine_drafts_the_same_from_both(name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, rounds, and every attention of every round within 1e-6; from kept prompts too."""
    prompts = [[random.Random(n).randrange(4, 500) for _ in range(n)] for n in LENGTHS]
    runs: list[tuple[list[Completion], list[Output]]] = []
    for layout in ("single", "paper"):
        method = engine.using(context=name, layout=layout, **OPTIONS[name])
        assert method.settings()["layout"] == layout

        def run(method: Engine = method) -> list[Completion]:
            done = method.generate([list(ids) for ids in prompts], PARAMS)
            with method.prefill(prompts[-1]) as prefix:
                return [*done, method.generate(prefix, PARAMS)]

        runs.append(heard(method, monkeypatch, run))
    (single, ones), (paper, others) = runs
    assert [(d.token_ids, d.rounds) for d in single] == [(d.token_ids, d.rounds) for d in paper]
    assert len(ones) == len(others) > 500
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one.out, other.out, atol=TOLERANCE, rtol=TOLERANCE)


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("longest", [300, 5000])
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-8b-dspark"])
def test_models_states_the_memory_that_each_layout_takes(name: str, longest: int, tmp_path: Any) -> None:
    """The bytes of a drafter's arrays and rings once a request is open, for one request in bf16."""
    pair, kernels = find(name), Kernels.of(EngineOptions())
    network = built_in(pair, kernels).network
    assert isinstance(network, ConditionedNetwork)
    stated, page = describe(name, tmp_path, longest)["memory"], EngineOptions().page_size
    for layout, report in (("single", stated), ("paper", stated["in the paper's layout"])):
        method = filled_in(MethodOptions(layout=layout), built_in(pair, kernels))
        room = Room(1, longest + network.block, longest, page)
        pages = -(-longest // page) + 1 + -(-network.block // page)
        cache = network.caches(torch.bfloat16, room, pages, torch.device("cpu"))
        context: ContextMethod = tiny.method_of(network, **vars(method))
        cache.open(0, tuple(context.stores(i) for i in range(len(network.layer_facts))))
        assert report["draft cache"] == size(sum(array.nbytes for array in cache.arrays))
        assert report["rings"] == size(sum(pool.nbytes for _, pool in cache._rings.values()))
