"""A round on the CPU copies nothing that grows with the context: keys and values are read where they lie.

Every operation of a round is watched, and the bytes that it writes are counted: tensors that alias no input, and inputs
that it changes. The attention operator itself reads views of the cache and writes one output a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foldspec import Engine
from foldspec.acceptance.base import AcceptanceRule
from foldspec.context.reader import ContextReader
from foldspec.kernels.multi_read_attention import Entries
from foldspec.noise import Noise
from foldspec.records import Proposal, Verdict
from foldspec.sampling import TargetLaws
from foldspec.schedule.request import Request

# The rings of both windows below (36 and 112 slots) stand alike at both lengths: 1,008 is a multiple of either.
SHORT, LONG = 200, 200 + 1008
METHODS: dict[str, dict[str, Any]] = {
    "full": {"context": "full"},
    "window": {"context": "window", "window": 24},
    "wide window": {"context": "window", "window": 100},
    "fold": {"context": "fold", "window": 24, "alpha": 2.0},
    "fold, wide window": {"context": "fold", "window": 100, "alpha": 2.0},
}


class Written(TorchDispatchMode):
    """Counts the bytes that operations write, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        changes = func._schema.is_mutable
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (changes or x.untyped_storage()._cdata not in inputs):
                self.bytes[str(func)] = self.bytes.get(str(func), 0) + x.nbytes
        return result


def load(kernels: str) -> Engine:
    folder = tiny.PAIRS / "a_llama_zlab"
    return Engine.load(
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        kernels=kernels,
        device="cpu",
        prefill_chunk=2000,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load("auto") as engine:
        yield engine


class Never(AcceptanceRule):
    """Accepts nothing, so that every round stores one entry."""

    lossless = False

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        return Verdict(0, 7)

    def law(self) -> str:
        return "7"


def one_round(engine: Engine, length: int) -> dict[str, int]:
    """What the second round after a prompt writes, from draft to absorb, with all that rounds share built before."""
    resources = engine._resources
    engine._rounds.rule = Never()
    for _ in range(2):
        request = Request(resources.new_id(), tuple(tiny.prompt(length, 500)), 100)
        with resources.opened(request.id, engine._drafter, None):
            resources.run_prompt(request.id, request.prompt, engine._drafter)
            request.commit([7])
            engine._rounds.round([request])
            with Written() as written:
                engine._rounds.round([request])
    return written.bytes


def growth(engine: Engine) -> float:
    """Bytes more that a round writes for each entry more in the context."""
    short, long = (sum(one_round(engine, length).values()) for length in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


@pytest.mark.parametrize("method", METHODS)
def test_a_round_writes_the_same_bytes_whatever_the_context(engine: Engine, method: str) -> None:
    chosen = engine.using(**METHODS[method])
    short, long = one_round(chosen, SHORT), one_round(chosen, LONG)
    assert short == long
    assert chosen.env()["kernels"]["multi_read_attention"]["runs"] in ("native", "cpu")


@pytest.mark.parametrize("method", METHODS)
def test_the_reference_gathers_and_is_noticed(method: str) -> None:
    """So the count can fail: the definition copies all that it reads."""
    with load("reference") as engine:
        assert growth(engine.using(**METHODS[method])) > engine._resources.cache.spec.bytes_per_entry


@pytest.mark.parametrize("way", ["cat", "index"])
def test_one_gathering_read_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The keys alone of the far read of one drafter layer, gathered: the least that could go wrong."""
    arguments = ContextReader._arguments

    def gathered(entries: Entries) -> Entries:
        slots = [slot + i for slot, count in entries.runs for i in range(count)]
        dense = tiny.dense(entries) if way == "cat" else entries.data[torch.tensor(slots)]
        return Entries(dense, ((0, len(dense)),))

    def mistaken(self: ContextReader, layer: int, *rest: Any) -> Any:
        read = arguments(self, layer, *rest)
        return dataclasses.replace(read, keys=gathered(read.keys)) if layer == 1 and read.exponent != 1 else read

    monkeypatch.setattr(ContextReader, "_arguments", mistaken)
    resources = engine._resources
    assert resources._draft_cache is not None
    spec = resources._draft_cache.spec
    keys = spec.kv_heads * spec.key_width * spec.dtype.itemsize
    assert growth(engine.using(**METHODS["fold"])) == pytest.approx(keys, abs=16)  # 8 more: the list of slots
