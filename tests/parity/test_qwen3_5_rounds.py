"""Speculation over a target whose layers have a state to be taken back: its output never depends on what was drafted,
nor on prefixes, neighbours and preemption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import scripted
import tiny
import torch
from safetensors.torch import load_file

from foldspec import Engine, SamplingParams
from foldspec.acceptance.base import AcceptanceRule
from foldspec.cache.paged import PagedCache
from foldspec.cache.recurrent import RecurrentPool
from foldspec.drafters.base import NoDrafter
from foldspec.errors import PairError
from foldspec.memory import MemoryPlan
from foldspec.models.layers import wide
from foldspec.noise import Noise
from foldspec.records import PointMass, Proposal, Verdict
from foldspec.sampling import TargetLaws
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Rounds

PAIR = tiny.PAIRS / "f_qwen3_5_zlab_mixed"
TARGET = PAIR / "target"
DRAFTS = 6


def load(**options: Any) -> Engine:
    settings = {"page_size": 16, "prefill_chunk": 50, "max_context": 512, "max_batch": 4, "debug": True, **options}
    return Engine.load(target=str(TARGET), drafter=str(PAIR / "drafter"), device="cpu", **settings)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load() as engine:
        yield engine


def assert_free(engine: Engine) -> None:
    cache = engine.resources.cache
    assert cache.tables.allocator.free_pages == cache.tables.allocator.pages
    assert [pool._lives for pool in cache._recurrent] == [{}]


# --------------------------------------------------------------------------------------------- plain decoding's output


def test_scripted_drafts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.follows_a_script(TARGET, monkeypatch)


@pytest.mark.parametrize("kernels", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
def test_two_drafters_change_nothing(tmp_path: Path, kernels: str) -> None:
    """The one that was trained for the target, and a random one: different drafts, one output."""
    other = scripted.drafter_for(TARGET, tmp_path / "drafter")
    first, second = (scripted.speculates_like_plain(TARGET, d, kernels=kernels) for d in (PAIR / "drafter", other))
    assert [d.token_ids for d in first] == [d.token_ids for d in second]
    assert sum(len(d.rounds) for d in first) < 0.8 * sum(len(d.rounds) for d in second)
    assert {r.drafted for d in first for r in d.rounds} != {r.drafted for d in second for r in d.rounds}


def test_a_block_may_be_longer_than_a_chunk_of_the_prompt() -> None:
    """A drafter without weights is named once the caches are there."""
    prompt, params = [7, 8, 9] * 9, SamplingParams(max_tokens=40, ignore_eos=True)
    with Engine.load(target=str(TARGET), drafter="none", prefill_chunk=3, max_context=128, debug=True) as engine:
        done = engine.using(drafter="lookup").generate(prompt, params)
        assert done.token_ids == engine.generate(prompt, params).token_ids
        assert max(len(r.drafted) for r in done.rounds) > 3


def long_blocks(folder: Path, block: int) -> Path:
    config = json.loads((PAIR / "drafter" / "config.json").read_text())
    config["dflash_config"]["block_size"] = block
    return tiny.write_drafter(folder, config)


def test_blocks_longer_than_what_can_be_taken_back_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"blocks of 64 rows: .* can be taken back by 63 at most"):
        Engine.load(target=str(TARGET), drafter=str(long_blocks(tmp_path / "drafter", 64)))


@pytest.mark.slow
def test_the_longest_blocks_change_nothing(tmp_path: Path) -> None:
    found = scripted.speculates_like_plain(TARGET, long_blocks(tmp_path / "drafter", 63))
    assert max(len(r.drafted) for done in found for r in done.rounds) > 40


# ------------------------------------------------------------------------------------------------ every accepted count


class Counted(AcceptanceRule):
    """Accepts as many drafts as the script says, right or wrong."""

    lossless = False

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        return Verdict(self.counts.pop(0), (7 * len(self.counts) + 11) % 500)

    def law(self) -> str:
        return "the script"


class Wild(NoDrafter):
    max_drafts = DRAFTS

    def propose(self, anchors: Any, tokens: Sequence[int], budgets: Any, noises: Any) -> list[Proposal]:
        return [PointMass(tuple((anchor * 5 + 3 * i) % 500 for i in range(DRAFTS))) for anchor in tokens]


SCRIPT = [0, 6, 1, 4, 2, 5, 3, 6, 6, 0, 0, 3, 1]  # all of 0 .. B, after each other in many orders


def logits_next(cache: PagedCache, model: Any, request: int, anchor: int) -> torch.Tensor:
    """Of the anchor's row; nothing of it stays."""
    cache.fork(request, 99)
    logits = tiny.forward(model, cache, [[anchor]], [99]).logits
    cache.close(99)
    return logits


def drift(length: int, kernels: str = "auto") -> float:
    """The largest difference of the target's next logits from those after a fresh prefill, after every round."""
    model, worst = tiny.load_target(TARGET, kernels), 0.0
    cache, prompt = tiny.paged_cache(model), tiny.prompt(length, 500, seed=3)
    cache.open(0)
    tiny.forward(model, cache, [prompt], [0])
    request = Request(0, tuple(prompt), 1000)
    request.commit([17])
    loop = Rounds(model, cache, Wild(), Counted(SCRIPT), device=tiny.CPU)
    for accepted in SCRIPT:
        (round_,) = loop.round([request])
        assert round_.accepted == accepted and len(round_.drafted) == DRAFTS
        committed = [*request.prompt, *request.output]
        assert cache.tables.length(0) == len(committed) - 1
        fresh = tiny.paged_cache(model)
        fresh.open(0)
        tiny.forward(model, fresh, [committed[:-1]], [0])
        found, wanted = (logits_next(c, model, 0, committed[-1]) for c in (cache, fresh))
        worst = max(worst, float((found - wanted).abs().max().nan_to_num(torch.inf)))
    return worst


