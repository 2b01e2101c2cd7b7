"""Diffusion drafts under every rule, q_mode, order and effort, by every outcome of the noise: whether each draft
follows the law that it is held with, and the law of what comes out of the real round loop."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import pytest
import relaxing
from denoising import (
    Begin,
    Drafted,
    Toy,
    ToyDrafter,
    continued,
    drafted,
    output_law,
    plain_law,
    random_toy,
    run_law,
    run_law_by_hand,
    unfaithful,
)
from output_laws import mutant
from relaxing import ByHand
from tables import total_variation

from foldspec import sampling
from foldspec.acceptance import make_rule, relaxed
from foldspec.drafters import denoise, denoise_uniform
from foldspec.drafters.denoise import Masked
from foldspec.drafters.denoise_uniform import Ancestral, Annealed
from foldspec.effort import ORDERS, Q_MODES, Effort
from foldspec.sampling import DraftSampling

IDS, DRAWN = 2, DraftSampling(temperature=1.0)
PAIR, TRIPLE = random_toy(IDS, 2), random_toy(IDS, 3)

STILL = "uniform, until it is still"
# what a drafter does, but for its q_mode: name -> effort, and what makes a block
EFFORTS: dict[str, tuple[Effort, Begin]] = {
    "one step": (Effort(), Masked),
    **{order: (Effort(steps=2, order=order), Masked) for order in ORDERS[:6]},
    "origin, Dream's coins": (Effort(steps=2, order="origin"), partial(Masked, quota="dream")),
    "dynamic": (Effort(confidence=0.7, order="dynamic"), Masked),
    "dynamic_top1": (Effort(confidence=0.7), Masked),
    "entropy bound": (Effort(entropy_bound=0.3), Masked),
    "entropy bound, sequential": (Effort(entropy_bound=0.6, order="sequential"), Masked),
    "uniform, ancestral": (Effort(steps=2), partial(Ancestral, vocabulary=IDS)),
    "uniform, annealed": (Effort(steps=2, entropy_bound=0.3), partial(Annealed, vocabulary=IDS)),
    STILL: (Effort(steps=3), partial(Annealed, vocabulary=IDS, still=0.5)),
}
COMBINATIONS = [(name, mode) for name in EFFORTS for mode in Q_MODES if name != STILL or mode == "exact"]


def drafter_of(toy: Toy, name: str, mode: str) -> ToyDrafter:
    effort, begin = EFFORTS[name]
    drafter = ToyDrafter(toy, dataclasses.replace(effort, q_mode=mode), DRAWN, begin)
    drafter.biased = drafter.biased if begin is Masked or "coins" in name else ""
    return drafter


@cache
def blocks(toy: Toy, name: str, mode: str) -> tuple[list[Drafted], str]:
    """Every block that may be drafted, and why drafts do not follow their laws, by the drafter's own word."""
    drafter = drafter_of(toy, name, mode)
    return drafted(toy, drafter, IDS), drafter.biased


def match(p: list[float], raw: list[float], q: list[float], row: int) -> tuple[list[float], list[float]]:
    """A token of p comes in any case."""
    return [a * b for a, b in zip(p, q, strict=True)], [a * (1 - b) for a, b in zip(p, q, strict=True)]


RULES: dict[str, tuple[str, dict[str, Any], ByHand]] = {
    "exact": ("exact", {}, relaxing.linear(0.0)),
    "match": ("match", {}, match),
    "linear 0": ("linear", {"leniency": 0.0}, relaxing.linear(0.0)),
    "linear 0.4": ("linear", {"leniency": 0.4}, relaxing.linear(0.4)),
    "linear 0.2/0.7": ("linear", {"leniency": (0.2, 0.7)}, relaxing.linear(0.2, 0.7)),
    "linear 1": ("linear", {"leniency": 1.0}, relaxing.linear(1.0)),
    "lenience 0.5": ("lenience", {"leniency": 0.5}, relaxing.lenience(0.5)),
    "lenience 0.5, relaxed": (
        "lenience",
        {"leniency": 0.5, "residual": "relaxed"},
        relaxing.lenience(0.5, relaxed=True),
    ),
    "cactus 0.1": ("cactus", {"leniency": 0.1}, relaxing.cactus(0.1)),
    "cactus 0.05, exact KL": (
        "cactus",
        {"leniency": 0.05, "divergence": "exact_kl"},
        relaxing.cactus(0.05, "exact_kl"),
    ),
    "typical": ("typical", {"epsilon": 0.3, "factor": 0.9}, relaxing.typical(0.3, 0.9)),
}


