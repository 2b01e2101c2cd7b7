"""A block drafter's drafts: each is drawn, with its own key, from the law that is kept with it, and that law is what
the network's logits say; with a Markov head given the draft that was really drawn before. Where the confidence head
says so, a block ends before the first draft that is too unlikely to stand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gemma
import pytest
import tiny
import torch
from safetensors.torch import load_file

from foldspec.cache.rows import Rows
from foldspec.cache.side import DraftCache
from foldspec.drafters.dflash import DFlash, DFlashNetwork
from foldspec.drafters.dspark import Chain
from foldspec.errors import CheckpointError
from foldspec.laws import Law
from foldspec.noise import Noise, Purpose
from foldspec.records import PointMass, Sampled
from foldspec.sampling import DraftSampling

MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
NETWORKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "z-lab": (tiny.ZLAB, ()),
    "restricted": ({**tiny.DEEPSPEC, "draft_vocab_size": 40}, ("d2t",)),
    "Markov head": ({**tiny.DEEPSPEC, "markov_rank": 6}, MARKOV),
    "Markov head, restricted": ({**tiny.DEEPSPEC, "markov_rank": 6, "draft_vocab_size": 40}, ("d2t", *MARKOV)),
    "gated head": ({**tiny.DEEPSPEC, "markov_rank": 6, "markov_head_type": "gated"}, MARKOV),
    "recurrent head": ({**tiny.DEEPSPEC, "markov_rank": 6, "markov_head_type": "rnn"}, MARKOV),
    "recurrent head, restricted": (
        {**tiny.DEEPSPEC, "markov_rank": 6, "markov_head_type": "rnn", "draft_vocab_size": 40},
        ("d2t", *MARKOV),
    ),
}
SURE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
CONFIDENCE = ("confidence_head.proj.weight",)
CONFIDENT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sure": ({**NETWORKS["Markov head"][0], **SURE}, (*MARKOV, *CONFIDENCE)),
    "sure, recurrent": ({**NETWORKS["recurrent head, restricted"][0], **SURE}, ("d2t", *MARKOV, *CONFIDENCE)),
    "sure without Markov": ({**tiny.DEEPSPEC, **SURE, "confidence_head_with_markov": False}, CONFIDENCE),
    "sure of Markov without it": (
        {**NETWORKS["gated head"][0], **SURE, "confidence_head_with_markov": False},
        (*MARKOV, *CONFIDENCE),
    ),
}
HEADED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {"own head": (tiny.DEEPSPEC, ("lm_head.weight",))}
SAMPLING = DraftSampling(temperature=0.9, top_k=12, top_p=0.95)
PLACES = [(3, 9), (8, 4), (5, 77)]  # entries of context, anchor


class Recorded(Noise):
    """The noise, and the keys that it was asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.keys: list[tuple[Purpose, int, int, int]] = []

    def draw(self, law: Law, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        self.keys.append((purpose, position, anchor, step))
        return super().draw(law, purpose, position, anchor=anchor, step=step)


class Bench:
    """A random network over a random target, with three requests absorbed; the logits of its blocks are recorded."""

    def __init__(self, name: str, folder: Path, sampling: DraftSampling, dtype: torch.dtype = torch.float32) -> None:
        config, extra = (NETWORKS | HEADED | CONFIDENT)[name]
        self.config = config
        model = tiny.load_target(tiny.write_target(folder / "target"), dtype=dtype)
        network = tiny.load_drafter(tiny.write_drafter(folder / "drafter", config, extra=extra), dtype)
        assert isinstance(network, DFlashNetwork)
        self.network = network
        self.weights = load_file(folder / "drafter" / "model.safetensors")  # in memory they are laid out for a kernel
        self.drafter: DFlash = tiny.bind(
            self.network, model, tiny.draft_cache(self.network, dtype=dtype), sampling=sampling, context="full"
        )
        draw = torch.Generator().manual_seed(4)
        for request, (length, _) in enumerate(PLACES):
            self.drafter.open(request)
            taps = [torch.randn(length, 32, generator=draw).to(dtype) for _ in self.drafter.taps]
            with torch.inference_mode():
                self.drafter.absorb(Rows.of([request], [0], [length]), [0] * length, taps)
        self.logits: list[torch.Tensor] = []  # without what the Markov head adds
        self.hidden: list[torch.Tensor] = []
        original = self.drafter._draft

        def watched(*arguments: Any) -> Chain:
            chain = original(*arguments)
            self.logits.append(chain.logits)
            self.hidden.append(chain._y)
            return chain

        self.drafter._draft = watched  # type: ignore[method-assign]

    def propose(
        self, budgets: Sequence[int], noises: Sequence[Noise], requests: Sequence[int] = (0, 1, 2)
    ) -> list[Any]:
        rows = Rows.of(requests, [PLACES[i][0] for i in requests], [1] * len(requests))
        with torch.inference_mode():
            return list(self.drafter.propose(rows, [PLACES[i][1] for i in requests], budgets, noises))


class ByHand:
    """One request's rows from left to right, from the tensors of the file, as the format's description has them."""

    def __init__(self, bench: Bench) -> None:
        self.config, self.w = bench.config, {name: t.double() for name, t in bench.weights.items()}
        self.ids = torch.arange(128)
        if "draft_vocab_size" in bench.config:
            self.ids = bench.network.d2t + torch.arange(40)
        self.state = torch.zeros(6, dtype=torch.float64)

    def row(self, y: torch.Tensor, logits: torch.Tensor, before: int) -> tuple[torch.Tensor, float]:
        """The row's logits over all ids and how sure it is, after the token ``before``. Rows come in order."""
        y, x = y.double(), logits.double()
        sees = [y]
        if self.config.get("markov_rank"):
            e, kind = self.w[MARKOV[0]][before], self.config.get("markov_head_type", "vanilla")
            at = "markov_head.gate_proj" if kind == "gated" else "markov_head.joint_proj"
            if kind == "gated":
                inner = torch.sigmoid(self.w[f"{at}.weight"] @ torch.cat([y, e]) + self.w[f"{at}.bias"]) * e
            elif kind == "rnn":
                z = self.w[f"{at}.weight"] @ torch.cat([self.state, e, y]) + self.w[f"{at}.bias"]
                gate = torch.sigmoid(z[:6])
                self.state = gate * self.state + (1 - gate) * torch.tanh(z[6:12])
                inner = torch.tanh(z[12:])
            else:
                inner = e
            x = x + self.w[MARKOV[1]] @ inner
            if self.config.get("confidence_head_with_markov"):
                sees.append(e)
        sure = 1.0
        if self.config.get("enable_confidence_head"):
            z = self.w["confidence_head.proj.weight"][0] @ torch.cat(sees) + self.w["confidence_head.proj.bias"][0]
            sure = float(torch.sigmoid(z))
        dense = torch.full((128,), -torch.inf, dtype=torch.float64)
        dense[self.ids] = x
        return dense, sure


def law_of_row(x: torch.Tensor) -> list[float]:
    """Temperature 0.9, then top-k 12, then top-p 0.95."""
    probs = torch.softmax(x / 0.9, -1)
    order = probs.argsort(descending=True)[:12]
    kept = probs[order] / probs[order].sum()
    count = int((kept.cumsum(0) - kept < 0.95).sum())
    law = torch.zeros(128, dtype=torch.float64)
    law[order[:count]] = kept[:count] / kept[:count].sum()
    return law.tolist()


@pytest.mark.parametrize("name", NETWORKS)
def test_drafts_are_held_with_the_law_that_the_network_gave_them(name: str, tmp_path: Path) -> None:
    bench = Bench(name, tmp_path, SAMPLING)
    seen: set[int] = set()
    for seed in range(8):
        noises = [Recorded(seed + 100 * i) for i in range(3)]
        proposals = bench.propose([4, 2, 3], noises)
        for i, (proposal, noise, budget) in enumerate(zip(proposals, noises, (4, 2, 3), strict=True)):
            (start, before), hand = PLACES[i], ByHand(bench)
            assert isinstance(proposal, Sampled) and len(proposal.tokens) == budget
            assert noise.keys == [(Purpose.DRAFT, start + 1 + row, start, 0) for row in range(budget)]
            for row, token in enumerate(proposal.tokens):
                law = proposal.law(row)
                x, _ = hand.row(bench.hidden[-1][i, row], bench.logits[-1][i, row], before)
                assert [law.prob(j) for j in range(128)] == pytest.approx(law_of_row(x), abs=1e-5)
                assert token == Noise(seed + 100 * i).draw(law, Purpose.DRAFT, start + 1 + row, anchor=start)
                before = token
            seen |= set(proposal.tokens)
    assert len(seen) > 12  # no argmax


@pytest.mark.parametrize("name", ["z-lab", "restricted", "own head"])
def test_in_half_precision_q_is_of_the_numbers_that_were_drawn_from(name: str, tmp_path: Path) -> None:
    """What the temperature makes of them is rounded no further."""
    bench = Bench(name, tmp_path, DraftSampling(temperature=0.9), torch.bfloat16)
    noises = [Noise(i) for i in range(3)]
    ties = 0
    for (start, _), noise, proposal, logits in zip(
        PLACES, noises, bench.propose([4, 4, 4], noises), bench.logits[0], strict=True
    ):
        ids = bench.network.target_ids
        assert torch.equal(logits, logits.bfloat16().to(logits.dtype))
        for row, token in enumerate(proposal.tokens):
            law = proposal.law(row)
            wanted = torch.softmax(logits[row].double() / 0.9, -1).tolist()
            assert [law.prob(i) for i in (range(128) if ids is None else ids.tolist())] == pytest.approx(wanted, 1e-5)
            assert token == noise.draw(law, Purpose.DRAFT, start + 1 + row, anchor=start)
            ties += len(logits[row]) - len(logits[row].unique())
    assert ties


@pytest.mark.parametrize("name", NETWORKS)
def test_one_seed_gives_the_same_drafts_alone_and_among_others(name: str, tmp_path: Path) -> None:
    bench = Bench(name, tmp_path, SAMPLING)
    together = bench.propose([4, 0, 3], [Noise(i) for i in range(3)])
    assert isinstance(together[1], PointMass) and together[1].tokens == ()
    for i, budget in ((0, 4), (2, 3)):
        assert bench.propose([budget], [Noise(i)], [i])[0].tokens == together[i].tokens


@pytest.mark.parametrize("name", CONFIDENT)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_block_ends_before_the_first_draft_that_is_too_unlikely_to_stand(
    name: str, temperature: float, tmp_path: Path
) -> None:
    """Each request's own, at whatever threshold: what is left is what a whole block begins with, drawn or not."""
    lengths: set[int] = set()
    for stop in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        bench = Bench(name, tmp_path / str(stop), DraftSampling(temperature, 12, 0.95, confidence_stop=stop))
        noises = [Recorded(i) for i in range(3)]
        proposals = bench.propose([5, 2, 4], noises)
        whole = Bench(name, tmp_path / f"{stop} whole", DraftSampling(temperature, 12, 0.95))
        others = whole.propose([5, 2, 4], [Noise(i) for i in range(3)])
        for i, (proposal, other, budget) in enumerate(zip(proposals, others, (5, 2, 4), strict=True)):
            hand, before, count = ByHand(bench), PLACES[i][1], 0
            for row in range(budget):
                x, sure = hand.row(bench.hidden[0][i, row], bench.logits[0][i, row], before)
                assert abs(sure - stop) > 1e-4
                if sure < stop:
                    break
                before, count = other.tokens[row], count + 1
                assert temperature or before == int(x.argmax())
            assert proposal.tokens == other.tokens[:count]
            assert len(noises[i].keys) == (count if temperature else 0)
            lengths.add(count)
    assert lengths >= {0, 2, 5} and len(lengths) >= 4


@pytest.mark.parametrize("name", ["sure, recurrent", "Gemma 4"])
@pytest.mark.parametrize("context", ["full", "window", "fold"])
def test_after_every_accepted_count_its_state_is_that_of_a_fresh_absorb(
    name: str, context: str, tmp_path: Path
) -> None:
    """Nothing of a block stays, neither keys and values nor what a recurrent head went through."""
    config, extra = {**CONFIDENT, "Gemma 4": (gemma.DRAFTER, ())}[name]
    target = tiny.write_target(tmp_path / "target", gemma.TARGET if name == "Gemma 4" else tiny.TARGET)
    model = tiny.load_target(target)
    network = tiny.load_drafter(tiny.write_drafter(tmp_path / "drafter", config, extra=extra))
    draw = torch.Generator().manual_seed(7)
    taps = [torch.randn(60, 32, generator=draw) for _ in network.facts.taps]
    sampling = DraftSampling(temperature=0.9, confidence_stop=0.2 if name != "Gemma 4" else 0.0)

    def begin() -> tuple[DFlash, DraftCache]:
        cache = tiny.draft_cache(network)
        drafter = tiny.bind(network, model, cache, sampling=sampling, context=context, window=6, alpha=2.0)
        drafter.open(0)
        return drafter, cache

    def absorb(drafter: DFlash, first: int, last: int) -> None:
        drafter.absorb(Rows.of([0], [first], [last - first]), [0] * (last - first), [t[first:last] for t in taps])

    def proposed(drafter: DFlash, n: int) -> Any:
        (proposal,) = drafter.propose(Rows.of([0], [n], [1]), [n % 100], [5], [Noise(n)])
        return proposal.tokens, [proposal.law(i).probs() for i in range(len(proposal.tokens))]

    drafter, cache = begin()
    n, lengths = 4, set()
    with torch.inference_mode():
        absorb(drafter, 0, n)
        for accepted in (0, 5, 1, 4, 2, 3, 5, 5, 0):
            tokens, laws = proposed(drafter, n)
            lengths.add(len(tokens))
            fresh, other = begin()
            absorb(fresh, 0, n)
            wanted, same = proposed(fresh, n)
            assert tokens == wanted
            for a, b in zip(laws, same, strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
            for i in range(len(network.layer_facts)):
                found, there = (tiny.dense(each.values(i, 0, 0, n)) for each in (cache, other))
                torch.testing.assert_close(found, there, atol=1e-5, rtol=1e-5)
            drafter.truncate(0, n)
            absorb(drafter, n, n + accepted + 1)
            n += accepted + 1
            assert cache.length(0) == drafter.held(0) == n
    assert len(lengths) > 1 or name == "Gemma 4"


def test_shared_noise_draws_with_the_targets_key(tmp_path: Path) -> None:
    bench = Bench("z-lab", tmp_path, DraftSampling(temperature=1.0, shared=True))
    noises = [Recorded(i) for i in range(3)]
    bench.propose([4, 4, 4], noises)
    for noise, (start, _) in zip(noises, PLACES, strict=True):
        assert noise.keys == [(Purpose.TARGET, start + 1 + row, 0, 0) for row in range(4)]


@pytest.mark.parametrize("name", NETWORKS)
def test_argmax_drafts_need_no_noise_and_a_low_temperature_comes_to_them(name: str, tmp_path: Path) -> None:
    argmax = Bench(name, tmp_path / "a", DraftSampling())
    noises = [Recorded(0) for _ in range(3)]
    proposals = argmax.propose([4, 4, 4], noises)
    assert all(isinstance(proposal, PointMass) for proposal in proposals) and not any(n.keys for n in noises)
    cold = Bench(name, tmp_path / "b", DraftSampling(temperature=1e-5)).propose([4, 4, 4], noises)
    assert [p.tokens for p in cold] == [p.tokens for p in proposals]


def test_a_draft_vocabulary_out_of_order_is_refused(tmp_path: Path) -> None:
    """Laws look ids up by bisection, and an id that stood twice would have two probabilities."""
    bench = Bench("restricted", tmp_path, SAMPLING)
    target, d2t = tiny.load_target(tmp_path / "target"), bench.network.d2t
    bench.network.check(target)
    before, ids = d2t.clone(), bench.network.target_ids
    assert ids is not None
    d2t[1] = ids[0] - 1  # the same id twice
    with pytest.raises(CheckpointError, match="d2t does not map to rising ids"):
        bench.network.check(target)
    d2t.copy_(before)
    d2t[0], d2t[1] = ids[1], ids[0] - 1  # in the wrong order
    with pytest.raises(CheckpointError, match="d2t does not map to rising ids"):
        bench.network.check(target)
