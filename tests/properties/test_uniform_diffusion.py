"""DiffusionGemma as a drafter: its sampler's trace, the laws that drafts are held with, what is left of a round, and
the law of the output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import diffusion
import gemma
import numpy as np
import pytest
import tables
import tiny
import torch
from enumerating import Branches, EnumeratedNoise, outcomes
from output_laws import mutant
from safetensors.torch import load_file
from tables import IDS, PROMPT, plain_law, total_variation

from foldspec.acceptance import make_rule
from foldspec.cache.paged import CacheSpec, PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters import denoise_uniform, uniform_diffusion
from foldspec.drafters.base import Host
from foldspec.drafters.denoise_uniform import Annealed
from foldspec.drafters.uniform_diffusion import UniformDiffusion, UniformNetwork
from foldspec.effort import Effort
from foldspec.laws import Law
from foldspec.noise import Noise, Purpose
from foldspec.options import SamplingParams
from foldspec.records import Sampled
from foldspec.sampling import DraftSampling

VOCABULARY, DRAFTS = 7, 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of 7 ids and a drafter with a table of 9."""
    into = tmp_path_factory.mktemp("uniform")
    target = gemma.write_target(into / "target", vocab_size=VOCABULARY)
    return target, diffusion.write(into / "drafter", vocab_size=VOCABULARY + 2)


@pytest.fixture(scope="module")
def network(folders: tuple[Path, Path]) -> UniformNetwork:
    return cast(UniformNetwork, tiny.load_network(folders[1]))


def drafter_of(network: UniformNetwork, vocabulary: int = VOCABULARY, **sampling: Any) -> UniformDiffusion:
    """At work in a cache whose rings are the least that serve it, for a target of so many ids."""
    cache = tiny.paged_cache(network.language, longest_pass=8)
    host = Host(cast(Any, SimpleNamespace(vocabulary=vocabulary)), cache, tiny.kernels_of())
    return UniformDiffusion(network.language, cache, host, DRAFTS, DraftSampling(**sampling))


@torch.inference_mode()
def absorb(drafter: UniformDiffusion, request: int, ids: Sequence[int], piece: int = 8) -> None:
    """Committed ids that follow what it holds."""
    for at in range(0, len(ids), piece):
        own = ids[at : at + piece]
        drafter.absorb(Rows.of([request], [drafter.held(request)], [len(own)]), list(own), ())


@torch.inference_mode()
def propose(
    drafter: UniformDiffusion, anchors: dict[int, int], noises: Sequence[Noise], budgets: Sequence[int] | None = None
) -> list[Any]:
    rows = Rows.of(list(anchors), [drafter.held(request) for request in anchors], [1] * len(anchors))
    return list(drafter.propose(rows, list(anchors.values()), budgets or [DRAFTS] * len(anchors), noises))


# --------------------------------------------------------------------------------------------------------------- trace


