"""Asynchronous streams and threads: the same ids, steps shared under one lock, pages freed wherever a task ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch

from foldspec import Completion, Engine, SamplingParams
from foldspec.errors import ResourceError, UsageError
from foldspec.schedule.scheduler import Step

PAIR = tiny.PAIRS / "a_llama_zlab"
PROMPTS = [[5 + (7 * i + j) % 400 for j in range(20 + 30 * i)] for i in range(5)]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(
        target=str(PAIR / "target"), drafter=str(PAIR / "drafter"), device="cpu", page_size=16, window=24,
        prefill_chunk=40, prefill_budget=16, max_context=512, debug=True,
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module")
def whole(engine: Engine) -> list[Completion]:
    return [engine.generate(prompt, PARAMS) for prompt in PROMPTS]


def assert_free(engine: Engine) -> None:
    engine.resources.worker.submit(int).result()  # a step that nobody waits for any more may still run there
    allocator = engine.resources.cache.tables.allocator
    assert allocator.free_pages == allocator.pages and engine.scheduler.idle


async def read(engine: Engine, prompt: list[int], least: int | None = None) -> list[int]:
    """The ids of a stream, or as many of the first as are asked for."""
    ids: list[int] = []
    async for piece in engine.astream(prompt, PARAMS):
        ids += piece.token_ids
        if least is not None and len(ids) >= least:
            break
    return ids


async def cancelled_after(engine: Engine, count: int) -> None:
    """A task that reads a stream with no end in sight, cancelled when ``count`` pieces have come."""
    enough = asyncio.Event()

    async def endless() -> None:
        came = 0
        async for _ in engine.astream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)):
            came += 1
            if came >= count:
                enough.set()

    task = asyncio.ensure_future(endless())
    if count:
        await enough.wait()
    else:
        await asyncio.sleep(0)  # the task has asked for its first step
    assert task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_streams_at_once_equal_each_alone_and_share_their_steps(engine: Engine, whole: list[Completion]) -> None:
    steps: list[Step] = []
    engine.scheduler.watch = steps.append

    async def run() -> list[list[int]]:
        return await asyncio.gather(*(read(engine, prompt) for prompt in PROMPTS))

    found = asyncio.run(run())
    engine.scheduler.watch = None
    assert found == [list(done.token_ids) for done in whole]
    assert max(step.decoded for step in steps) > 2
    assert_free(engine)


def test_the_event_loop_goes_on_while_steps_run(engine: Engine) -> None:
    """Steps run in one other thread."""
    threads: set[str] = set()
    engine.scheduler.watch = lambda step: threads.add(threading.current_thread().name)
    ticks = 0

    async def run() -> None:
        nonlocal ticks
        reading = asyncio.ensure_future(read(engine, PROMPTS[4]))
        while not reading.done():
            await asyncio.sleep(0)
            ticks += 1

    asyncio.run(run())
    engine.scheduler.watch = None
    assert ticks > 20 and len(threads) == 1 and threads != {threading.current_thread().name}


@pytest.mark.parametrize("way", ["cancel", "break", "leave"])
def test_a_task_that_ends_early_frees_its_pages(engine: Engine, whole: list[Completion], way: str) -> None:
    async def run() -> list[int]:
        others = asyncio.ensure_future(read(engine, PROMPTS[1]))
        if way == "cancel":
            for count in (0, 1, 2, 5):
                await cancelled_after(engine, count)
        elif way == "break":
            assert len(await read(engine, PROMPTS[0], least=3)) < 40
        else:
            stream = engine.astream(PROMPTS[0], PARAMS)
            await anext(stream)
            del stream
            gc.collect()
        return await others

    assert asyncio.run(run()) == list(whole[1].token_ids)
    assert_free(engine)


def test_a_task_that_is_cancelled_in_a_step_frees_its_pages_when_the_step_ends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    within, go_on = threading.Event(), threading.Event()
    real = engine._rounds.step

    def slow(*arguments: Any) -> Any:
        within.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(engine._rounds, "step", slow)

    async def run() -> None:
        task = asyncio.ensure_future(read(engine, PROMPTS[0]))
        while not within.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task  # at once: the loop does not wait for the step
        assert not go_on.is_set()
        go_on.set()

    asyncio.run(run())
    engine.resources.worker.submit(lambda: None).result()
    assert_free(engine)


def test_errors_come_through(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="prompt: is empty"):
        engine.astream([], PARAMS)

    def broken(*_: Any) -> Any:
        raise ResourceError("no more")

    monkeypatch.setattr(engine._rounds, "step", broken)
    with pytest.raises(ResourceError, match="no more"):
        asyncio.run(read(engine, PROMPTS[0]))
    assert_free(engine)


def test_threads_share_one_engine(engine: Engine, whole: list[Completion]) -> None:
    """Plain streams and lists from several threads, beside one that opens and throws away."""
    found: dict[int, Any] = {}

    def run(i: int) -> None:
        if i == 4:
            for _ in range(20):
                next(engine.stream(PROMPTS[4], PARAMS))
        found[i] = (
            [c.token_ids for c in engine.generate([PROMPTS[i]] * 3, PARAMS)]
            if i % 2
            else [engine.stream(PROMPTS[i], PARAMS).finish().token_ids for _ in range(3)]
        )

    threads = [threading.Thread(target=run, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {i: set(ids) for i, ids in found.items()} == {i: {whole[i].token_ids} for i in range(5)}
    assert_free(engine)


def test_the_worker_computes_with_as_many_threads(engine: Engine) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert engine.resources.worker.submit(torch.get_num_threads).result() == 1
    torch.set_num_threads(before)
