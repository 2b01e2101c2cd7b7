"""The body of a round on fixed buffers can be recorded: it runs on fake tensors, which have shapes and no numbers. So
nothing of it reads a value on the host, no shape depends on one, nothing comes in from the host, and nothing that it
allocates outlives it. Each of these is planted once, and found."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import fixed
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from foldspec import SamplingParams
from foldspec.schedule.fixed import FixedRound

LLAMA, MIXED, DSPARK = "a_llama_zlab", "b_qwen3_zlab_mixed", "d_qwen3_dspark"


class FromTheHost(AssertionError):
    """Numbers were brought in from a Python list: on a GPU that is a copy, which waits."""


class Watch(TorchDispatchMode):
    """Lets nothing in from the host but single numbers, which operators take along, and nothing out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "lift_fresh" in str(func) and args[0].dim():
            raise FromTheHost(str(func))
        return func(*args, **(kwargs or {}))


def rounds(pair: str, method: str, **sampled: Any) -> list[FixedRound]:
    """The rounds of an engine that has run: whatever is made once and kept is there."""
    with fixed.load(pair, "on", kernels="reference", weights="float32", **fixed.METHODS[method]) as engine:
        params = [SamplingParams(max_tokens=n, ignore_eos=True, **sampled) for n in (4, 24)]
        engine.generate(fixed.prompts((4, 18)), params)
        return list(fixed.graphs_of(engine)._runs.values())  # type: ignore[arg-type]


def alive() -> dict[int, FakeTensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old names of torch's own, which complain when they are looked at
        return {id(x): x for x in gc.get_objects() if isinstance(x, FakeTensor)}


def run(round_: FixedRound) -> list[torch.Size]:
    """Run a copy whose tensors are all fake; the shapes of those that outlive it."""
    with torch.inference_mode():
        mode = FakeTensorMode()
        with FakeCopyMode(mode):
            fake = copy.deepcopy(round_)
        with mode, Watch():
            fake()
            before = alive()
            fake()
        return [x.shape for place, x in alive().items() if place not in before]


@pytest.mark.parametrize(
    ("pair", "method"),
    [
        (LLAMA, "plain"),
        (LLAMA, "full"),
        (MIXED, "window"),
        (MIXED, "rerope"),
        (MIXED, "streaming"),
        (DSPARK, "fold"),
    ],
)
def test_the_body_of_a_round_can_be_recorded(pair: str, method: str) -> None:
    found = rounds(pair, method)
    assert len(found) == (3 if method in ("fold", "rerope", "streaming") else 2), (
        "several batches, and states of the context"
    )
    for round_ in found if method == "fold" else found[-1:]:
        assert run(round_) == []


def test_the_body_of_a_sampled_round_can_be_recorded() -> None:
    found = rounds(LLAMA, "full", temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1)
    assert run(found[-1]) == []


# ---------------------------------------------------------------------------------------------------- planted faults


def item(self: Any, drafts: torch.Tensor) -> None:
    drafts.sum().item()


def whole(self: Any, drafts: torch.Tensor) -> None:
    range(int(drafts[0, 0]))


def truth(self: Any, drafts: torch.Tensor) -> None:
    if (drafts > 3).all():
        pass


def listed(self: Any, drafts: torch.Tensor) -> None:
    drafts.tolist()


def counted(self: Any, drafts: torch.Tensor) -> None:
    drafts.nonzero()


def masked(self: Any, drafts: torch.Tensor) -> None:
    drafts[drafts > 3]


def brought_in(self: Any, drafts: torch.Tensor) -> None:
    drafts + torch.tensor([1] * drafts.shape[1])


def kept(self: Any, drafts: torch.Tensor) -> None:
    self.seen = drafts.clone()


def grown(self: Any, drafts: torch.Tensor) -> None:
    vars(self).setdefault("all_seen", []).append(drafts + 1)


@pytest.fixture(scope="module")
def one_round() -> FixedRound:
    return rounds(LLAMA, "fold")[0]


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any, torch.Tensor], None]) -> None:
    blocks = FixedRound._blocks

    def faulty(self: FixedRound, logits: torch.Tensor, first: torch.Tensor, drafts: torch.Tensor, *rest: Any) -> Any:
        fault(self, drafts)
        return blocks(self, logits, first, drafts, *rest)

    monkeypatch.setattr(FixedRound, "_blocks", faulty)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (item, DataDependentOutputException),
        (whole, DataDependentOutputException),
        (truth, DataDependentOutputException),
        (listed, DataDependentOutputException),
        (counted, DynamicOutputShapeException),
        (masked, DynamicOutputShapeException),
        (brought_in, FromTheHost),
    ],
)
def test_what_a_recording_cannot_do_is_found(
    one_round: FixedRound, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], error: Any
) -> None:
    plant(monkeypatch, fault)
    with pytest.raises(error):
        run(one_round)


@pytest.mark.parametrize("fault", [kept, grown])
def test_what_outlives_a_round_is_found(
    one_round: FixedRound, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    plant(monkeypatch, fault)
    assert run(one_round)
