"""Every context method in a whole engine: the output is plain decoding's at lengths around every boundary, and its own
state is that of a run that nothing disturbed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from foldspec import Completion, Engine, SamplingParams
from foldspec.cache.paged import CacheSpec
from foldspec.context import METHODS
from foldspec.context.base import ContextMethod, Read
from foldspec.errors import UsageError
from foldspec.schedule.scheduler import Scheduler

WINDOW, PAGE, CHUNK, NEW = 24, 16, 64, 24
PAIRS = ("a_llama_zlab", "b_qwen3_zlab_mixed", "e_gemma4_dspark", "f_qwen3_5_zlab_mixed")
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {},
    "fold": {"alpha": 2.0},
    "fold_auto": {"auto_alphas": (2.0, 1.0, 4.0, 0.0)},
    "shared_window": {"draft_window": 24},
    "streaming": {"sinks": 4, "recents": 20},
    "yarn": {"yarn_ref": 128},
    "rerope": {"rerope_len": 60},
    "infllm": {"infllm_block": 8, "infllm_init": 6, "infllm_topk": 2, "infllm_repr": 2},
    "cmr": {"cmr_chunk": 8, "cmr_topk": 3, "cmr_period": 3},
}
NAMES = list(CASES)
# each side of: page, window (B is 6 and 8), one row past it, D, the first block of infllm, a chunk of cmr, one of the
# prefill, and where the factor of yarn steps, prompt + NEW + B a multiple of 256
EDGES = (1, 2, 15, 16, 17, 23, 24, 25, 29, 30, 31, 32, 33, 37, 38, 45, 46, 47, 63, 64, 65, 72, 128, 223, 224, 226, 227)
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(4, 500) for _ in range(length)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(p, marks=pytest.mark.slow) if p in ("b_qwen3_zlab_mixed", "e_gemma4_dspark") else p for p in PAIRS
    ],
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A trained pair of the goldens, with small pages and chunks."""
    folder = tiny.PAIRS / request.param
    options: dict[str, Any] = {"window": WINDOW, "page_size": PAGE, "prefill_chunk": CHUNK, "max_batch": 4}
    target, drafter = str(folder / "target"), str(folder / "drafter")
    with Engine.load(target=target, drafter=drafter, device="cpu", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[int, tuple[int, ...]]:
    """Plain decoding after a prompt of each length."""
    done = engine.using(draft_tokens=0).generate([prompt(n) for n in EDGES], PARAMS)
    return {n: one.token_ids for n, one in zip(EDGES, done, strict=True)}


def test_every_method_has_a_case() -> None:
    assert set(NAMES) == set(METHODS)


@pytest.mark.parametrize("name", NAMES)
def test_output_is_plain_decodings_at_every_boundary(
    name: str, engine: Engine, plain: Mapping[int, tuple[int, ...]]
) -> None:
    """Alone and, for all lengths at once, in batches of four."""
    method = engine.using(context=name, **CASES[name])
    together = method.generate([prompt(n) for n in EDGES], PARAMS)
    taus = []
    for n, batched in zip(EDGES, together, strict=True):
        done = method.generate(prompt(n), PARAMS)
        assert done.token_ids == plain[n] == batched.token_ids, n
        assert done.rounds == batched.rounds, n
        taus.append(done.tau or 0)
    assert sum(taus) / len(taus) > 1.3  # speculation was at work


# ----------------------------------------------------------------------------------------- state, and what disturbs it

LONG = 70  # tokens: blocks are formed, chunks join, and both after a selection was made
LONGER = SamplingParams(max_tokens=LONG, ignore_eos=True)


def states(engine: Engine) -> dict[int, Any]:
    reader = engine._drafter._reader  # type: ignore[attr-defined]
    return {request: held.state for request, held in reader._held.items()}


def same(found: Any, wanted: Any) -> None:
    """Two states, field by field; K/V come back the same within rounding."""
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)
    elif isinstance(wanted, tuple):
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            same(found[key], wanted[key])
    elif dataclasses.is_dataclass(wanted) and not isinstance(wanted, type):
        for field in dataclasses.fields(wanted):
            if field.name == "means":  # what is behind the blocks that exist holds anything
                same(found.means[: found.blocks], wanted.means[: wanted.blocks])
            elif field.name != "request":
                same(getattr(found, field.name), getattr(wanted, field.name))
    elif not hasattr(wanted, "rotate"):
        assert found == wanted


def run(engine: Engine, ids: list[int], disturb: Any = None, source: Any = None) -> tuple[Completion, Any]:
    """A completion, and the state that its last round found and left."""
    generation = engine.stream(source or ids, LONGER)
    generation.submit()
    scheduler, kept = engine.scheduler, None
    for step in range(400):
        if generation.over:
            return generation.finish(), kept
        scheduler.step()
        if not generation.over:
            (kept,) = states(engine).values()
            if disturb is not None:
                disturb(step, scheduler)
    raise AssertionError("it never ends")


