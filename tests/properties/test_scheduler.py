"""Many requests: ids and rounds are those of each alone, whoever runs beside it, joins, leaves or takes its pages; all
pages come back; nobody overtakes and nobody waits for more than a chunk."""

from __future__ import annotations

import gc
import json
import random
import shutil
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equality
import pytest
import tiny
import torch

from foldspec import Completion, Engine, SamplingParams
from foldspec.errors import CheckpointError, ResourceError, UsageError
from foldspec.models.llama import Llama
from foldspec.schedule.scheduler import Scheduler, Step

WINDOW = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained pair of the goldens, for contexts of 4,096 tokens."""
    folder = tmp_path_factory.mktemp("pair")
    for side in ("target", "drafter"):
        shutil.copytree(tiny.PAIRS / "a_llama_zlab" / side, folder / side)
        config = folder / side / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4096}))
    return folder


def load(pair: Path, **options: Any) -> Engine:
    """Small pages and chunks: every edge is near."""
    options = {"page_size": 16, "prefill_chunk": 200, "prefill_budget": 24, "context": "fold", **options}
    return Engine.load(
        target=str(pair / "target"), drafter=str(pair / "drafter"), window=WINDOW, device="cpu", debug=True, **options
    )


@pytest.fixture(scope="module")
def engine(pair: Path) -> Iterator[Engine]:
    with load(pair, max_context=1024) as engine:
        yield engine


def assert_free(engine: Engine) -> None:
    resources = engine.resources
    assert resources._draft_cache is not None
    for tables in (resources.cache.tables, resources._draft_cache.tables):
        assert tables.allocator.free_pages == tables.allocator.pages and tables._tables == {}
    assert all(rings._ring == {} for rings, _ in resources._draft_cache._rings.values())
    assert engine.scheduler.idle


def same(found: Completion, wanted: Completion) -> None:
    """The same request, and its rounds: the drafter too sees nothing of its neighbours."""
    assert found.error is None and found.prompt_ids == wanted.prompt_ids
    assert found.token_ids == wanted.token_ids and found.text == wanted.text
    assert found.finish_reason == wanted.finish_reason
    assert found.rounds == wanted.rounds
    assert sum(len(r.committed) for r in found.rounds) == len(found.token_ids) - 1
    assert len(found.times) == len(found.rounds) + 1 and found.times == sorted(found.times)


def mixed(count: int, longest: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of 3 to ``longest`` tokens, most of them short; some repeat themselves, so that drafts are accepted."""
    draw = random.Random(seed)
    prompts = []
    for i in range(count):
        length = (
            longest if i == count // 3 else 3 if i == count // 2 else min(longest, int(3 * 2 ** draw.uniform(0, 8)))
        )
        prompts.append(tuple(draw.randrange(4, 500) for _ in range(length)))
    return prompts


# ------------------------------------------------------------------------------------------- together equals alone


