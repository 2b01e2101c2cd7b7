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
from foldspec.drafters.masked_diffusion import MaskedDiffusion, MaskedNetwork
from foldspec.effort import Effort
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardOutput, ForwardPlan
from foldspec.models.mask import FULL, Mask, grid
from foldspec.noise import Noise
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
    vocabulary, max_positions = IDS + 1, 1000

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


class ToyTarget(TableModel):
    vocabulary = IDS


class ToyNetwork(MaskedNetwork):
    def __init__(self, mask: Mask, shift: int) -> None:
        super().__init__(ToyLanguage(), "toy", MASK_ID)
        self._mask, self.shift, self.quota = mask, shift, "dream" if shift else "balanced"  # type: ignore[misc]

    def mask(self, method: MethodOptions) -> Mask:
        return self._mask


# a canvas of its own, the row before it the first draft's; blocks that the anchor, at position 2, ends or begins
FORMS = {"dream": (FULL, 1), "blocks of 2": (grid(2), 0), "blocks of 3": (grid(3), 0)}


def law_of(form: tuple[Mask, int], sampling: DraftSampling, drafts: int, rule: str, params: Any, **how: Any) -> Any:
    """The law of the output, in a batch of two."""

    def once(branches: Branches) -> tuple[int, ...]:
        network, toy = ToyNetwork(*form), cast(PagedCache, ToyCache())
        host = Host(ToyTarget(), toy, Kernels())
        method = MethodOptions(draft_tokens=drafts, **how)
        drafter = cast(MaskedDiffusion, network.bind(host, toy, method, sampling))
        for request in range(2):
            drafter.open(request)
            drafter.absorb(Rows.of([request], [0], [len(PROMPT)]), PROMPT, ())
        other = SamplingParams(max_tokens=2)
        done = run(make_rule(rule), drafter, [params, other], [EnumeratedNoise(branches), Noise(5)])
        return tuple(done[0].output)

    return outcomes(once)


STEPS = 3  # of a block of 3; else 2: so that places are revealed before others that stand to their left
EFFORTS: dict[str, dict[str, Any]] = {
    "one step": {},
    "entropy": {"steps": STEPS, "order": "entropy"},
    "sequential": {"steps": STEPS, "order": "sequential"},
    "topk_margin": {"steps": STEPS, "order": "topk_margin"},
    "maskgit_plus": {"steps": STEPS, "order": "maskgit_plus"},
    "origin": {"steps": STEPS, "order": "origin"},
    "dynamic_top1": {"confidence": 0.4, "order": "dynamic_top1"},
    "entropy bound": {"entropy_bound": 0.5},
}
QUICK = ("one step", "entropy")
# with a draft less, which has all of it that matters and a tenth of the walks
SHORT = {("origin", "dream"), ("origin", "blocks of 3"), ("maskgit_plus", "blocks of 3")}
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EFFORTS]
SOME = ["dream", *(pytest.param(form, marks=pytest.mark.slow) for form in ("blocks of 2", "blocks of 3"))]


def effort_of(name: str, form: str, q_mode: str = "exact") -> Effort:
    given = dict(EFFORTS[name])
    if "steps" in given and form != "blocks of 3":
        given["steps"] = 2
    return Effort(**given, q_mode=q_mode).filled("static").settled(True)


def distance(form: str, effort: Effort, length: int = 5, drafts: int = 3, top_k: int = 2, **how: Any) -> float:
    """Total variation between the output's law and plain decoding's. The output begins with a given token; rounds
    after rejections are among its walks."""
    params = SamplingParams(max_tokens=length, temperature=1.0, top_k=top_k)
    sampling = DraftSampling(1.3, top_k=top_k, effort=effort)
    law = law_of(FORMS[form], sampling, drafts, "exact", params, **how)
    return total_variation(law, plain_law(params, PROMPT[-1]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_lossless_for_every_effort(form: str, name: str) -> None:
    effort = effort_of(name, form)
    assert not effort.biased(True)
    assert distance(form, effort, length=4 if (name, form) in SHORT else 5) < 1e-12


@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("name", NAMES)
def test_point_masses(form: str, name: str) -> None:
    assert distance(form, effort_of(name, form, "point_mass"), length=4) < 1e-12


def test_an_approximate_prefix_changes_no_law() -> None:
    """It changes what is drafted."""
    assert distance("dream", effort_of("entropy", "dream"), prefix_cache="approximate") < 1e-12


@pytest.mark.parametrize("form", SOME)
def test_what_is_said_to_be_biased_is(form: str) -> None:
    """Judged by what each draft was drawn from, whatever was known by then."""
    effort = effort_of("entropy", form, "reveal_step")
    assert effort.biased(True)
    assert distance(form, effort) > 1e-2
    effort = effort_of("sequential", form, "reveal_step")
    assert not effort.biased(True)
    assert distance(form, effort) < 1e-12


@pytest.mark.parametrize("form", SOME)
def test_a_canvas_that_outlives_its_round_would_show(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the drafts of the last round are proposed again where they were rejected, as if drawn for this anchor."""
    kept: dict[int, Any] = {}
    propose = MaskedDiffusion.propose

    def again(self: MaskedDiffusion, anchors: Rows, *rest: Any) -> Any:
        proposals = propose(self, anchors, *rest)
        for request, start, proposal in zip(anchors.requests, anchors.starts, proposals, strict=True):
            old = kept.get(request)
            if old is not None and old[0] == start - 1 and proposal.tokens and len(old[1]) > 1:
                proposal._drawn[0] = old[1][1], proposal._drawn[0][1]
            kept[request] = start, proposal.tokens
        return proposals

    monkeypatch.setattr(MaskedDiffusion, "propose", again)
    assert distance(form, Effort(steps=1), length=4, drafts=2, top_k=0) > 1e-3
