"""Efforts: what goes together, which law drafts have, and what the engine says of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch

from foldspec import Engine
from foldspec.drafters.denoise import Masked
from foldspec.drafters.denoise_uniform import Annealed
from foldspec.drafters.dflash import DFlash, DFlashNetwork
from foldspec.effort import ORDERS, Q_MODES, Effort
from foldspec.errors import UsageError
from foldspec.laws import Law
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.records import Sampled
from foldspec.sampling import DraftSampling


def test_the_order_that_is_taken_where_none_is_given() -> None:
    assert Effort(steps=2).filled("entropy").order == "entropy"
    assert Effort(confidence=0.9).filled("entropy").order == "dynamic_top1"
    assert Effort(entropy_bound=0.1).filled("static").order == "entropy"
    assert Effort(confidence=0.9, order="dynamic").filled("entropy").order == "dynamic"


def test_exact_is_given_up_where_drawn_tokens_decide_which_step_is_the_last() -> None:
    by_token = Effort(confidence=0.9, order="dynamic")
    assert by_token.settled(drawn=True).q_mode == "point_mass"
    assert by_token.settled(drawn=False) == by_token  # an argmax is a point mass anyway
    for other in (
        Effort(confidence=0.9, order="dynamic", steps=1),
        Effort(confidence=0.9, order="dynamic", q_mode="reveal_step"),
        Effort(confidence=0.9, order="dynamic_top1"),
        *(Effort(steps=4, order=order) for order in ORDERS[:6]),
    ):
        assert other.settled(drawn=True) == other


def test_which_drafts_follow_their_laws() -> None:
    """By its own word; ``test_denoised_law.py`` holds it to that."""
    many = [Effort(steps=4, order=order) for order in ORDERS[:6]]
    many += [Effort(confidence=0.5, order=order) for order in ORDERS[6:]] + [Effort(entropy_bound=0.1, order="entropy")]
    for each in many:
        for mode in Q_MODES:
            effort = Effort(each.steps, each.confidence, each.entropy_bound, each.order, mode)
            assert not effort.biased(drawn=False)
            assert bool(effort.biased(drawn=True)) == (mode == "reveal_step" and each.order != "sequential")
    assert not Effort(order="static", q_mode="reveal_step").biased(drawn=True)
    assert not Effort(steps=1, confidence=0.5, order="dynamic", q_mode="reveal_step").biased(drawn=True)


# ------------------------------------------------------------------------------------------------------------ proposals


def test_drafts_come_in_any_order_and_again_until_they_are_settled() -> None:
    a, b = (Law(torch.tensor(row).log()) for row in ([0.5, 0.5], [0.1, 0.9]))
    proposal: Sampled[Law] = Sampled(lambda law, place, step: 10 * place + step)
    assert proposal.draw(a, 2) == 20
    with pytest.raises(KeyError):
        assert proposal.tokens
    assert (proposal.draw(a, 0), proposal.draw(b, 1, 3), proposal.draw(b, 0, 4)) == (0, 13, 4)
    assert proposal.tokens == (4, 13, 20) and proposal.law(0) is b and proposal.law(2) is a
    proposal.settle(1)
    assert proposal.law(1).token == 13 and proposal.tokens == (4, 13, 20)
    with pytest.raises(AssertionError):
        proposal.draw(a, 1)
    assert proposal.draw(a) == 30
    proposal.cut(2)
    assert proposal.tokens == (4, 13)


def test_point_mass_is_for_any_drafter_that_draws() -> None:
    proposal = DraftSampling(1.0, effort=Effort(q_mode="point_mass")).begin(Noise(3), 7)
    tokens = [proposal.draw(Law(torch.zeros(50))) for _ in range(4)]
    assert [proposal.law(i).token for i in range(4)] == tokens == list(proposal.tokens)


# --------------------------------------------------------------------------------------------------------------- blocks


def rows(canvas: list[int | None]) -> torch.Tensor:
    """Logits of five ids that differ from place to place, and with every token that is known."""
    known = sum((i + 2) * (token + 1) for i, token in enumerate(canvas) if token is not None)
    return torch.tensor([[float((3 * i + 7 * j + known) % 11) / 3 for j in range(5)] for i in range(len(canvas))])


@pytest.mark.parametrize("order", ORDERS)
def test_at_temperature_0_all_q_modes_are_one(order: str) -> None:
    """Drafts are an argmax, and places are chosen by how sure the network is at temperature 1."""
    threshold = 0.3 if order.startswith("dynamic") else None
    found = set()
    for mode in Q_MODES:
        block = Masked(Effort(3, threshold, None, order, mode), DraftSampling(), Noise(0), 4, 6)
        while not block.done:
            best = rows(block.canvas).argmax(-1)
            before = block.masked
            block.step(rows(block.canvas)[before])
            assert all(block.canvas[i] == int(best[i]) for i in before if i not in block.masked)
        proposal = block.proposal
        assert [proposal.law(i).token for i in range(6)] == list(proposal.tokens) == block.canvas
        found.add(proposal.tokens)
    assert len(found) == 1 and (block.steps_used < 6 if threshold else block.steps_used == 3)


def test_blocks_of_a_round_go_on_from_one_another() -> None:
    """SDAR's sub-blocks: quotas are of a whole block, of which some places may be known; places go on."""
    noise, effort = Noise(1), Effort(steps=2, order="sequential")
    first = Masked(effort, DraftSampling(1.0), noise, 4, 2, block=4)
    first.step(torch.zeros(2, 9))
    assert first.done and first.steps_used == 1
    second = Masked(effort, DraftSampling(1.0), noise, 4, 4, drafts=first.proposal)
    while not second.done:
        second.step(torch.zeros(len(second.masked), 9))
    assert second.proposal.tokens == (*first.canvas, *second.canvas) and second.steps_used == 2
    assert second.proposal.steps == 3
    laws = [second.proposal.law(i).token is None for i in range(6)]
    assert laws == [True, True, False, False, True, True]  # both of the first block are of its last step


