"""The law of the output where a masked drafter drafts, through the real round loop and the drafter's own: every block
of a grid, every order, every law that a draft may be held with; noise is enumerated exactly.

The network is a table: a row's logits hang on every id that it sees and where, as the mask of the pass has it, so that
a token revealed early, or left over, shows in all that is drawn after it."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any, cast

import pytest
import torch
from enumerating import Branches, EnumeratedNoise, outcomes
from tables import IDS, PROMPT, TableModel, plain_law, run, total_variation

from foldspec.acceptance import make_rule
from foldspec.cache.paged import PagedCache
from foldspec.cache.pages import PageTables
from foldspec.cache.rows import Rows
from foldspec.drafters.base import Host
from foldspec.drafters.masked_diffusion import MaskedDiffusion
from foldspec.drafters.masked_networks import MaskedNetwork
from foldspec.effort import Effort
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardOutput, ForwardPlan
from foldspec.models.mask import FULL, Mask, grid
from foldspec.options import MethodOptions, SamplingParams
from foldspec.sampling import DraftSampling

MASK_ID = IDS


@cache
def logits_of(seen: tuple[int, ...], row: int) -> torch.Tensor:
    """The logits of a row, from all ids that it sees and its own place."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seen} {row}".encode()))
    return 1.5 * torch.randn(IDS + 1, generator=draw, dtype=torch.float64)


class ToyCache:
    """Only what is held: ids in their places."""

    def __init__(self) -> None:
        self.tables = PageTables(64, 16)
        self.open, self.reserve, self.fork = self.tables.open, self.tables.reserve, self.tables.fork
        self.close = self.tables.close
        self.held: dict[int, list[int]] = {}

    def truncate(self, request: int, length: int) -> None:
        self.tables.truncate(request, length)
        del self.held.get(request, [])[length:]


class ToyLanguage(TableModel):
    vocabulary = IDS + 1

    @property
    def head_weight(self) -> torch.Tensor:
        return torch.zeros(1)

    def forward(self, ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> ForwardOutput:
        toy, rows, tokens = cast(ToyCache, cache), [], ids.tolist()
        for request, start, packed in plan.rows:
            held = toy.held.setdefault(request, [])
            assert start == len(held) == toy.tables.length(request)
            held += tokens[packed]
            toy.tables.reserve(request, len(held))
            toy.tables.extend(request, len(held))
            first, last = plan.mask.spans(start, packed.stop - packed.start)
            rows += [logits_of(tuple(held[f:l]), start + i) for i, (f, l) in enumerate(zip(first, last, strict=True))]
        assert plan.head_rows is not None
        return ForwardOutput(torch.stack([rows[i] for i in plan.head_rows]) if plan.head_rows else torch.empty(0), ())


class ToyNetwork(MaskedNetwork):
    def __init__(self, mask: Mask, shift: int) -> None:
        super().__init__(ToyLanguage(), "toy", MASK_ID)
        self._mask, self.shift, self.quota = mask, shift, "dream" if shift else "balanced"  # type: ignore[misc]

    def mask(self, method: MethodOptions) -> Mask:
        return self._mask


DREAM, PAIRS = (FULL, 1), (grid(2), 0)  # a canvas of its own; blocks of two, of which the first may be half known


def law_of(form: tuple[Mask, int], sampling: DraftSampling, drafts: int, rule: str, params: Any, **how: Any) -> Any:
    """The law of the output, in a batch of two."""

    def once(branches: Branches) -> tuple[int, ...]:
        network, toy = ToyNetwork(*form), cast(PagedCache, ToyCache())
        host = Host(TableModel(), toy, Kernels())
        method = MethodOptions(draft_tokens=drafts, **how)
        drafter = cast(MaskedDiffusion, network.bind(host, toy, method, sampling))
        for request in range(2):
            drafter.open(request)
            drafter.absorb(Rows.of([request], [0], [len(PROMPT)]), PROMPT, ())
        other = SamplingParams(max_tokens=2)
        done = run(make_rule(rule), drafter, [params, other], [EnumeratedNoise(branches), EnumeratedNoise(branches)])
        return tuple(done[0].output)

    return outcomes(once)


def sampled(drafts: int, temperature: float = 1.3, **effort: Any) -> DraftSampling:
    return DraftSampling(temperature, top_k=2 if drafts > 2 else 0, effort=Effort(**effort))


EFFORTS: dict[str, dict[str, Any]] = {
    "one step": {"steps": 1},
    "entropy": {"steps": 2, "order": "entropy"},
    "topk_margin": {"steps": 2, "order": "topk_margin"},
    "sequential": {"steps": 2, "order": "sequential"},
    "maskgit_plus": {"steps": 2, "order": "maskgit_plus"},
    "origin": {"steps": 2, "order": "origin"},
    "dynamic_top1": {"confidence": 0.4, "order": "dynamic_top1"},
    "entropy bound": {"entropy_bound": 0.5},
}


@pytest.mark.parametrize("form", [DREAM, PAIRS], ids=["dream", "grid"])
@pytest.mark.parametrize("name", EFFORTS)
@pytest.mark.parametrize("q_mode", ["exact", "point_mass"])
def test_lossless_for_every_effort(form: tuple[Mask, int], name: str, q_mode: str) -> None:
    params = SamplingParams(max_tokens=3, temperature=1.0)
    effort = Effort(**EFFORTS[name], q_mode=q_mode).filled("static").settled(True)
    law = law_of(form, DraftSampling(1.3, effort=effort), 2, "exact", params)
    assert total_variation(law, plain_law(params, PROMPT[-1])) < 1e-12
