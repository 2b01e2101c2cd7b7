"""The round loop: requests together equal each alone; every rollback leaves caches as a fresh prefill would; prefixes
are restored for every method; whatever happens, all pages come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import tiny
import torch

from foldspec import Completion, Engine, FoldspecError, SamplingParams
from foldspec.acceptance.base import AcceptanceRule
from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.cache.side import DraftCache
from foldspec.drafters.base import Drafter
from foldspec.drafters.dflash import DFlash
from foldspec.errors import ResourceError, UsageError
from foldspec.models.base import LanguageModel
from foldspec.noise import Noise
from foldspec.records import PointMass, Proposal, Verdict
from foldspec.sampling import TargetLaws, greedy
from foldspec.schedule.prefill import prefill
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Rounds

PAIR, WINDOW = "a_llama_zlab", 24
METHODS: dict[str, dict[str, Any]] = {
    "full": {"context": "full"},
    "window": {"context": "window", "window": WINDOW},
    "fold": {"context": "fold", "window": WINDOW, "alpha": 2.0},
}


class Parts:
    """The trained pair of the goldens, taken apart: pages of 16, a cache for each drafter that is made."""

    def __init__(self) -> None:
        self.model: LanguageModel = tiny.load_target(tiny.PAIRS / PAIR / "target")
        self.network = tiny.load_drafter(tiny.PAIRS / PAIR / "drafter")

    def caches(self) -> tuple[PagedCache, DraftCache]:
        return tiny.paged_cache(self.model, pages=96), tiny.draft_cache(self.network, pages=96)

    def drafter(self, cache: DraftCache, method: str) -> DFlash:
        return tiny.bind(self.network, self.model, cache, **METHODS[method])


@pytest.fixture(scope="module")
def parts() -> Parts:
    return Parts()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The same pair as an engine whose pages (16) and chunks (50) make every boundary near."""
    folder = tiny.PAIRS / PAIR
    with Engine.load(
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        page_size=16,
        prefill_chunk=50,
        max_context=512,
        max_batch=4,
        cache_tokens=66 * 16,
    ) as engine:
        yield engine


def golden_prompt(file: str) -> list[int]:
    prompt: list[int] = tiny.golden_cases(PAIR)[file]["prompts"][0]
    return prompt


def start(
    parts: Parts, cache: PagedCache, drafter: Drafter, ids: Sequence[int], number: int, limit: int, chunk: int = 50
) -> Request:
    """A request after its prefill, with its first token."""
    request = Request(number, tuple(ids), limit)
    cache.open(number)
    drafter.open(number)
    logits = prefill(number, ids, model=parts.model, cache=cache, drafter=drafter, chunk=chunk, device=tiny.CPU)
    request.commit([int(logits.argmax())])
    return request


# -------------------------------------------------------------------------------------------------------- many requests


class Greedy(AcceptanceRule):
    """What the target itself would emit, written once more."""

    lossless = True

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        own = target.logits.argmax(-1).tolist()
        agreed = 0
        while agreed < len(proposal.tokens) and own[agreed] == proposal.tokens[agreed]:
            agreed += 1
        return Verdict(agreed, own[agreed])

    def law(self) -> str:
        return "argmax"