class Preempt:
    """The request gives up its pages in its prefill, and after every other round."""

    def __init__(self) -> None:
        self.after: set[int] = set()

    def __call__(self, step: int, scheduler: Scheduler) -> None:
        for job in scheduler._running:
            rounds = len(job.request.rounds)
            if rounds % 2 == 0 and rounds not in self.after:
                self.after.add(rounds)
                scheduler._put_back(job)
                return


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [20, 90])
def test_a_request_that_gives_up_its_pages_loses_nothing_else(name: str, length: int, engine: Engine) -> None:
    ids = prompt(length, seed=1)
    method = engine.using(context=name, **CASES[name])
    calm, wanted = run(method, ids)
    assert states(method) == {}  # gone with the request
    disturbed, found = run(method, ids, preempt := Preempt())
    assert len(preempt.after) > 5
    assert disturbed.token_ids == calm.token_ids and disturbed.rounds == calm.rounds and len(calm.rounds) > 10
    same(found, wanted)
    assert states(method) == {}


def break_off(step: int, scheduler: Scheduler) -> None:
    """Every third round is drafted, and then comes to nothing."""
    if step % 3 == 2 and scheduler._running and scheduler._running[0].decodes:
        model = scheduler.rounds.model

        def fail(*_: Any) -> Any:
            raise KeyboardInterrupt

        scheduler.rounds.model = fail  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            scheduler.step()
        scheduler.rounds.model = model


@pytest.mark.parametrize("name", ["yarn", "infllm", "cmr", "fold_auto"])
def test_a_round_that_comes_to_nothing_leaves_no_trace(name: str, engine: Engine) -> None:
    ids = prompt(50, seed=2)
    method = engine.using(context=name, **CASES[name])
    calm, wanted = run(method, ids)
    broken, found = run(method, ids, break_off)
    assert broken.token_ids == calm.token_ids and broken.rounds == calm.rounds
    same(found, wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [16, 70])
def test_a_kept_prompt_gives_every_method_its_own_rounds(name: str, length: int, engine: Engine) -> None:
    """One prefill for all: ids, rounds and state as without it, also where the request gives up its pages."""
    ids = prompt(length, seed=3)
    method = engine.using(context=name, **CASES[name])
    calm, wanted = run(method, ids)
    with engine.prefill(ids) as prefix:
        for disturb in (None, Preempt()):
            found, state = run(method, ids, disturb, prefix)
            assert found.token_ids == calm.token_ids and found.rounds == calm.rounds
            same(state, wanted)


def test_a_cancelled_request_that_waits_for_its_pages_is_forgotten(engine: Engine) -> None:
    method = engine.using(context="infllm", **CASES["infllm"])
    generation = method.stream(prompt(40), LONGER)
    generation.submit()
    for _ in range(3):
        method.scheduler.step()
    method.scheduler._put_back(method.scheduler._running[-1])
    assert len(states(method)) == 1
    generation.close()
    assert states(method) == {} and method.scheduler.idle


def test_a_method_keeps_its_own_coverage_and_an_option_wins(engine: Engine) -> None:
    names = ("full", "window", "fold", "fold_auto", "rerope", "cmr", "streaming", "yarn", "infllm")
    assert [engine.using(context=name).method.coverage for name in names] == ["all"] * 6 + ["full"] * 3
    assert engine.using(context="streaming").using(context="fold").method.coverage == "all"
    assert engine.using(context="streaming", coverage="all").method.coverage == "all"


@pytest.mark.parametrize("alpha", [0.0, 1.0, 4.0])
def test_a_choice_of_one_is_no_choice(alpha: float, engine: Engine) -> None:
    """``fold_auto`` is then ``fold``, or ``window``, round by round; with more to choose from it takes other rounds."""
    changes: dict[str, Any] = {"context": "fold", "alpha": alpha} if alpha else {"context": "window"}
    auto, fixed = engine.using(context="fold_auto", auto_alphas=(alpha,)), engine.using(**changes)
    ids = [prompt(n, seed=4) for n in (20, 90)]
    for one, other in zip(auto.generate(ids, LONGER), fixed.generate(ids, LONGER), strict=True):
        assert one.rounds == other.rounds


def test_what_is_chosen_is_the_same_for_the_same_seed(engine: Engine) -> None:
    """Sampled, alone and among others; and more than one is chosen from."""
    params = SamplingParams(max_tokens=LONG, ignore_eos=True, temperature=1.0, seed=5)
    auto = engine.using(context="fold_auto")
    alone = auto.generate(prompt(90), params)
    assert auto.generate([prompt(40), prompt(90)], params)[1].rounds == alone.rounds
    _, state = run(auto, prompt(90))
    assert min(state.rounds) > 0


def test_a_far_read_costs_what_it_reads(engine: Engine) -> None:
    """The share that ``fold_auto`` goes by is of the bytes that ``bytes_a_round`` counts."""
    fold, window = engine.using(context="fold"), engine.using(context="window")
    _, state = run(engine.using(context="fold_auto"), prompt(90))
    assert engine.resources.found.network is not None
    layers = engine.resources.found.network.layer_facts
    if any(layer.window for layer in layers):  # which begin to be far elsewhere
        return
    for n in (30, 200):
        more = fold.bytes_read(n) - window.bytes_read(n)
        rest = window.bytes_read(n) - window._drafter._reader.bytes_read(n)  # type: ignore[attr-defined]
        assert state.share(n, (n - WINDOW) * len(layers)) == pytest.approx(more / rest)