@cache
def run_of(toy: Toy, rule: str, name: str, mode: str) -> dict[tuple[int, ...], float]:
    made, options, _ = RULES[rule]
    return run_law(toy, make_rule(made, **options), blocks(toy, name, mode)[0])


def off_target(toy: Toy, rule: str, name: str, mode: str) -> float:
    """Total variation of a whole block from plain decoding."""
    return total_variation(continued(toy, run_of(toy, rule, name, mode), toy.places), plain_law(toy, toy.places))


def off_claim(toy: Toy, rule: str, name: str, mode: str) -> float:
    """Total variation of a round from what the rule claims of drafts that follow their laws."""
    return total_variation(
        run_of(toy, rule, name, mode), run_law_by_hand(toy, RULES[rule][2], blocks(toy, name, mode)[0])
    )


def check(toy: Toy, rule: str, name: str, mode: str) -> None:
    """What is claimed is so; what is not claimed is not, in the larger toy."""
    biased = blocks(toy, name, mode)[1]
    made = make_rule(RULES[rule][0], **RULES[rule][1])
    if not biased:
        assert off_claim(toy, rule, name, mode) < 1e-12
    if made.lossless and not (biased and made.uses_q):
        assert off_target(toy, rule, name, mode) < 1e-12
    elif toy is TRIPLE and rule != "cactus 0.05, exact KL":
        assert off_target(toy, rule, name, mode) > 1e-3


@pytest.mark.parametrize("name, mode", COMBINATIONS)
def test_drafts_follow_their_laws_or_the_drafter_says_why_not(name: str, mode: str) -> None:
    """Each given its law and what stands before it."""
    toy = PAIR if "uniform" in name else TRIPLE
    found, biased = blocks(toy, name, mode)
    assert sum(each.mass for each in found) == pytest.approx(1.0)
    assert unfaithful(found) > 1e-2 if biased else unfaithful(found) < 1e-12
    if mode == "point_mass":
        assert all(max(law) == 1.0 for each in found for law in each.laws)


@pytest.mark.parametrize("name, mode", COMBINATIONS)
@pytest.mark.parametrize("rule", ["exact", "match"])
def test_the_lossless_rules_over_a_whole_block(rule: str, name: str, mode: str) -> None:
    check(PAIR if "uniform" in name else TRIPLE, rule, name, mode)


@pytest.mark.parametrize("name, mode", COMBINATIONS)
def test_every_rule(name: str, mode: str) -> None:
    for rule in RULES:
        check(PAIR, rule, name, mode)


@pytest.mark.slow
@pytest.mark.parametrize("name, mode", [each for each in COMBINATIONS if each[0] != STILL])
def test_every_rule_over_three_places(name: str, mode: str) -> None:
    for rule in RULES:
        check(TRIPLE, rule, name, mode)


@pytest.mark.parametrize("name", EFFORTS)
def test_at_lambda_1_every_draft_stands(name: str) -> None:
    assert all(len(run) == PAIR.places + 1 for run in run_of(PAIR, "linear 1", name, "exact"))


# ------------------------------------------------------------------------------------------------------------- keys


def right_first(before: Any, canvas: Any) -> Any:
    """The right place is the surer one, and says much about the left one."""
    if len(canvas) == 1 or canvas[1] is None:
        return [[0.5, 0.5], [0.6, 0.4]]
    return [[0.9, 0.1] if canvas[1] == 0 else [0.1, 0.9], [0.6, 0.4]]


NEXT = {0: [0.3, 0.7], 1: [0.8, 0.2]}
COUPLED = Toy(lambda out: NEXT[out[-1]] if out else [0.2, 0.8], right_first, 2)
KEY = "anchor + 1 + i, anchor=anchor, step=step)"
# what draws are keyed by -> what stands for the key, the toy, the order, and how far off a whole output then is
KEYS: dict[str, tuple[str, Toy, str, float]] = {
    "the position alone": ("anchor + 1 + i)", COUPLED, "topk_margin", 0.05),
    "no anchor": ("anchor + 1 + i, step=step)", COUPLED, "topk_margin", 0.04),
    "no step": ("anchor + 1 + i, anchor=anchor)", PAIR, "static", 1e-3),
}


