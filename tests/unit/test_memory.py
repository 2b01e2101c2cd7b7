"""The memory plan: its numbers are what is then allocated, it fits, and it says so before it does not."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from foldspec import Engine
from foldspec.errors import ResourceError
from foldspec.memory import MemoryPlan, free_memory

PAIR = tiny.PAIRS / "a_llama_zlab"
METHODS: list[dict[str, Any]] = [
    {"context": "full"},
    {"context": "window", "window": 100},
    {"context": "fold", "window": 24},
    {"context": "fold_auto", "window": 24},
    {"context": "rerope", "window": 24},
    {"context": "streaming", "recents": 30},
    {"context": "yarn", "yarn_ref": 64},
    {"context": "infllm", "window": 24},
    {"context": "cmr", "cmr_topk": 4},
    {"context": "cmr"},
]


def load(planned: Any = None, **options: Any) -> Engine:
    return Engine.load(
        target=str(PAIR / "target"), drafter=str(PAIR / "drafter"), device="cpu", planned=planned, **options
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda m: " ".join(map(str, m.values())))
def test_what_is_planned_is_what_is_allocated(method: dict[str, Any]) -> None:
    plans: list[MemoryPlan] = []
    with load(plans.append, max_batch=3, max_context=1000, page_size=64, **method) as engine:
        resources, (plan,) = engine.resources, plans
        cache, drafts = resources.cache, resources._draft_cache
        assert plan is resources.plan and drafts is not None
        engine.generate([5, 6, 7])  # a drafter's arrays exist from its first request on
        assert plan.target_cache == sum(data.nbytes for data in cache.tensors)
        assert plan.draft_cache == drafts._values.nbytes + sum(keys.nbytes for keys in drafts._keys.values())
        assert plan.rings == sum(pool.nbytes for _, pool in drafts._rings.values())
        found = resources.found
        assert found.network is not None
        held = [*found.model.parameters(), *found.network.parameters()]
        assert (plan.method_state > 0) == (method["context"] == "infllm")
        assert plan.weights == sum(p.nbytes for p in held)
        assert plan.entries == 3 * (-(-1000 // 64) + 1) * 64 == cache.tables.entries
        assert plan.total < plan.weights + plan.target_cache + plan.draft_cache + plan.rings + plan.method_state + 50e6
        assert plan.report()["cache tokens"] == "3,264" and "GB" in str(plan) + " GB"


def test_caches_are_as_large_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of max_batch requests at most, of one at least; what is asked for is not cut."""
    with load(max_context=2048, window=24) as engine:
        whole = engine.resources.plan
    assert whole.entries == 8 * (2048 + 256)
    one = whole.weights + whole.workspace + whole.rings + (whole.target_cache + whole.draft_cache) / 8
    entries = []
    for free in (1.3 * one, 2 * one, 4 * one, 100 * one):
        monkeypatch.setattr("foldspec.memory.free_memory", lambda device, free=free: int(free))
        with load(max_context=2048, window=24) as engine:
            plan = engine.resources.plan
        assert plan.total <= 0.9 * free
        entries.append(plan.entries)
    assert (
        entries == sorted(entries) and entries[0] >= 1280 and entries[0] < entries[2] and entries[-1] == whole.entries
    )
    monkeypatch.setattr("foldspec.memory.free_memory", lambda device: int(one))
    with pytest.raises(
        ResourceError, match=r"not enough memory on cpu: cache tokens 2,304, weights .*; use --max-context"
    ):
        load(max_context=2048, window=24)
    with load(max_context=2048, window=24, cache_tokens=300) as engine:
        assert engine.resources.plan.entries == 512
    with pytest.raises(ResourceError, match=r"cache tokens 1,000,192, .*at most [0-9,]+, or --dtype bfloat16"):
        load(max_context=2048, window=24, cache_tokens=1_000_000)


def test_the_remedy_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foldspec.memory.free_memory", lambda device: 5_000_000)
    with pytest.raises(ResourceError) as caught:
        load(cache_tokens=10_000_000, window=24)
    number = int(str(caught.value).rpartition("at most ")[2].partition(", or")[0].replace(",", ""))
    with load(max_context=number, window=24) as other:
        assert other.resources.plan.total <= 4_500_000
    with load(cache_tokens=number, window=24) as engine:
        assert engine.resources.plan.total <= 4_500_000


def test_free_memory_is_known_here() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or 10**6 < free < 10**14
