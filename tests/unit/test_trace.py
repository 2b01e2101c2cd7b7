"""What the engine lets a bench see: the parts of a round, what a prefix holds, the bytes that a round reads."""

from __future__ import annotations

import time

import pytest
import tiny
import torch

from foldspec import Engine, SamplingParams
from foldspec.schedule.trace import PARTS, Stopwatch, waiting

PROMPT = [5 + i % 400 for i in range(90)]
GO_ON = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny.load_pair("a_llama_zlab")


def test_a_stopwatch_gives_time_to_the_part_that_ends() -> None:
    times = iter([0.0, 1.0, 3.0, 3.5, 10.0, 12.0])
    watch = Stopwatch(lambda: next(times))
    for part in ("host", "draft", "host"):
        watch(part)
    assert watch.seconds == {"draft": 2.0, "verify": 0.0, "accept": 0.0, "host": 1.5}
    watch.start()
    watch("verify")
    assert watch.seconds == {"draft": 0.0, "verify": 2.0, "accept": 0.0, "host": 0.0}
    assert set(watch.seconds) == set(PARTS)


def test_a_clock_waits_for_what_a_gpu_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the drafter's part of prefill would be the time that Python takes to ask for it."""
    done: list[str] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: done.append(str(device)))
    before = time.perf_counter()
    assert before <= waiting(torch.device("cpu"))() <= time.perf_counter() and not done
    clock = waiting(torch.device("cuda:1"))
    monkeypatch.setattr("time.perf_counter", lambda: float(len(done)))  # what it reads was waited for
    assert [clock(), clock()] == [1.0, 2.0] and done == ["cuda:1", "cuda:1"]


def test_every_round_marks_its_parts_in_order_and_no_token_changes(engine: Engine) -> None:
    other = engine.using(context="full")
    marks: list[str] = []
    other.listen(marks.append)
    done = other.generate(PROMPT, GO_ON)
    whole = ["host", "draft", "host", "verify", "accept", "host", "draft"]
    prompt = ["host", "verify", "accept", "host", "draft"]
    assert marks == prompt + whole * (len(done.rounds) - 1) + whole[:5]  # the last round has nothing to absorb
    assert done.token_ids == engine.using(context="full").generate(PROMPT, GO_ON).token_ids


def test_a_prefix_says_what_it_holds_whatever_runs_from_it(engine: Engine) -> None:
    with engine.prefill(PROMPT) as prefix:
        assert prefix.held == (90, 90) and 0 < prefix.draft_seconds < prefix.seconds
        for context in ("full", "window", "fold"):
            engine.using(context=context).generate(prefix, GO_ON)
            assert prefix.held == (90, 90)
    with pytest.raises(AssertionError):
        _ = prefix.held


def test_bytes_of_a_round(engine: Engine) -> None:
    """Counted from the shapes in the two configs: everything fp32, embedding tables apart from heads."""
    resources = engine._resources
    model, network = resources.found.model, resources.found.network
    assert network is not None
    of_target = {name: p.nbytes for name, p in model.named_parameters()}
    of_drafter = sum(p.nbytes for p in network.parameters())
    head, table = of_target["lm_head.weight"], of_target["model.embed_tokens.weight"]
    plain = engine.using(draft_tokens=0)
    entry = resources.cache.spec.bytes_per_entry
    assert plain.bytes_read(0) == sum(of_target.values()) - table
    assert plain.bytes_read(100) - plain.bytes_read(0) == 100 * entry

    spec = network.cache_spec(resources.dtype)
    layers = network.layer_facts
    full, window = engine.using(context="full"), engine.using(context="window", window=10)
    own = full.bytes_read(0) - plain.bytes_read(0)
    assert own == of_drafter + head, "this drafter borrows the target's head"
    if all(layer.window is None for layer in layers):
        read = full.bytes_read(100) - plain.bytes_read(100) - own
        assert read == 100 * spec.bytes_per_entry
        # the window's rows together see the last window + block - 1 entries before the anchor's own
        read = window.bytes_read(100) - plain.bytes_read(100) - own
        assert read == (10 + network.block - 1) * spec.bytes_per_entry