@pytest.mark.parametrize("method", METHODS)
def test_three_requests_at_once_equal_each_alone(parts: Parts, method: str) -> None:
    """Of different lengths and limits, so that they end in different rounds; one joins late."""
    prompts = [golden_prompt(file) for file in ("len0023", "len0200", "len0072")]
    limits = (9, 32, 20)

    alone: list[Request] = []
    for i, (ids, limit) in enumerate(zip(prompts, limits, strict=True)):
        cache, drafts = parts.caches()
        drafter = parts.drafter(drafts, method)
        request = start(parts, cache, drafter, ids, i, limit)
        loop = Rounds(parts.model, cache, drafter, Greedy(), device=tiny.CPU)
        while not request.done:
            loop.round([request])
        alone.append(request)

    cache, drafts = parts.caches()
    drafter = parts.drafter(drafts, method)
    loop = Rounds(parts.model, cache, drafter, Greedy(), device=tiny.CPU)
    together = [start(parts, cache, drafter, prompts[i], i, limits[i]) for i in (0, 1)]
    count = 0
    while not all(request.done for request in together):
        live = [request for request in together if not request.done]
        before = [len(request.rounds) for request in live]
        rounds = loop.round(live)
        assert [r.rounds[-1] for r in live] == rounds and [len(r.rounds) for r in live] == [b + 1 for b in before]
        count += 1
        if count == 1:
            together.append(start(parts, cache, drafter, prompts[2], 2, limits[2], chunk=16))
    for mine, other in zip(together, alone, strict=True):
        assert mine.output == other.output and mine.rounds == other.rounds
        assert mine.finish_reason == other.finish_reason == "length"
    assert len({len(request.rounds) for request in together}) > 1
    for i, request in enumerate(together):
        assert cache.tables.length(i) == request.anchor_pos
        cache.close(i)
        drafter.close(i)
    assert cache.tables.allocator.free_pages == drafts.tables.allocator.free_pages == 96


def test_a_request_with_one_token_left_drafts_nothing_beside_one_that_drafts(parts: Parts) -> None:
    cache, drafts = parts.caches()
    drafter = parts.drafter(drafts, "fold")
    requests = [
        start(parts, cache, drafter, golden_prompt("len0023"), 0, 2),
        start(parts, cache, drafter, golden_prompt("len0072"), 1, 30),
    ]
    first, second = Rounds(parts.model, cache, drafter, Greedy(), device=tiny.CPU).round(requests)
    assert first.drafted == () and first.accepted == 0 and len(first.committed) == 1 and requests[0].done
    assert len(second.drafted) == 5 and not requests[1].done


# ------------------------------------------------------------------------------------------------- every accepted count


class Scripted(AcceptanceRule):
    """Accepts as many drafts as the script says, right or wrong, and follows them with an id of its own."""

    lossless = False

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        return Verdict(self.counts.pop(0), (7 * len(self.counts) + 11) % 500)

    def law(self) -> str:
        return "the script"


class Wild(DFlash):
    """Drafts other ids than the network's, so that what was drafted and what is right never agree by luck."""

    def propose(self, *arguments: Any) -> list[Proposal]:
        proposals = super().propose(*arguments)
        return [PointMass(tuple((id * 3 + i + 1) % 500 for i, id in enumerate(p.tokens))) for p in proposals]


def held(cache: PagedCache, layer: int, request: int) -> list[torch.Tensor]:
    return [tiny.dense(entries) for entries in cache.entries(layer, request)]


def drafter_held(cache: DraftCache, layer: int, request: int) -> dict[str, torch.Tensor]:
    """Every copy that the request keeps, of the entries that its method may still read."""
    n, layout = cache.length(request), cache.layout(request, layer)
    copies = {"values": cache.values(layer, request, 0, n)}
    if layout.rotated or layout.ring:
        reach = n if layout.rotated else min(n, layout.ring - 6)  # but for a block, which scratch rows run over
        copies["rotated"] = cache.keys(layer, request, n - reach, n, rotated=True)
    if layout.unrotated:
        copies["unrotated"] = cache.keys(layer, request, 0, n, rotated=False)
    return {name: tiny.dense(entries) for name, entries in copies.items()}


SCRIPT = [0, 5, 1, 4, 2, 3, 5, 5, 0, 0, 3, 1]  # all of 0 .. B-1, after each other in many orders


