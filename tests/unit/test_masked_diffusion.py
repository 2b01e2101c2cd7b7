"""Dream, SDAR and our masked Llama as drafters: golden denoising traces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import masked
import pytest
import torch
from masked import GOLDEN, Bench
from safetensors.torch import load_file

from foldspec.effort import Effort


def followed(bench: Bench, trace: torch.Tensor, prompt: int) -> None:
    """The passes show the rows of a trace before each step, and the last row is what was drafted."""
    states = [row for row, after in zip(trace[:-1].tolist(), trace[1:].tolist(), strict=True) if row != after]
    wanted = trace[-1].tolist()
    assert bench.draft(wanted[:prompt], len(wanted) - prompt) == tuple(wanted[prompt:])
    assert len(bench.passes) == len(states)
    for (start, ids), state in zip(bench.passes, states, strict=True):
        assert ids == state[start : start + len(ids)]


@pytest.mark.parametrize("order", ["maskgit_plus", "topk_margin", "entropy"])
def test_dreams_golden_traces(order: str, tmp_path: Path) -> None:
    g = load_file(GOLDEN / "dream" / "golden.safetensors")
    bench = Bench(masked.golden_folder("dream", tmp_path), Effort(steps=6, order=order), 16)
    followed(bench, g[f"trace.{order}"], 24)
    assert all(start == 0 for start, _ in bench.passes)


SDAR: Mapping[str, Effort] = {
    "static.steps4": Effort(steps=4, order="static"),
    "static.steps2": Effort(steps=2, order="static"),
    **{f"dynamic.thr{x}": Effort(steps=4, confidence=x, order="dynamic") for x in (0.05, 0.08, 0.12)},
}


@pytest.mark.parametrize("name", SDAR)
def test_sdars_golden_traces(name: str, tmp_path: Path) -> None:
    g = load_file(GOLDEN / "sdar" / "golden.safetensors")
    bench = Bench(masked.golden_folder("sdar", tmp_path), SDAR[name], 14)
    followed(bench, g[f"trace.{name}"], 18)