def test_what_is_barred_is_never_drafted() -> None:
    """The mask id, whether it is -inf or not among the ids; in a uniform block a random id may be in the canvas."""
    ids = torch.tensor([0, 2, 3])
    for seed in range(20):
        block = Masked(Effort(steps=2), DraftSampling(1.0), Noise(seed), 0, 4)
        uniform = Annealed(Effort(steps=2), DraftSampling(1.0), Noise(seed), 0, 4, 5)
        while not block.done:
            block.step(torch.tensor([0.0, -torch.inf, 0.0, 0.0]).expand(len(block.masked), 4))
        while not uniform.done:
            uniform.step(torch.zeros(4, 3), ids)
        assert 1 not in block.canvas and set(uniform.proposal.tokens) <= {0, 2, 3}


# --------------------------------------------------------------------------------------------------------------- engine


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A drafter that says that it takes efforts."""
    monkeypatch.setattr(DFlashNetwork, "efforts", frozenset({"steps", "confidence", "entropy_bound", "order"}))
    target, drafter = str(tiny.write_target(tmp_path / "t")), str(tiny.write_drafter(tmp_path / "d", tiny.DEEPSPEC))
    with Engine.load(target=target, drafter=drafter) as engine:
        yield engine


def test_the_engine_says_which_q_mode_runs(engine: Engine) -> None:
    drawn = engine.using(confidence=0.9, order="dynamic", draft_temperature=1.0)
    assert drawn.settings()["q_mode"] == "point_mass" and drawn.lossless
    assert any("q_mode exact became point_mass" in notice for notice in drawn.notices)
    assert drawn.using(order="dynamic_top1").settings()["q_mode"] == "exact"
    for other in (engine, engine.using(confidence=0.9, order="dynamic"), drawn.using(draft_tokens=0)):
        assert other.settings()["q_mode"] == "exact" and not any("q_mode" in notice for notice in other.notices)
    assert engine.using(steps=4).settings()["order"] == "static"


def test_the_engine_says_when_drafts_mislead_the_rule(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DFlash, "biased", "drafts are taken for what they are not")
    biased = engine.using(q_mode="reveal_step", steps=2, draft_temperature=1.0)
    assert not biased.lossless and biased.law == (
        "not the target's, if it is sampled from: drafts are taken for what they are not"
    )
    assert biased.settings()["lossless"] is False
    assert biased.using(accept="match").lossless and "token for token" in biased.using(accept="match").law
    assert biased.using(draft_tokens=0).lossless
    lossy = biased.using(accept="linear", leniency=0.5)
    assert not lossy.lossless and "taken for what" in lossy.law and "lambda 0.5" in lossy.law


def test_an_effort_that_means_nothing_to_the_drafter_is_refused(engine: Engine) -> None:
    engine.using(steps=2, draft_tokens=0)
    with pytest.raises(UsageError, match="steps: is for a drafter with a network"):
        engine.using(steps=2, drafter="lookup")


def test_feature_conditioned_drafters_have_one_step(tmp_path: Path) -> None:
    target, drafter = str(tiny.write_target(tmp_path / "t")), str(tiny.write_drafter(tmp_path / "d", tiny.DEEPSPEC))
    with Engine.load(target=target, drafter=drafter, steps=1) as engine:
        assert engine.lossless and engine.using(q_mode="reveal_step", draft_temperature=1.0).lossless
        for wrong in ({"steps": 2}, {"confidence": 0.5}, {"entropy_bound": 0.1}, {"order": "entropy"}):
            with pytest.raises(UsageError, match="one step: a second would need the target's features"):
                engine.using(**wrong)


def test_options_have_an_effort() -> None:
    options = MethodOptions(steps=3, order="entropy", q_mode="reveal_step")
    assert options.effort == Effort(3, None, None, "entropy", "reveal_step")