@pytest.mark.parametrize("length", [1, 3, 40])
def test_after_every_accepted_count_the_target_goes_on_as_after_a_fresh_prefill(length: int) -> None:
    assert drift(length) == 0.0  # compiled: to the last bit


def test_the_same_without_a_compiler() -> None:
    assert drift(30, "reference") < 1e-4 and drift(40, "chunked") < 5e-4


def nothing_is_taken_back(self: RecurrentPool, request: int, length: int) -> None:
    """Forget that rows can go: whatever was recorded stands."""
    life = self._lives[request]
    life.base = length - life.recorded


def one_row_too_many(self: RecurrentPool, request: int, length: int) -> None:
    life = self._lives[request]
    life.base -= length < life.base + life.recorded


def test_a_state_that_is_not_taken_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for mistake in (nothing_is_taken_back, one_row_too_many):
        monkeypatch.setattr(RecurrentPool, "check_length", mistake)
        assert drift(16) > 0.01


# ------------------------------------------------------------------------------------ prefixes, neighbours, preemption


def generated(engine: Engine, prompts: Any, **options: Any) -> list[tuple[int, ...]]:
    done = engine.using(**options).generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
    return [d.token_ids for d in (done if isinstance(done, list) else [done])]


LENGTHS = (3, 50, 51, 100, 200)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[tuple[int, ...]]:
    """Each prompt alone."""
    return [generated(engine, tiny.prompt(n, 500, seed=6), draft_tokens=0)[0] for n in LENGTHS]


def test_a_prefix_serves_many_requests(engine: Engine, plain: list[tuple[int, ...]]) -> None:
    for length, wanted in list(zip(LENGTHS, plain, strict=True))[::2]:
        with engine.prefill(tiny.prompt(length, 500, seed=6)) as prefix:
            for options in ({"draft_tokens": 0}, {"context": "fold", "window": 24}):
                assert generated(engine, [prefix, prefix], **options) == [wanted, wanted]
    assert_free(engine)


@pytest.mark.parametrize("options", [{"draft_tokens": 0}, {"context": "fold", "window": 24}], ids=["plain", "fold"])
def test_requests_beside_each_other(engine: Engine, plain: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    assert generated(engine, [tiny.prompt(n, 500, seed=6) for n in LENGTHS], **options) == plain
    assert_free(engine)


@pytest.mark.parametrize("options", [{"draft_tokens": 0}, {"context": "fold", "window": 24}], ids=["plain", "fold"])
def test_requests_that_give_up_their_pages_go_on_as_before(
    plain: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    with load(cache_tokens=304, prefill_budget=7, **options) as small:
        prompts = [tiny.prompt(n, 500, seed=6) for n in LENGTHS]
        done = small.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
        assert small.scheduler.preempted > 0
        assert [d.token_ids for d in done] == plain
        assert_free(small)


# ---------------------------------------------------------------------------------------------------- memory and dtype


def test_what_is_planned_is_what_is_allocated() -> None:
    plans: list[MemoryPlan] = []
    for dtype in ("float32", "bfloat16"):
        with load(planned=plans.append, context="fold", window=24, dtype=dtype) as engine:
            plan, resources = plans[-1], engine.resources
            engine.generate([5, 6, 7], SamplingParams(max_tokens=3))
            cache, drafts = resources.cache, resources._draft_cache
            assert drafts is not None and resources.found.network is not None
            rings = sum(pool.nbytes for _, pool in drafts._rings.values())
            assert plan.target_cache + plan.rings == sum(data.nbytes for data in cache.tensors) + rings
            held = [*resources.found.model.parameters(), *resources.found.network.parameters()]
            assert plan.weights == sum(p.nbytes for p in held)
    assert plans[1].target_cache == plans[0].target_cache / 2


def in_bf16(folder: Path) -> tuple[Engine, dict[str, torch.Tensor]]:
    engine = Engine.load(target=str(folder), drafter="none", dtype="bfloat16", device="cpu", max_context=256)
    model = engine.resources.found.model
    return engine, {name: p for name, p in model.named_parameters() if name in wide(model)}


def test_in_half_precision_decays_and_states_stay_in_fp32() -> None:
    engine, kept = in_bf16(TARGET)
    with engine:
        model = engine.resources.found.model
        stored = {model.parameter_name(k): x for k, x in load_file(TARGET / "model.safetensors").items()}
        assert len(kept) == 2 * 4 and all(torch.equal(p, stored[name]) for name, p in kept.items())
        assert not all(torch.equal(p.bfloat16().float(), p) for p in kept.values())  # so that a detour would show
        assert {p.dtype for name, p in model.named_parameters() if name not in kept} == {torch.bfloat16}
        assert len(engine.generate(tiny.prompt(40, 500), SamplingParams(max_tokens=9, ignore_eos=True)).token_ids) == 9
        dtypes = {name: data.dtype for name, data in engine.resources.cache._recurrent[0]._data.items()}
        assert dtypes.pop("columns") == torch.bfloat16 and set(dtypes.values()) == {torch.float32}