@pytest.fixture(scope="module")
def requests(pair: Path) -> tuple[list[tuple[int, ...]], list[SamplingParams], list[Completion]]:
    """64 requests of 3 to 4,000 tokens with limits and stops of their own, and each one's completion alone; which is
    plain decoding's."""
    prompts = mixed(64, 4000, seed=0)
    draw = random.Random(1)
    params = [SamplingParams(max_tokens=draw.choice((1, 2, 9, 60, 90)), ignore_eos=i % 3 > 0) for i in range(64)]
    with load(pair, max_batch=1, prefill_chunk=1000) as engine:
        plain = engine.using(draft_tokens=0)
        first = [plain.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        for i in range(0, 64, 4):  # every fourth stops where plain decoding gets to
            ids = first[i].token_ids
            params[i] = SamplingParams(max_tokens=90, stop_ids=(ids[len(ids) // 2],), ignore_eos=True)
        alone = [engine.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            assert alone[i].token_ids == (first[i] if i % 4 else plain.generate(prompt, own)).token_ids
        assert_free(engine)
    assert {done.finish_reason for done in alone} == {"stop", "length"}
    assert sum(r.accepted > 0 for done in alone for r in done.rounds) > 20
    return prompts, params, alone


@pytest.mark.parametrize(("batch", "budget", "chunk"), [(2, 24, 200), (7, 150, 200), (64, 2000, 2000)])
def test_64_mixed_requests_equal_each_alone(pair: Path, requests: Any, batch: int, budget: int, chunk: int) -> None:
    prompts, params, alone = requests
    with load(pair, max_batch=batch, prefill_budget=budget, prefill_chunk=chunk) as engine:
        steps: list[Step] = []
        engine.scheduler.watch = steps.append
        for found, wanted in zip(engine.generate(prompts, params), alone, strict=True):
            same(found, wanted)
        assert_free(engine)
    assert max(step.decoded for step in steps) > batch // 2
    assert all(step.prefilled <= (budget if step.decoded else chunk) for step in steps)
    assert any(step.decoded and step.prefilled for step in steps)


@pytest.mark.parametrize("seed", [0, 1])
def test_mixed_requests_that_take_pages_from_each_other(pair: Path, requests: Any, seed: int) -> None:
    """All but the longest, in a cache that hardly holds the second longest."""
    prompts, params, alone = requests
    order = [i for i in range(64) if len(prompts[i]) < 1000]
    assert len(order) == 63
    random.Random(seed).shuffle(order)
    order.sort(key=lambda i: len(alone[i].token_ids) < 60)  # those that grow most are together
    with load(pair, max_batch=32, cache_tokens=880, max_context=880, prefill_budget=880, prefill_chunk=880) as engine:
        done = engine.generate([prompts[i] for i in order], [params[i] for i in order])
        for found, i in zip(done, order, strict=True):
            same(found, alone[i])
        assert engine.scheduler.preempted > 2
        assert_free(engine)


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param({"accept": "exact"}, marks=pytest.mark.slow),
        {"accept": "exact", "draft_temperature": 0.9},
        pytest.param({"accept": "match"}, marks=pytest.mark.slow),
        pytest.param({"accept": "match", "draft_temperature": 0.8, "draft_noise": "shared"}, marks=pytest.mark.slow),
    ],
)
def test_a_seed_gives_one_text_alone_batched_preempted_and_streamed(pair: Path, drafts: dict[str, Any]) -> None:
    prompts = mixed(16, 150, seed=3)
    params = [
        SamplingParams(max_tokens=70, ignore_eos=True, temperature=1.5, top_p=0.95, frequency_penalty=0.2, seed=i % 5)
        for i in range(16)
    ]
    with load(pair, max_batch=1, **drafts) as engine:
        alone = [engine.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        streamed = [list(engine.stream(prompt, own)) for prompt, own in zip(prompts, params, strict=True)]
    greedy = load(pair, max_batch=1).generate(prompts, SamplingParams(max_tokens=70, ignore_eos=True))
    assert all(one.token_ids != other.token_ids for one, other in zip(alone, greedy, strict=True)), "nothing is drawn"
    for pieces, wanted in zip(streamed, alone, strict=True):
        assert tuple(token for piece in pieces for token in piece.token_ids) == wanted.token_ids
    with load(pair, max_batch=7, **drafts) as engine:
        for found, wanted in zip(engine.generate(prompts, params), alone, strict=True):
            same(found, wanted)
    with load(pair, max_batch=16, cache_tokens=480, max_context=480, prefill_budget=480, **drafts) as engine:
        for found, wanted in zip(engine.generate(prompts, params), alone, strict=True):
            same(found, wanted)
        assert engine.scheduler.preempted > 2
        assert_free(engine)


def test_the_longest_gives_up_its_pages_and_is_prefilled_again(pair: Path, requests: Any) -> None:
    prompts, params, alone = requests
    order = [i for i in range(64) if len(prompts[i]) < 60 and len(alone[i].token_ids) >= 60][:4]
    assert len(order) == 4
    few = 4000 + sum(len(prompts[i]) + 50 for i in order)
    order += [i for i in range(64) if len(prompts[i]) == 4000]
    with load(pair, cache_tokens=few) as engine:
        done = engine.generate([prompts[i] for i in order], [params[i] for i in order])
        for found, i in zip(done, order, strict=True):
            same(found, alone[i])
        assert engine.scheduler.preempted > 0
        assert_free(engine)


def test_64_mixed_requests_that_join_and_leave(pair: Path, requests: Any) -> None:
    """Streams of two methods over the same pools, opened, read and thrown away at random."""
    prompts, params, alone = requests
    draw = random.Random(2)
    left = list(range(64))
    draw.shuffle(left)
    with load(pair, max_batch=7) as fold:
        engines = [fold, fold.using(drafter="lookup")]
        streams: dict[int, Any] = {}
        cancelled = 0
        while left or streams:
            if left and (not streams or draw.random() < 0.3):
                streams[left[-1]] = draw.choice(engines).stream(prompts[left[-1]], params[left[-1]])
                left.pop()
            i = draw.choice(list(streams))
            if draw.random() < 0.04:
                stream = streams.pop(i)
                stream.close()
                cancelled += stream.completion.finish_reason == "cancelled"
                assert stream.completion.token_ids == alone[i].token_ids[: len(stream.completion.token_ids)]
            elif next(streams[i], None) is None:
                done = streams.pop(i).completion
                assert done.token_ids == alone[i].token_ids and done.finish_reason == alone[i].finish_reason
        assert cancelled > 3
        assert_free(fold)


def test_many_requests_from_one_prefix(engine: Engine) -> None:
    """Full pages shared, first tokens from its logits; one that begins after the prefix is closed prefills."""
    prompt = mixed(1, 330, seed=5)[0]
    limits = [1, 2, 30, 17, 8, 30, 30, 5, 30, 12]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in limits]
    alone = [engine.generate(prompt, own) for own in params]
    with engine.prefill(prompt) as prefix:
        streams = [engine.stream(prefix, own) for own in params]
        for stream in streams[:-1]:
            stream.submit()
        while sum(stream.over for stream in streams) < 2:
            engine.scheduler.step()
    for stream, wanted in zip(streams, alone, strict=True):
        same(stream.finish(), wanted)
    assert_free(engine)


def test_the_same_prompt_many_times(engine: Engine) -> None:
    """Nothing that one request leaves in drafter or caches reaches the next (same tau, A B A)."""
    a, b = mixed(2, 200, seed=6)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first, other = engine.generate(a, params), engine.generate(b, params)
    for _ in range(2):
        for found, wanted in zip(
            engine.generate([a, b, a, a, b], params), (first, other, first, first, other), strict=True
        ):
            same(found, wanted)
            assert found.tau == wanted.tau


@pytest.mark.parametrize("length", [16, 32, 1021, 1022, 1023])
def test_prompts_that_end_with_a_page_or_near_the_end_of_the_context(engine: Engine, length: int) -> None:
    """Read by the request, and kept whole beforehand: then there is nothing left to prefill."""
    prompt, params = mixed(1, length, seed=7)[0], SamplingParams(max_tokens=9, ignore_eos=True)
    done = engine.generate([prompt, prompt[:8]], params)
    assert len(done[0].token_ids) == min(9, 1024 - length) and len(done[1].token_ids) == 9
    assert done[0].token_ids == engine.using(draft_tokens=0).generate(prompt, params).token_ids
    with engine.prefill(prompt) as prefix:
        for found in engine.generate([prefix, prefix], params):
            same(found, done[0])
    assert_free(engine)


# --------------------------------------------------------------------------------------------------- who waits for whom


def test_nobody_waits_for_a_long_prompt(engine: Engine) -> None:
    """While 900 tokens are prefilled, every running request gets its round in each step."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    short = [engine.stream(prompt, params) for prompt in mixed(3, 20, seed=8)]
    for stream in short:
        next(stream)
    long = engine.stream(mixed(1, 900, seed=9)[0], SamplingParams(max_tokens=2))
    long.submit()
    steps = 0
    while not long.ready:
        before = [len(stream._job.news) for stream in short]
        step = engine.scheduler.step()
        assert step.decoded == 3 and 0 < step.prefilled <= 24
        assert [len(stream._job.news) for stream in short] == [n + 1 for n in before]
        steps += 1
    assert steps == -(-900 // 24)
    for stream in (*short, long):
        stream.close()
    assert_free(engine)


def test_first_come_first_served(pair: Path) -> None:
    """Nobody overtakes, small as they may be, and who gave up its pages is the first to get some again."""
    with load(pair, max_batch=3, cache_tokens=16 * 12, max_context=160) as engine:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        streams = [engine.stream(list(range(5, 5 + n)), params) for n in (60, 50, 70, 4, 4)]
        for stream in streams:
            stream.submit()
        began: list[int] = []
        while not all(stream.over for stream in streams):
            waiting = [job.request.id for job in engine.scheduler._waiting]
            assert waiting == sorted(waiting)
            engine.scheduler.step()
            began += [i for i, stream in enumerate(streams) if stream.ready and i not in began]
        assert began == [0, 1, 2, 3, 4]
        assert engine.scheduler.preempted > 0 and streams[0]._job is not None and streams[0]._job.preempted == 0
        assert_free(engine)


def test_a_request_too_large_for_the_cache_is_refused_at_once(pair: Path) -> None:
    with load(pair, cache_tokens=16 * 10, max_context=1024) as engine:
        says = "request: 100 tokens and 70 of output need 169 cache entries, there are 160; lower --max-tokens or raise"
        with pytest.raises(ResourceError, match=says):
            engine.stream([5] * 100, SamplingParams(max_tokens=70))
        done = engine.generate(
            [[5, 6], [5] * 100, [], [7, 10**6], [5, 6]], SamplingParams(max_tokens=70, ignore_eos=True)
        )
        assert [c.finish_reason for c in done] == ["length", "error", "error", "error", "length"]
        assert [type(c.error) for c in done[1:4]] == [ResourceError, UsageError, UsageError]
        assert done[0].token_ids == done[4].token_ids and len(done[0].token_ids) == 70
        assert len(engine.generate([5] * 90, SamplingParams(max_tokens=70, ignore_eos=True)).token_ids) == 70
        assert_free(engine)


def test_a_minimum_of_tokens_where_every_id_would_end_the_text(engine: Engine) -> None:
    every = SamplingParams(min_tokens=1, stop_ids=tuple(range(engine.vocabulary)))
    with pytest.raises(UsageError, match="min_tokens: every id is a stop id"):
        engine.generate([7, 8, 9], every)


def test_a_lone_request_that_finds_no_pages_fails_and_the_next_goes_on(pair: Path) -> None:
    """A kept prefix holds pages that no waiting will free."""
    with load(pair, cache_tokens=16 * 12, max_context=160) as engine:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        with engine.prefill([9] * 100):
            done = engine.generate([[5] * 100, [5] * 20], params)
            assert [c.finish_reason for c in done] == ["error", "length"]
            with pytest.raises(ResourceError, match="cache pages needed"):
                engine.generate([5] * 100, params)
            # one that begins well and then finds no more
            grown = engine.generate([[5] * 20, [5] * 3], SamplingParams(max_tokens=100, ignore_eos=True))
            assert [c.finish_reason for c in grown] == ["error", "error"] or engine.scheduler.preempted
        assert len(engine.generate([5] * 100, params).token_ids) == 10
        assert_free(engine)


# ------------------------------------------------------------------------------------------------------------ guards


def poisoned(monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """The target's embedding of one id is NaN."""
    embed = Llama.embed

    def broken(self: Llama, ids: torch.Tensor) -> torch.Tensor:
        return embed(self, ids).masked_fill((ids == token)[:, None], torch.nan)

    monkeypatch.setattr(Llama, "embed", broken)


def test_logits_that_are_not_finite_end_one_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prompt, and in the middle of the output; the others neither end nor change."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = mixed(6, 150, seed=10)
    whole = engine.generate(prompts, params)
    poison = next(i for i in range(4, 500) if all(i not in (*done.prompt_ids, *done.token_ids) for done in whole))
    failed = engine.scheduler.failed
    with monkeypatch.context() as patch:
        poisoned(patch, poison)
        bad = (*prompts[0][:50], poison, 9)
        done = engine.generate([*prompts[:3], bad, *prompts[3:]], params)
        wrong = done.pop(3)
        assert wrong.finish_reason == "error" and wrong.token_ids == () and isinstance(wrong.error, CheckpointError)
        assert f"position {len(bad) - 1}: the target's logits are not finite" in str(wrong.error)
        assert str(wrong.error).startswith("request ")
        for found, wanted in zip(done, whole, strict=True):
            same(found, wanted)
        with pytest.raises(CheckpointError, match="not finite"):
            engine.generate(bad, params)
    assert engine.scheduler.failed == failed + 2
    # the middle of the output: the third token that a request emits
    victim = next(i for i, done in enumerate(whole) if done.token_ids[2] not in done.token_ids[:2])
    token = whole[victim].token_ids[2]
    others = [i for i, done in enumerate(whole) if token not in (*done.token_ids, *done.prompt_ids)]
    assert others
    with monkeypatch.context() as patch:
        poisoned(patch, token)
        for each in (engine, engine.using(draft_tokens=0)):  # a draft that is not accepted may be anything
            done = each.generate([prompts[i] for i in (victim, *others)], params)
            assert done[0].finish_reason == "error" and done[0].token_ids == whole[victim].token_ids[:3]
            assert sum(len(r.committed) for r in done[0].rounds) == 2
            for found, i in zip(done[1:], others, strict=True):
                assert found.token_ids == whole[i].token_ids and found.finish_reason == "length"
    assert_free(engine)


def test_the_checks_of_debug_mode_notice(engine: Engine) -> None:
    """A page that is lost, and a request whose entries are not its tokens."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    stream = engine.stream(list(range(5, 50)), params)
    next(stream)
    allocator = engine.resources.cache.tables.allocator
    (page,) = allocator.allocate(1)
    with pytest.raises(AssertionError, match="pages are owned by no table"):
        next(stream)
    allocator.free([page])
    stream.close()
    stream = engine.stream(list(range(5, 50)), params)
    next(stream)
    assert stream._job is not None
    stream._job.filled -= 1
    with pytest.raises(AssertionError):
        next(stream)
    stream.close()
    assert_free(engine)


# ------------------------------------------------------------------------------------------------------ the books


def test_500_requests_leave_nothing_and_count_what_they_deliver(pair: Path) -> None:
    """Random prompts, limits, stops, order and cancellations over a cache that is too small for them."""
    draw = random.Random(11)
    prompts = mixed(40, 90, seed=12)
    with load(pair, max_batch=6, cache_tokens=16 * 14, max_context=160, prefill_chunk=40, prefill_budget=16) as engine:
        alone = [engine.generate(p, SamplingParams(max_tokens=60, ignore_eos=True)) for p in prompts]
        open_: list[tuple[int, SamplingParams, Any]] = []
        reasons: dict[str, int] = {}
        begun = 0
        while begun < 500 or open_:
            if begun < 500 and len(open_) < 12:
                which = draw.randrange(40)
                stops = (draw.choice(alone[which].token_ids),) if draw.random() < 0.3 else ()
                params = SamplingParams(max_tokens=draw.choice((0, 1, 2, 7, 20, 60)), stop_ids=stops, ignore_eos=True)
                open_.append((which, params, engine.stream(prompts[which], params)))
                begun += 1
                if draw.random() < 0.8:
                    open_[-1][2].submit()
            place = draw.randrange(len(open_))
            which, params, stream = open_[place]
            act = draw.random()
            if act < 0.05:
                stream.close()
            elif act < 0.9:
                next(stream, None)
            else:
                stream.finish()
            if not stream.completion.finish_reason:
                continue
            del open_[place]
            done, whole = stream.completion, alone[which].token_ids
            reasons[done.finish_reason] = reasons.get(done.finish_reason, 0) + 1
            cut = next((i + 1 for i, t in enumerate(whole) if t in params.stop_ids), 61)
            wanted = whole[: min(cut, params.max_tokens)]
            if done.finish_reason == "cancelled":
                assert done.token_ids == wanted[: len(done.token_ids)] and len(done.token_ids) < max(1, len(wanted))
            else:
                assert done.token_ids == wanted
                assert done.finish_reason == ("stop" if cut <= params.max_tokens else "length")
            assert sum(len(r.committed) for r in done.rounds) == max(0, len(done.token_ids) - 1)
            assert len(done.times) == len(done.rounds) + bool(done.token_ids)
        assert min(reasons[name] for name in ("stop", "length", "cancelled")) > 10, reasons
        assert engine.scheduler.preempted > 10
        assert_free(engine)


def test_a_stream_that_is_thrown_away_frees_its_pages_at_once(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for piece in engine.stream(list(range(5, 60)), params):
        assert piece.token_ids
        break
    assert_free(engine)
    waiting = engine.stream(list(range(5, 60)), params)
    waiting.submit()
    assert not engine.scheduler.idle
    watch = weakref.ref(waiting)
    del waiting
    gc.collect()
    assert watch() is None
    assert_free(engine)
    engine.stream(list(range(5, 60)), params)  # lazy: it was never there
    assert_free(engine)


def test_a_stream_that_is_closed_while_another_engine_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are free when that step is over, though its own engine never steps again; beside a prefill too."""
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    other = engine.using(context="full")
    for busy in (lambda: other.generate([7, 8, 9], SamplingParams(max_tokens=1)), lambda: other.prefill([7]).close()):
        stream = engine.stream(list(range(5, 50)), params)
        next(stream)
        began, go_on = threading.Event(), threading.Event()
        forward = Llama.forward

        def slow(*args: Any, began: Any = began, go_on: Any = go_on, forward: Any = forward) -> Any:
            began.set()
            assert go_on.wait(60)
            return forward(*args)

        with monkeypatch.context() as patch:
            patch.setattr(Llama, "forward", slow)
            thread = threading.Thread(target=busy)
            thread.start()
            assert began.wait(60)
            stream.close()
            go_on.set()
            thread.join()
        assert stream.completion.finish_reason == "cancelled"
        assert_free(engine)


def test_a_prefix_that_is_closed_before_the_request_begins_counts_no_time(engine: Engine) -> None:
    with engine.prefill(list(range(5, 200))) as prefix:
        prefix.seconds = 1000.0
        stream = engine.stream(prefix, SamplingParams(max_tokens=3))
    done = stream.finish()
    assert done.ttft is not None and done.ttft < 500
    assert_free(engine)


def test_completions_come_as_they_complete_and_stop_where_the_reader_stops(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (30, 1, 12)]
    order = [i for i, _ in engine.completions([[5, 6, 7]] * 3, params)]
    assert order == [1, 2, 0]
    for i, _ in engine.completions([[5, 6, 7]] * 3, params):
        assert i == 1
        break
    gc.collect()
    assert_free(engine)
    assert engine.generate([]) == []
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        engine.generate([[5], [6]], params[:1])


def test_a_slow_reader_costs_no_speed(engine: Engine) -> None:
    """The clock runs during steps alone, for all who are in."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    stream = engine.stream(list(range(5, 60)), params)
    begin, busy = time.perf_counter(), engine.scheduler.busy
    for _ in stream:
        time.sleep(0.02)
    done = stream.completion
    assert done.last_time is not None and done.first_time is not None
    assert done.last_time <= engine.scheduler.busy - busy + 1e-9
    assert done.last_time < time.perf_counter() - begin - 0.02 * len(done.times) + 1e-3
    other = engine.stream(list(range(5, 60)), params)
    other.submit()
    first = engine.scheduler.step()
    second = engine.scheduler.step()
    other.finish()
    assert other.completion.times[:2] == pytest.approx([first.seconds, first.seconds + second.seconds])


def test_an_exception_in_a_step_loses_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stepped is told and ends; the others are prefilled again and go on."""
    params = SamplingParams(max_tokens=250, ignore_eos=True)
    prompts = mixed(3, 100, seed=13)
    whole = engine.generate(prompts, params)
    for place in ("_keep", "_propose", "_commit"):
        streams = [engine.stream(prompt, params) for prompt in prompts]
        for stream in streams:
            next(stream)
            next(stream)
        with monkeypatch.context() as patch:
            real = getattr(type(engine._rounds), place)

            def broken(*arguments: Any, real: Any = real, place: str = place) -> Any:
                if place != "_propose":
                    real(*arguments)
                raise KeyboardInterrupt

            patch.setattr(type(engine._rounds), place, broken)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    next(streams[0])
        streams[0].close()
        done = streams[0].completion
        assert done.finish_reason == "cancelled" and done.token_ids == whole[0].token_ids[: len(done.token_ids)]
        for stream, wanted in zip(streams[1:], whole[1:], strict=True):
            same(stream.finish(), wanted)
        assert_free(engine)


# ---------------------------------------------------------------------------------------------------------- soak


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak(engine: Engine, steps: int, prompts: Sequence[tuple[int, ...]], whole: Sequence[Completion]) -> int:
    """Steps with random joins and cancels; what completes is compared. Returns how many of them ran rounds."""
    draw, rounds = random.Random(steps), 0
    streams: list[tuple[int, Any]] = []
    for _ in range(steps):
        while len(streams) < 6 and draw.random() < 0.5:
            which = draw.randrange(len(prompts))
            streams.append((which, engine.stream(prompts[which], SamplingParams(max_tokens=40, ignore_eos=True))))
            streams[-1][1].submit()
        if engine.scheduler.idle:
            continue
        rounds += engine.scheduler.step().decoded > 0
        for entry in list(streams):
            which, stream = entry
            if stream.over or draw.random() < 0.01:
                stream.close()
                ids = stream.completion.token_ids
                assert ids == whole[which].token_ids[: len(ids)]
                streams.remove(entry)
    for _, stream in streams:
        stream.close()
    return rounds


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory where Linux says it")
def test_20000_rounds_leak_nothing_and_drift_nowhere(pair: Path) -> None:
    with load(pair, max_batch=4, cache_tokens=16 * 24, max_context=200, prefill_chunk=40) as engine:
        prompts = mixed(12, 120, seed=14)
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        whole = engine.using(draft_tokens=0).generate(prompts, params)
        soak(engine, 2_000, prompts, whole)
        assert_free(engine)
        gc.collect()
        before, tensors = resident(), sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
        assert soak(engine, 18_000, prompts, whole) > 12_000
        assert_free(engine)
        gc.collect()
        assert sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()) == tensors
        assert resident() <= before * 1.02
        assert engine.scheduler.preempted > 100
        for found, wanted in zip(engine.generate(prompts, params), whole, strict=True):
            assert found.token_ids == wanted.token_ids


@pytest.mark.slow
def test_mixed_requests_of_the_real_pair_equal_each_alone() -> None:
    """Real text: alone, together, and with a cache so small that they take pages from each other. Compiled kernels give
    a row the same bits whatever the rows beside it, so nothing is excused, however prompts are cut."""
    chosen = (("code heapq 10", 60), ("document class 128", 60), ("chat 0", 40), ("chat 13", 40), ("code ast 256", 24))
    chosen += (("code cmd 257", 30), ("code statistics 1500", 8))
    with Engine.load("smollm2-135m", device="cpu", max_context=2048, max_batch=4, debug=True) as engine:
        known = {prompt.name: prompt.ids for prompt in equality.prompts(engine)}
        prompts = [known[name] for name, _ in chosen]
        params = [SamplingParams(max_tokens=limit, ignore_eos=True) for _, limit in chosen]
        plain = engine.using(draft_tokens=0)
        alone = [plain.generate(prompt, own).token_ids for prompt, own in zip(prompts, params, strict=True)]
        assert [done.token_ids for done in engine.generate(prompts, params)] == alone
    few = 16 * (sum(-(-(len(prompt) + 8) // 16) for prompt in prompts[:5]) + 4)  # five begin, and then they grow
    tight: dict[str, Any] = {"page_size": 16, "max_context": 512, "cache_tokens": few, "prefill_budget": 300}
    with Engine.load("smollm2-135m", device="cpu", debug=True, **tight) as small:
        assert [done.token_ids for done in small.generate(prompts[:6], params[:6])] == alone[:6]
        assert small.scheduler.preempted > 0


def test_what_a_scheduler_is_told(engine: Engine) -> None:
    assert isinstance(engine.scheduler, Scheduler)
    settings = engine.settings()
    assert settings["max_batch"] == 8 and settings["prefill_budget"] == 24 and settings["cache_tokens"] is None
