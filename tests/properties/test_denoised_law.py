"""Diffusion drafts under every rule, q_mode, order and effort, by every outcome of the noise: whether each draft
follows the law that it is held with, and the law of what comes out of the real round loop."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from typing import Any

import pytest
from denoising import (
    Toy,
    ToyDrafter,
    continued,
    drafted,
    generate,
    output_law,
    plain_law,
    run_law,
    run_law_by_hand,
    unfaithful,
)
from losslessness import (
    COMBINATIONS,
    DOCUMENT,
    DRAWN,
    EFFORTS,
    IDS,
    PAIR,
    RULES,
    STILL,
    TRIPLE,
    blocks,
    off_claim,
    off_target,
    run_of,
    with_tables,
)
from output_laws import mutant
from scipy import stats
from tables import total_variation

from foldspec import sampling
from foldspec.acceptance import make_rule, relaxed
from foldspec.drafters import denoise, denoise_uniform
from foldspec.effort import Effort
from foldspec.noise import Noise


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
        (COUPLED, "topk_margin", "exact", "match"),
        (COUPLED, "entropy", "point_mass", "exact"),
        (PAIR, "origin", "exact", "exact"),
    ],
)
def test_the_law_over_rounds_in_which_drafts_fall(toy: Toy, order: str, mode: str, rule: str) -> None:
    """Two and more of them, and the noise is that of the whole request."""
    assert over_rounds(toy, order, mode, DRAWN, 4 if mode == "exact" and toy is COUPLED else 3, rule) < 1e-12


@pytest.mark.parametrize("name", KEYS)
def test_drafts_need_their_anchor_and_their_step_in_the_key(name: str) -> None:
    key, toy, order, least = KEYS[name]
    length = 4 if toy is COUPLED else 3
    wrong = mutant(sampling, KEY, key)["DraftSampling"](temperature=1.0)
    assert over_rounds(toy, order, "exact", DRAWN, length) < 1e-12
    assert over_rounds(toy, order, "exact", wrong, length) > least


@pytest.mark.slow
@pytest.mark.parametrize("key", [KEY, "anchor + 1 + i)"], ids=["its own key", "the position alone"])
def test_many_requests_with_the_real_noise(key: str) -> None:
    """Chi-square of whole outputs, each with its own seed."""
    how, count = mutant(sampling, KEY, key)["DraftSampling"](temperature=1.0), 4000
    drafter = ToyDrafter(COUPLED, Effort(steps=2, order="topk_margin"), how)
    rule, found = make_rule("exact"), Counter[tuple[int, ...]]()
    for seed in range(count):
        found[tuple(generate(COUPLED, rule, drafter, 4, Noise(seed)).output[1:])] += 1
    wanted = plain_law(COUPLED, 4)
    off = stats.chisquare([found[each] for each in wanted], [count * mass for mass in wanted.values()]).pvalue
    assert off > 1e-3 if key == KEY else off < 1e-9


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


# -------------------------------------------------------------------------------------------------------- the document


def test_the_documents_tables_are_what_comes_out() -> None:
    """``PYTHONPATH=tests:. python tests/losslessness.py`` writes them anew."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_tables(text) == text