@pytest.mark.parametrize("length", [1, 14, 15, 16, 23, 24, 25, 30, 72])
@pytest.mark.parametrize("method", METHODS)
def test_after_every_accepted_count_the_caches_are_those_of_a_fresh_prefill(
    parts: Parts, method: str, length: int
) -> None:
    """Target and drafter, entry by entry, and then the drafts that follow from them."""
    cache, drafts = parts.caches()
    plain = parts.drafter(drafts, method)
    drafter = Wild(parts.network, parts.model, plain._reader)
    request = start(parts, cache, drafter, tiny.prompt(length, 500, seed=3), 0, 1000, chunk=7)
    loop = Rounds(parts.model, cache, drafter, Scripted(SCRIPT), device=tiny.CPU)
    for accepted in SCRIPT:
        (round_,) = loop.round([request])
        assert round_.accepted == accepted and len(round_.committed) == accepted + 1
        committed = [*request.prompt, *request.output]
        n = len(committed) - 1
        assert cache.tables.length(0) == drafts.length(0) == n == request.anchor_pos

        fresh_cache, fresh_drafts = parts.caches()
        fresh = parts.drafter(fresh_drafts, method)
        start(parts, fresh_cache, fresh, committed[:-1], 0, 1000)
        for layer in range(parts.model.layer_count):
            for found, wanted in zip(held(cache, layer, 0), held(fresh_cache, layer, 0), strict=True):
                torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
        for layer in range(2):
            found, wanted = (drafter_held(x, layer, 0) for x in (drafts, fresh_drafts))
            assert found.keys() == wanted.keys()
            for name in found:
                torch.testing.assert_close(found[name], wanted[name], atol=5e-5, rtol=1e-4)
        found, wanted = (draft_logits(x, n, committed[-1]) for x in (plain, fresh))
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)


def draft_logits(drafter: DFlash, n: int, anchor: int) -> torch.Tensor:
    """The logits of a block drafted now; nothing of it stays."""
    seen: list[torch.Tensor] = []

    def watched(logits: torch.Tensor) -> list[int]:
        seen.append(logits)
        return greedy(logits)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr("foldspec.drafters.dflash.greedy", watched)
        drafter.propose(Rows.of([0], [n], [1]), [anchor], [5], [Noise(0)])
    return seen[0]


# ------------------------------------------------------------------------------------------------------------- prefixes


def same(found: Completion, wanted: Completion) -> None:
    assert found.token_ids == wanted.token_ids and found.rounds == wanted.rounds
    assert found.finish_reason == wanted.finish_reason and found.prompt_ids == wanted.prompt_ids


LENGTHS = [1, 15, 16, 17, 23, 24, 25, 30, 49, 50, 51, 72, 200]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_restored_prefill_equals_a_fresh_one_for_every_method(engine: Engine, length: int) -> None:
    """One prefill serves all methods, again and again, in any order."""
    prompt = golden_prompt("len0400")[:length]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engines = {name: engine.using(**options) for name, options in METHODS.items()}
    engines["plain"] = engine.using(draft_tokens=0)
    engines["fold 9"] = engine.using(context="fold", window=9, alpha=4.0)
    fresh = {name: each.generate(prompt, params) for name, each in engines.items()}
    forget(engine)
    with engine.prefill(prompt) as prefix:
        for name in (*engines, *reversed(engines)):
            same(engines[name].generate(prefix, params), fresh[name])
        assert prefix.token_ids == tuple(prompt)
    assert_free(engine)


def test_two_requests_from_one_prefix_at_the_same_time(engine: Engine) -> None:
    """Interleaved round by round, with the prefix closed meanwhile: shared pages live on."""
    prompt, params = golden_prompt("len0072"), SamplingParams(max_tokens=24, ignore_eos=True)
    engines = [engine.using(**METHODS[name]) for name in ("fold", "window")]
    fresh = [each.generate(prompt, params) for each in engines]
    forget(engine)
    prefix = engine.prefill(prompt)
    streams = [each.stream(prefix, params) for each in engines]
    for stream in streams:
        next(stream)
        next(stream)
    prefix.close()
    live = list(streams)
    while live:
        live = [stream for stream in live if next(stream, None) is not None]
    for stream, wanted in zip(streams, fresh, strict=True):
        same(stream.completion, wanted)
    assert_free(engine)


