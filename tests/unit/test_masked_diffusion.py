"""Dream, SDAR and our masked Llama as drafters: golden denoising traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

from foldspec.cache.rows import Rows
from foldspec.drafters.base import Host
from foldspec.drafters.masked_diffusion import MaskedDiffusion
from foldspec.effort import Effort
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.sampling import DraftSampling

GOLDEN = tiny.GOLDEN / "tiny"
MASK = {"dream": 500, "sdar": 501}


def golden_folder(name: str, at: Path) -> Path:
    """A golden drafter; SDAR's config, as published, leaves the mask to the tokenizer, which the tiny one lacks."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return tiny.write_checkpoint(
        at, {**config, "mask_token_id": MASK[name]}, load_file(GOLDEN / name / "model.safetensors")
    )


class Bench:
    """A drafter alone, with a cache full of NaN, and the ids of each of its passes."""

    def __init__(self, folder: Path, effort: Effort, drafts: int, temperature: float = 0.0, **method: Any) -> None:
        network = tiny.load_network(folder)
        model = network.language
        options = MethodOptions(draft_tokens=drafts, **method)
        cache = tiny.paged_cache(model, pages=64, page_size=16)
        host = Host(model, cache, tiny.kernels_of("auto"))
        drafter = network.bind(host, cache, options, DraftSampling(temperature, effort=effort))
        assert isinstance(drafter, MaskedDiffusion)
        self.drafter, self.cache, self.passes = drafter, cache, list[tuple[int, list[int]]]()
        run = drafter._forward

        def forward(rows: Rows, tokens: Sequence[int], heads: tuple[int, ...]) -> torch.Tensor:
            self.passes += [(start, list(tokens[packed])) for _, start, packed in rows]
            return run(rows, tokens, heads)

        drafter._forward = forward  # type: ignore[method-assign]

    @torch.inference_mode()
    def draft(self, ids: Sequence[int], count: int, request: int = 0) -> tuple[int, ...]:
        """Drafts after ids, the last of which is the anchor."""
        n = len(ids) - 1
        self.drafter.open(request)
        self.drafter.absorb(Rows.of([request], [0], [n]), ids[:n], ())
        self.passes.clear()
        (proposal,) = self.drafter.propose(Rows.of([request], [n], [1]), [ids[n]], [count], [Noise(0)])
        return proposal.tokens


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
    bench = Bench(golden_folder("dream", tmp_path), Effort(steps=6, order=order), 16)
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
    bench = Bench(golden_folder("sdar", tmp_path), SDAR[name], 14)
    followed(bench, g[f"trace.{name}"], 18)