def over_rounds(toy: Toy, order: str, mode: str, how: Any, length: int = 4, rule: str = "exact") -> float:
    drafter = ToyDrafter(toy, Effort(steps=2, order=order, q_mode=mode), how)
    found, fell = output_law(toy, make_rule(rule), drafter, length)
    assert fell >= 2
    return total_variation(found, plain_law(toy, length))


@pytest.mark.parametrize(
    "toy, order, mode, rule",
    [
        (COUPLED, "topk_margin", "exact", "exact"),
        (COUPLED, "static", "exact", "match"),
        (COUPLED, "entropy", "point_mass", "exact"),
        (PAIR, "origin", "exact", "exact"),
    ],
)
def test_the_law_over_rounds_in_which_drafts_fall(toy: Toy, order: str, mode: str, rule: str) -> None:
    """Two and more of them, and the noise is that of the whole request."""
    assert over_rounds(toy, order, mode, DRAWN, 3 if order == "origin" else 4, rule) < 1e-12


@pytest.mark.parametrize("name", KEYS)
def test_drafts_need_their_anchor_and_their_step_in_the_key(name: str) -> None:
    key, toy, order, least = KEYS[name]
    length = 4 if toy is COUPLED else 3
    wrong = mutant(sampling, KEY, key)["DraftSampling"](temperature=1.0)
    assert over_rounds(toy, order, "exact", DRAWN, length) < 1e-12
    assert over_rounds(toy, order, "exact", wrong, length) > least


# ---------------------------------------------------------------------------------------------------------- mutants


def test_an_early_draft_that_keeps_its_law_is_noticed() -> None:
    names = mutant(denoise, ' or (self._effort.q_mode == "exact" and not last)', "")
    effort = dataclasses.replace(EFFORTS["entropy"][0], q_mode="exact")
    found = drafted(TRIPLE, ToyDrafter(TRIPLE, effort, DRAWN, names["Masked"]), IDS)
    law = run_law(TRIPLE, make_rule("exact"), found)
    assert total_variation(continued(TRIPLE, law, 3), plain_law(TRIPLE, 3)) > 1e-3


def test_a_uniform_block_that_keeps_tokens_of_an_earlier_step_is_noticed() -> None:
    """What was drawn in the last step must be the draft everywhere: here the surest tokens of the step before stay."""
    source = "drawn = [self._drafts.draw(law, place, number) for place, law in enumerate(laws)]"
    stays = "drawn = [self._drafts.draw(law, place, number) if number == 0 or self.canvas[place] == 0 else "
    stays += "self._drafts._drawn[place][0] for place, law in enumerate(laws)]"
    names = mutant(denoise_uniform, source, stays)
    begin = partial(names["Annealed"], vocabulary=IDS)
    found = drafted(PAIR, ToyDrafter(PAIR, Effort(steps=2, entropy_bound=0.3), DRAWN, begin), IDS)
    assert unfaithful(found) > 1e-2


BONUS = ("noise.draw(target.law(last), Purpose.TARGET", "noise.draw(proposal.law(last - 1), Purpose.TARGET")
POINTS = ("Law.point(token) if isinstance(proposal, PointMass) else proposal.law(i)", "Law.point(token)")


@pytest.mark.parametrize("rule, change", [("linear 1", BONUS), ("linear 0.4", BONUS), ("lenience 0.5", POINTS)])
def test_mutants_of_the_rules_have_another_law(rule: str, change: tuple[str, str]) -> None:
    """The token after the drafts from the relaxed law; every draft taken for a point mass."""
    name, options, by_hand = RULES[rule]
    judge = mutant(relaxed, *change)["Relaxed"].judge
    wrong = type("Mutant", (type(make_rule(name, **options)),), {"judge": judge})(**options)
    found, _ = blocks(TRIPLE, "entropy", "exact")
    assert off_claim(TRIPLE, rule, "entropy", "exact") < 1e-12
    assert total_variation(run_law(TRIPLE, wrong, found), run_law_by_hand(TRIPLE, by_hand, found)) > 1e-3