def test_a_closed_or_foreign_prefix_is_refused(engine: Engine) -> None:
    prefix = engine.prefill([5, 6, 7])
    prefix.close()
    prefix.close()
    with pytest.raises(UsageError, match="this prefix is closed or belongs to other weights"):
        engine.generate(prefix)
    with tiny.load_pair(PAIR) as other, other.prefill([5, 6, 7]) as foreign:
        with pytest.raises(UsageError, match="belongs to other weights"):
            engine.generate(foreign)
        assert other.generate(foreign, SamplingParams(max_tokens=3)).token_ids


# ------------------------------------------------------------------------------------------------- pages that come back


def pools(engine: Engine) -> tuple[PagedCache, DraftCache]:
    resources = engine._resources
    assert resources._draft_cache is not None
    return resources.cache, resources._draft_cache


def forget(engine: Engine) -> None:
    """NaN in every slot: the same pages come round again, and what an earlier request left there must not do."""
    cache, drafts = pools(engine)
    for pool in (
        *cache.tensors,
        *drafts.arrays,
        *(x for _, x in drafts._rings.values()),
    ):
        pool.fill_(torch.nan)


def assert_free(engine: Engine) -> None:
    """No page has an owner, no ring and no table is held."""
    for cache in pools(engine):
        assert cache.tables.allocator.free_pages == len(cache.tables.allocator._owners)
        assert cache.tables._tables == {}
    assert pools(engine)[1]._layouts == {}
    assert all(rings._ring == {} for rings, _ in pools(engine)[1]._rings.values())


class Broken(Exception):
    pass