class Scripted(Noise):
    """The likeliest id for a draw, and canvases that are given for each step."""

    def __init__(self, canvases: Sequence[Sequence[int]]) -> None:
        super().__init__(0)
        self._canvases = canvases

    def draw(self, law: Law, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        return law.likeliest()

    def whole(self, count: int, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        assert purpose is Purpose.CANVAS
        return self._canvases[step][position - anchor - 1]


def test_the_golden_trace() -> None:
    """The first three steps of 48: canvases, processed logits, entropies, and which places are kept; also at a looser
    bound. Draws are the likeliest ids there, and fresh ids are given."""
    golden = {k: v[0] for k, v in load_file(diffusion.GOLDEN / "golden.safetensors").items()}
    noise = Scripted([golden["canvas0_ids"].tolist(), *(golden[f"step{s}.noise"].tolist() for s in (48, 47, 46))])
    model, ids = diffusion.load(diffusion.GOLDEN), golden["input_ids"].tolist()
    cache = tiny.paged_cache(model, longest_pass=21)
    cache.open(0)
    diffusion.encode(model, cache, ids)
    block = Annealed(Effort(steps=48), DraftSampling(1.0), noise, len(ids) - 1, 8, model.vocabulary)
    for step in (48, 47, 46):
        assert block.canvas == golden[f"step{step}.canvas_in"].tolist()
        block.step(diffusion.denoise(model, cache, [block.canvas], before=block.processed))
        assert block.processed is not None and not block.done
        torch.testing.assert_close(block.processed, golden[f"step{step}.processed"], atol=1e-4, rtol=0)
        kept = golden[f"step{step}.accept_mask"].bool()
        wanted = torch.where(kept, golden[f"step{step}.sample"], golden[f"step{step}.noise"])
        assert block.canvas == wanted.tolist()
    effort = Effort(steps=48, entropy_bound=float(golden["loose_bound"]))
    block = Annealed(effort, DraftSampling(1.0), noise, len(ids) - 1, 8, model.vocabulary)
    block.step(diffusion.denoise(model, cache, [block.canvas]))
    kept = golden["loose_bound.accept_mask"].bool()
    assert 1 < int(kept.sum()) < 8
    assert block.canvas == torch.where(kept, golden["step48.sample"], golden["step48.noise"]).tolist()


# ---------------------------------------------------------------------------------------------------------- its drafts


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_drafts_by_hand(folders: tuple[Path, Path], network: UniformNetwork, steps: int) -> None:
    """Two requests at once; each step from transformers' logits of the whole text, ids that the target lacks barred."""
    oracle, contexts = diffusion.Oracle(folders[1]), ([3, 1, 4, 1, 5, 6, 2], [0, 6])
    drafter = drafter_of(network, temperature=1.3, effort=Effort(steps=steps, entropy_bound=0.1))
    for request, ids in enumerate(contexts):
        drafter.open(request)
        absorb(drafter, request, ids)
    found, sizes = propose(drafter, {0: 2, 1: 5}, [Noise(8), Noise(9)], [DRAFTS, 2]), set[int]()
    for ids, anchor, seed, proposal in zip(contexts, (2, 5), (8, 9), found, strict=True):
        noise, n = Noise(seed), len(ids)
        fresh = [
            [noise.whole(VOCABULARY, Purpose.CANVAS, n + 1 + i, anchor=n, step=k) for i in range(DRAFTS)]
            for k in range(steps)
        ]
        canvas, before = fresh[0], None
        for k in range(steps):
            logits = oracle.denoise([*ids, anchor], canvas, before).clone()
            logits[:, VOCABULARY:] = -torch.inf
            before = logits / (0.4 + 0.4 * (steps - k) / steps)
            laws = (before.double() / 1.3).softmax(-1)
            drawn = [
                noise.draw(Law(laws[i, :VOCABULARY].log()), Purpose.DRAFT, n + 1 + i, anchor=n, step=k)
                for i in range(DRAFTS)
            ]
            entropies = torch.special.entr(laws).sum(-1).tolist()
            order = sorted(range(DRAFTS), key=lambda i: entropies[i])
            kept = {i for r, i in enumerate(order) if sum(entropies[j] for j in order[:r]) <= 0.1}
            if k < steps - 1:
                sizes.add(len(kept))
                canvas = [drawn[i] if i in kept else fresh[k + 1][i] for i in range(DRAFTS)]
        assert isinstance(proposal, Sampled)
        count = len(proposal.tokens)
        assert proposal.tokens == tuple(drawn[:count]) and count == (DRAFTS if n == 7 else 2)
        for i in range(count):
            law = proposal.law(i)
            assert law.ids is None and len(law.logits) == VOCABULARY
            torch.testing.assert_close(law.probs(), laws[i, :VOCABULARY], atol=1e-5, rtol=0)
    assert sizes - {0, DRAFTS} or steps == 1


@pytest.mark.parametrize("steps", [1, 2])
def test_an_argmax_is_a_point_mass(network: UniformNetwork, steps: int) -> None:
    """The likeliest ids of the last step, whatever the steps before have drawn."""
    drafter, seen = drafter_of(network, effort=Effort(steps=steps)), []
    drafter.open(0)
    absorb(drafter, 0, [3, 1, 4])
    denoise = drafter._denoiser.denoise
    drafter._denoiser = cast(Any, SimpleNamespace(denoise=lambda *a: seen.append(denoise(*a)) or seen[-1]))
    (proposal,) = propose(drafter, {0: 2}, [Noise(3)])
    assert len(seen) == steps and proposal.tokens == tuple(seen[-1][:, :VOCABULARY].argmax(-1).tolist())
    assert [proposal.law(i).token for i in range(DRAFTS)] == list(proposal.tokens)


def test_a_target_of_more_ids(network: UniformNetwork) -> None:
    """Laws say which ids they are of, and the anchor may be one that the drafter lacks."""
    drafter = drafter_of(network, 12, temperature=1.0, effort=Effort(steps=2))
    drafter.open(0)
    absorb(drafter, 0, [3, 11, 4])
    (proposal,) = propose(drafter, {0: 10}, [Noise(3)])
    assert max(proposal.tokens) < VOCABULARY + 2
    laws = [proposal.law(i) for i in range(DRAFTS)]
    assert all(law.ids is not None and law.ids.tolist() == list(range(VOCABULARY + 2)) for law in laws)


def test_a_canvas_ends_with_the_positions(network: UniformNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that is whole."""
    monkeypatch.setattr(network.language, "max_positions", 9)
    drafter = drafter_of(network, temperature=1.0)
    for request, length in enumerate((3, 6, 8)):
        drafter.open(request)
        absorb(drafter, request, [1] * length)
    found = propose(drafter, {0: 2, 1: 2, 2: 2}, [Noise(1)] * 3)
    assert [len(proposal.tokens) for proposal in found] == [4, 2, 0]


def test_nothing_is_drafted_without_a_budget(network: UniformNetwork) -> None:
    drafter = drafter_of(network, temperature=1.0)
    for request in (0, 1):
        drafter.open(request)
        absorb(drafter, request, [3, 1, 4])
    found = propose(drafter, {0: 2, 1: 2}, [Noise(1), Noise(1)], [0, 1])
    assert found[0].tokens == () and len(found[1].tokens) == 1


# ------------------------------------------------------------------------------------------------ what a round leaves


def entries(drafter: UniformDiffusion, request: int) -> list[torch.Tensor]:
    """What later rows read: all keys and values, of sliding layers those of a window."""
    n = drafter.held(request)
    found = []
    for i, layer in enumerate(cast(Any, drafter.model).layout):
        first = 0 if layer.window is None else max(0, n - layer.window + 1)
        found += [tiny.dense(part) for part in drafter.cache.entries(i, request, first)]
    return found


@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_a_round_leaves_what_a_fresh_start_has(network: UniformNetwork, accepted: int) -> None:
    """After each number of accepted drafts the state is, bit for bit, that of a drafter that has read the committed
    text and never drafted; and so is the next proposal: no canvas and no self-conditioning is carried over."""
    old, new = (drafter_of(network, temperature=1.0, effort=Effort(steps=2)) for _ in range(2))
    text = tiny.prompt(9, VOCABULARY)
    old.open(0)
    absorb(old, 0, text)
    for anchor in (2, 5):
        (proposal,) = propose(old, {0: anchor}, [Noise(4)])
        committed = [anchor, *proposal.tokens[:accepted]]
        old.truncate(0, len(text) + len(committed))
        with torch.inference_mode():
            old.absorb(Rows.of([0], [len(text)], [len(committed)]), committed, ())
        text += committed
    new.open(0)
    absorb(new, 0, text, piece=3)
    assert old.held(0) == new.held(0) == len(text)
    with torch.inference_mode():
        for each in (old, new):
            if each.encoded(0) < len(text):
                each._encode([0])
            assert each.encoded(0) == len(text)
    assert all(torch.equal(a, b) for a, b in zip(entries(old, 0), entries(new, 0), strict=True))
    again = [propose(each, {0: 6}, [Noise(4)])[0] for each in (old, new)]
    assert again[0].tokens == again[1].tokens
    assert all(torch.equal(again[0].law(i).logits, again[1].law(i).logits) for i in range(DRAFTS))


def watched(network: UniformNetwork, monkeypatch: pytest.MonkeyPatch, *requests: int) -> tuple[Any, list[Any]]:
    """A drafter with open requests, and the rows of each pass of its encoder."""
    drafter, passes = drafter_of(network), list[Any]()
    run = drafter.run

    def noted(rows: Rows, *more: Any, **key: Any) -> torch.Tensor:
        passes.append(rows.counts)
        return run(rows, *more, **key)

    monkeypatch.setattr(drafter, "run", noted)
    for request in requests:
        drafter.open(request)
    return drafter, passes


def test_the_encoder_runs_once_a_round(network: UniformNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round commits waits for the next anchor."""
    drafter, passes = watched(network, monkeypatch, 0)
    absorb(drafter, 0, tiny.prompt(16, VOCABULARY))
    assert passes == [(8,), (8,)]
    for accepted in (4, 0, 2):
        (proposal,) = propose(drafter, {0: 6}, [Noise(4)])
        committed = [6, *proposal.tokens[:accepted]]
        with torch.inference_mode():
            drafter.absorb(Rows.of([0], [drafter.held(0) - 1], [len(committed)]), committed, ())
    assert passes[2:] == [(1,), (5,), (1,)] and drafter.held(0) == 16 + 5 + 1 + 3


def test_prompts_do_not_wait(network: UniformNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass over a prompt is longer than its chunk."""
    drafter, passes = watched(network, monkeypatch, 0, 1)
    with torch.inference_mode():
        drafter.absorb(Rows.of([0, 1], [0, 0], [7, 2]), [1] * 9, ())
        drafter.absorb(Rows.of([0, 1], [7, 2], [3, 6]), [2] * 9, ())
    assert passes == [(7,), (2,), (6,)]
    assert [drafter.held(i) for i in (0, 1)] == [10, 8] and [drafter.encoded(i) for i in (0, 1)] == [7, 8]
    propose(drafter, {0: 3, 1: 4}, [Noise(1), Noise(1)])
    assert passes[3:] == [(4, 1)]


# --------------------------------------------------------------------------------------------------- law of the output

_RANDOM = np.random.default_rng(5)
CANVAS = torch.tensor(1.5 * _RANDOM.normal(size=(2, IDS, IDS, IDS, IDS)))  # [place, anchor, canvas ids, next]
SAID = torch.tensor(_RANDOM.normal(size=(IDS, IDS)))


class TableCanvas:
    """In place of the network: each place's logits hang on the anchor, on both ids of the canvas and on what was said
    of the other place a step before."""

    vocabulary, max_positions, head_weight = IDS, 99, torch.empty(0)

    def __init__(self) -> None:
        self.anchors: dict[int, int] = {}

    def __call__(self, ids: torch.Tensor, plan: Any, cache: Any) -> Any:
        cache.begin(plan.rows)
        for request, _, packed in plan.rows:
            self.anchors[request] = int(ids[packed][-1])
        return SimpleNamespace(logits=ids)

    def denoise(self, ids: torch.Tensor, rows: Rows, cache: Any, before: torch.Tensor | None = None) -> torch.Tensor:
        found = []
        for request, _, packed in rows:
            a, b = ids[packed].tolist()
            logits = CANVAS[:, self.anchors[request], a, b]
            if before is not None:
                logits = logits + before[packed].softmax(-1).flip(0) @ SAID
            found.append(logits)
        return torch.cat(found)


class LastDraws(EnumeratedNoise):
    """All chance is enumerated but that of the canvases and of the steps before the last, which is one fixed outcome:
    what a law must hold for whatever it is."""

    def __init__(self, branches: Branches, seed: int, last: int) -> None:
        super().__init__(branches)
        self._given, self._last = Noise(seed), last

    def whole(self, count: int, purpose: Purpose, position: int, **key: int) -> int:
        return self._given.whole(count, purpose, position, **key)

    def draw(self, law: Law, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        own = self._given if purpose is Purpose.DRAFT and step != self._last else super()
        return own.draw(law, purpose, position, anchor=anchor, step=step)


def table_drafter(steps: int, **sampling: Any) -> UniformDiffusion:
    host = Host(cast(Any, SimpleNamespace(vocabulary=IDS)), cast(Any, None), tiny.kernels_of())
    effort = Effort(steps=steps, entropy_bound=0.05, q_mode=sampling.pop("q_mode", "exact"))
    how = DraftSampling(effort=effort, **sampling)
    cache = PagedCache(CacheSpec(1, 1, 1, 1, torch.float32), pages=1, page_size=16, device="cpu")
    drafter = UniformDiffusion(cast(Any, TableCanvas()), cache, host, 2, how)
    drafter.open(0)
    drafter.absorb(Rows.of([0], [0], [len(PROMPT)]), PROMPT, ())
    return drafter


def off(rule: str, steps: int, seed: int, length: int = 4, **sampling: Any) -> float:
    """How far the output's law is from plain decoding's, over at least two rounds."""
    params, rounds = SamplingParams(max_tokens=length, temperature=1.0, top_k=2), set[int]()

    def once(branches: Branches) -> tuple[int, ...]:
        drafter = table_drafter(steps, **sampling)
        (done,) = tables.run(make_rule(rule), drafter, [params], [LastDraws(branches, seed, steps - 1)])
        rounds.add(len(done.rounds))
        return tuple(done.output)

    law = outcomes(once)
    assert max(rounds) >= 2 or uniform_diffusion.Annealed is not Annealed
    return float(total_variation(law, plain_law(params, PROMPT[-1])))


@pytest.mark.parametrize(("rule", "steps"), [("exact", 1), ("exact", 2), ("match", 2)])
def test_the_output_has_the_law_of_plain_decoding(rule: str, steps: int) -> None:
    """Given any canvas and whatever the steps before the last have drawn: so also over all of these."""
    assert off(rule, steps, seed=steps, temperature=1.2, top_k=2) < 1e-12


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "top_k": 2, "q_mode": "point_mass"}])
def test_other_drafts_keep_it(sampling: dict[str, Any]) -> None:
    assert off("exact", 2, seed=5, **sampling) < 1e-12


# what is changed in denoise_uniform.py or uniform_diffusion.py
WRONG: dict[str, tuple[Any, str, str]] = {
    "places that were kept are not drawn again": (
        denoise_uniform,
        "drawn = [self._drafts.draw(law, place, number) for place, law in enumerate(laws)]",
        "kept = self.canvas if last and number else None\n"
        "        drawn = [self._drafts.draw(Law.point(kept[place]) if kept else law, place, number)\n"
        "                 for place, law in enumerate(laws)]\n"
        "        self._drafts._drawn = {p: (t, laws[p]) for p, (t, _) in self._drafts._drawn.items()}",
    ),
    "the law of the step before": (
        denoise_uniform,
        "self.canvas, self.done = (drawn if last else self._next(laws, drawn)), last",
        "old, self._old = getattr(self, '_old', laws), laws\n"
        "        self._drafts._drawn = {p: (t, old[p]) for p, (t, _) in self._drafts._drawn.items()}\n"
        "        self.canvas, self.done = (drawn if last else self._next(laws, drawn)), last",
    ),
    "the canvas in place of what was drawn": (
        denoise_uniform,
        "self.canvas, self.done = (drawn if last else self._next(laws, drawn)), last",
        "self.canvas, self.done = self._next(laws, drawn), last\n"
        "        self._drafts._drawn = {p: (self.canvas[p], law) for p, (_, law) in self._drafts._drawn.items()}",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uniform_diffusion, "Annealed", mutant(*WRONG[mistake])["Annealed"])
    assert off("exact", 2, seed=3, length=3, temperature=1.2) > 1e-3