def test_values_by_layer_are_one_a_layer(engine: Engine) -> None:
    layers = len(engine.resources.found.network.layer_facts)  # type: ignore[union-attr]
    ids = prompt(90)
    same_everywhere = engine.using(context="fold", layer_window=(16,) * layers, layer_alpha=(3.0,) * layers)
    one_for_all = engine.using(context="fold", window=16, alpha=3.0)
    assert same_everywhere.generate(ids, PARAMS).rounds == one_for_all.generate(ids, PARAMS).rounds
    by_layer = engine.using(
        context="fold", layer_window=(8, *(16,) * (layers - 1)), layer_alpha=(1.0, *(3.0,) * (layers - 1))
    )
    assert by_layer.generate(ids, PARAMS).token_ids == one_for_all.generate(ids, PARAMS).token_ids
    with pytest.raises(UsageError, match=f"layer_alpha: names 1 layers, the drafter has {layers}"):
        engine.using(layer_alpha=(2.0,))


@pytest.mark.parametrize("n", [10, 24, 25, 200])
def test_what_a_round_reads_is_known_before(n: int, engine: Engine) -> None:
    """Bytes of the drafter's context, by each method's definition; the bench states them beside the time."""
    network = engine.resources.found.network
    assert network is not None
    spec, layers = network.cache_spec(torch.float32), network.layer_facts
    block, key = network.block, spec.kv_heads * spec.key_width * 4
    near, far = min(n, WINDOW + block - 1), max(0, n - WINDOW)
    init, size, most = (CASES["infllm"][f"infllm_{name}"] for name in ("init", "block", "topk"))
    blocks = max(0, (n - WINDOW - block + 1 - init) // size)
    retrieved = min(far, init + size * min(blocks, most) + max(0, far - init - blocks * size))
    chosen = n if n <= 24 else 16 + (n % 8 or 8)
    target = engine.resources.cache.spec.pools[0]
    assert isinstance(target, CacheSpec)
    chunked = chosen * 2 * key * len(layers) + n // 3 * target.kv_heads * target.key_width * 4
    whole = {  # entries of keys and values, and keys that are looked at once more
        "full": n,
        "window": near,
        "fold": near + far,
        "fold_auto": near + far,
        "shared_window": min(n, 24),
        "streaming": min(n, 24),
        "yarn": n,
        "rerope": near + far,
        "infllm": near + retrieved + near / 2,
    }
    own = [layer.window for layer in layers]
    for name in NAMES:
        found = engine.using(context=name, **CASES[name])._drafter._reader.bytes_read(n)  # type: ignore[attr-defined]
        if name == "cmr":
            assert found == chunked
        elif not any(own):
            assert found == whole[name] * 2 * key * len(layers), name
        elif name in ("full", "yarn", "streaming", "infllm"):  # sliding layers are left alone
            rest = sum(min(n, window - 1) for window in own if window)
            assert found == (whole[name] * own.count(None) + rest) * 2 * key, name


# ------------------------------------------------------------------------------------------- a method of one's own


class EveryOther(ContextMethod):
    """A toy: the window, and every other page-sized piece of what is older, at the window's end."""

    def stores(self, layer: int) -> Any:
        from foldspec.cache.side import Layout

        return Layout(rotated=True, unrotated=True)

    def begin(self, request: Any) -> list[int]:
        return []

    def reads(self, layer: int, state: Any, n: int, q: torch.Tensor | None) -> list[Read]:
        near = self.near(layer, n, self.window(layer) + self.block)
        old = min(near.first)
        index = tuple((a, min(old, a + 16)) for a in range(0, old, 32))
        count = sum(last - first for first, last in index)
        rows = self.block
        at = (self.window(layer) + self.block,) * rows
        return [near, Read((0,) * rows, (count,) * rows, "unrotated", at, index=index)]

    def committed(self, state: Any, before: int, n: int, attended: Any) -> None:
        state.append(n - before)


def test_a_new_method_is_a_subclass_and_a_line(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees every round, drafts well, and changes no token."""
    monkeypatch.setitem(METHODS, "every_other", f"{__name__}:EveryOther")
    method = engine.using(context="every_other")
    done, commits = run(method, prompt(90, seed=1))
    assert done.token_ids == engine.using(draft_tokens=0).generate(prompt(90, seed=1), LONGER).token_ids
    assert commits[:8] == [len(round_.committed) for round_ in done.rounds][:8] and max(commits) > 2


def test_methods_are_short_files() -> None:
    room = Path(__file__).parents[2] / "foldspec" / "context"
    files = [room / f"{where.partition(':')[0].rpartition('.')[2]}.py" for where in METHODS.values()]
    counts = [len(file.read_text().splitlines()) for file in files]
    assert sum(counts) / len(counts) < 120 and max(counts) < 200