def broken(*_: Any) -> Any:
    raise Broken


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "in the drafter": lambda patch: patch.setattr(DFlash, "propose", broken),
    "in absorbing": lambda patch: patch.setattr(DFlash, "absorb", broken),
    "in opening the drafter": lambda patch: patch.setattr(DFlash, "open", broken),
    "in the rule": lambda patch: patch.setattr("foldspec.acceptance.exact.Exact.decide", broken),
    "in the target": lambda patch: patch.setattr("foldspec.models.llama.Llama.forward", broken),
    "in the kernel": lambda patch: patch.setattr("foldspec.kernels.dispatch.Kernels.multi_read_attention", broken),
    "in the draft cache, half open": lambda patch: patch.setattr("foldspec.cache.pages.Rings.open", broken),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_pages_come_back_after_an_exception(engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    fold = engine.using(**METHODS["fold"])
    prompt, params = golden_prompt("len0072"), SamplingParams(max_tokens=8, ignore_eos=True)
    wanted = fold.generate(prompt, params)
    with monkeypatch.context() as patch:
        FAULTS[fault](patch)
        with pytest.raises(Broken):
            fold.generate(prompt, params)
    assert_free(engine)
    same(fold.generate(prompt, params), wanted)


@pytest.mark.parametrize("fault", ["in absorbing", "in the target", "in the kernel"])
def test_pages_come_back_after_a_prefill_that_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with monkeypatch.context() as patch:
        FAULTS[fault](patch)
        with pytest.raises(Broken):
            engine.prefill(golden_prompt("len0072"))
    assert_free(engine)


@pytest.mark.parametrize("fault", ["in the drafter", "in the draft cache, half open"])
def test_a_prefix_survives_a_request_that_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    fold = engine.using(**METHODS["fold"])
    prompt, params = golden_prompt("len0072"), SamplingParams(max_tokens=8, ignore_eos=True)
    wanted = fold.generate(prompt, params)
    with engine.prefill(prompt) as prefix:
        with monkeypatch.context() as patch:
            FAULTS[fault](patch)
            with pytest.raises(Broken):
                fold.generate(prefix, params)
        same(fold.generate(prefix, params), wanted)
    assert_free(engine)


@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_pages_come_back_when_a_request_is_cancelled(engine: Engine, pieces: int) -> None:
    fold = engine.using(**METHODS["fold"])
    wanted = fold.generate(golden_prompt("len0072"), SamplingParams(max_tokens=20, ignore_eos=True))
    stream = fold.stream(golden_prompt("len0072"), SamplingParams(max_tokens=20, ignore_eos=True))
    ids = [token for _ in range(pieces) for token in next(stream).token_ids]
    stream.close()
    done = stream.completion
    assert done.finish_reason == "cancelled" and list(done.token_ids) == ids == list(wanted.token_ids[: len(ids)])
    assert next(stream, None) is None and done.finish_reason == "cancelled"
    assert_free(engine)


def test_pages_come_back_after_ctrl_c_in_the_prefill() -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "prefill" and done > 100:
            raise KeyboardInterrupt

    folder = tiny.PAIRS / PAIR
    with Engine.load(
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        progress=progress,
        prefill_chunk=30,
        context="fold",
        window=WINDOW,
    ) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(golden_prompt("len0200"))
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(golden_prompt("len0200"))
        assert_free(engine)
        assert engine.generate(golden_prompt("len0072"), SamplingParams(max_tokens=2)).token_ids


def test_a_pool_that_is_full_says_so_and_recovers(engine: Engine) -> None:
    """Prefixes that fill both pools: the next request is refused, and runs once one of them is closed."""
    long, params = golden_prompt("len0400"), SamplingParams(max_tokens=30, ignore_eos=True)
    fold = engine.using(**METHODS["fold"])
    prompts = [[*long, *([9] * extra)] for extra in (100, 99)]
    prefixes = [engine.prefill(prompt) for prompt in prompts]
    try:
        with pytest.raises(ResourceError, match="cache pages needed"):
            fold.generate(long, params)
        pinned = [cache.tables.allocator.free_pages for cache in pools(engine)]
        with pytest.raises(FoldspecError):
            fold.generate(long[:200], params)
        assert [cache.tables.allocator.free_pages for cache in pools(engine)] == pinned
        prefixes[0].close()
        assert fold.generate(long[:200], params).token_ids
    finally:
        for prefix in prefixes:
            prefix.close()
    assert_free(engine)


def test_more_streams_at_once_than_the_batch_holds(engine: Engine) -> None:
    """The fifth waits for a place, and asking for it moves the others on; another engine's has no ring to wait for."""
    fold = engine.using(**METHODS["fold"])
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    wanted = fold.generate(golden_prompt("len0025"), params)
    streams = [fold.stream(golden_prompt("len0025"), params) for _ in range(5)]
    for stream in streams[:4]:
        next(stream)
    with pytest.raises(ResourceError, match="no window ring is free"):
        next(engine.using(**METHODS["fold"]).stream(golden_prompt("len0025"), params))
    assert next(streams[4]).token_ids == wanted.token_ids[:1]
    assert streams[0].over and not streams[4].over
    for stream in streams:
        same(stream.finish(), wanted)
    assert_free(engine)


@pytest.mark.parametrize("count", [0, 1, 2, 6, 7])
def test_short_limits(engine: Engine, count: int) -> None:
    """0 gives an empty completion; the last round never drafts more than the limit can use."""
    fold = engine.using(**METHODS["fold"])
    prompt = golden_prompt("len0072")
    wanted = fold.generate(prompt, SamplingParams(max_tokens=32, ignore_eos=True))
    done = fold.generate(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
    assert done.token_ids == wanted.token_ids[:count] and done.finish_reason == "length"
    assert sum(len(r.committed) for r in done.rounds) == max(0, count - 1)
    for r in done.rounds:
        used = r.anchor_pos - len(prompt) + 1
        assert len(r.drafted) <= count - used - 1
    assert_free(engine)


def test_generation_ends_where_the_context_ends(engine: Engine) -> None:
    prompt = golden_prompt("len0400")
    done = engine.using(**METHODS["fold"]).generate(prompt, SamplingParams(max_tokens=500, ignore_eos=True))
    assert done.finish_reason == "length" and len(prompt) + len(done.token_ids) == 512
    with pytest.raises(UsageError, match="has 512 tokens, the context holds 512"):
        engine.generate([7] * 512)
    assert_free(engine)
