"""The law of lossy output, through the real round loop, against the claimed one; lambda 0 and 1."""

from __future__ import annotations

import types
from typing import Any

import pytest
import relaxing
import torch
from enumerating import EnumeratedNoise, outcomes
from output_laws import keys_of, mutant, output_law
from relaxing import ByHand, draft_law, relaxed_law
from tables import IDS, PROMPT, TARGET, TableDrafter, filtered, plain_law, processed, run, total_variation

from foldspec.acceptance import cactus, lenience, linear, make_rule, relaxed, typical
from foldspec.laws import Law
from foldspec.noise import Noise
from foldspec.options import SamplingParams
from foldspec.records import Proposal, Sampled
from foldspec.sampling import DraftSampling

POINT, DRAWN = DraftSampling(), DraftSampling(temperature=1.3)
FEW = DraftSampling(temperature=1.3, top_k=3, top_p=0.9)
PLAIN = {"temperature": 1.0}
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.7}
Case = tuple[str, dict[str, Any], ByHand, TableDrafter, dict[str, Any]]


def case(rule: str, by_hand: ByHand, drafter: TableDrafter, params: dict[str, Any], **options: Any) -> Case:
    return rule, options, by_hand, drafter, params


L = relaxing
CASES: dict[str, Case] = {
    "linear, drawn": case("linear", L.linear(0.4), TableDrafter(DRAWN), PLAIN, leniency=0.4),
    "linear, point mass": case("linear", L.linear(0.3), TableDrafter(POINT), PLAIN, leniency=0.3),
    "linear, chain, by position": case(
        "linear", L.linear(0.2, 0.8), TableDrafter(FEW, chain=True), PLAIN, leniency=(0.2, 0.8)
    ),
    "linear, point mass, by position": case(
        "linear", L.linear(0.7, 0.0), TableDrafter(POINT), PLAIN, leniency=(0.7, 0.0)
    ),
    "linear, both filtered": case("linear", L.linear(0.3), TableDrafter(FEW), PLAIN | {"top_k": 2}, leniency=0.3),
    "linear, draft vocabulary, penalties": case(
        "linear", L.linear(0.6), TableDrafter(DRAWN, ids=[0, 2]), PLAIN | PENALTIES, leniency=0.6
    ),
    "linear, all of the drafter's": case(
        "linear", L.linear(1.0), TableDrafter(FEW), PLAIN | {"top_p": 0.6}, leniency=1.0
    ),
    "linear at temperature 0": case("linear", L.linear(0.4), TableDrafter(FEW), {}, leniency=0.4),
    "linear at temperature 0, point mass": case("linear", L.linear(0.4), TableDrafter(POINT), {}, leniency=0.4),
    "argmax of the mixture": case(
        "linear", L.mixture_argmax(0.6), TableDrafter(FEW), PENALTIES, leniency=0.6, at_zero="mixture_argmax"
    ),
    "argmax of the mixture, point mass": case(
        "linear", L.mixture_argmax(0.45), TableDrafter(POINT), {}, leniency=0.45, at_zero="mixture_argmax"
    ),
    "lenience, drawn": case("lenience", L.lenience(0.5), TableDrafter(FEW), PLAIN, leniency=0.5),
    "lenience, point mass": case("lenience", L.lenience(0.3), TableDrafter(POINT), PLAIN, leniency=0.3),
    "lenience, its own residual": case(
        "lenience",
        L.lenience(0.5, relaxed=True),
        TableDrafter(FEW, chain=True),
        PLAIN | {"top_k": 3},
        leniency=0.5,
        residual="relaxed",
    ),
    "lenience at temperature 0": case("lenience", L.lenience(0.2), TableDrafter(FEW), PENALTIES, leniency=0.2),
    "cactus, drawn": case("cactus", L.cactus(0.1), TableDrafter(FEW), PLAIN, leniency=0.1),
    "cactus, point mass": case("cactus", L.cactus(0.2), TableDrafter(POINT), PLAIN, leniency=0.2),
    "cactus, exact KL": case(
        "cactus", L.cactus(0.05, "exact_kl"), TableDrafter(FEW), PLAIN, leniency=0.05, divergence="exact_kl"
    ),
    "cactus, target top-k": case("cactus", L.cactus(0.05), TableDrafter(FEW), PLAIN | {"top_k": 3}, leniency=0.05),
    "cactus, modified, point mass": case(
        "cactus", L.cactus(0.1, "exact_kl"), TableDrafter(POINT), PLAIN, leniency=0.1, divergence="modified"
    ),
    "cactus, chi-square": case(
        "cactus", L.cactus(0.1, "chi2"), TableDrafter(FEW, chain=True), PLAIN, leniency=0.1, divergence="chi2"
    ),
    "cactus, total variation, verifier": case(
        "cactus",
        L.cactus(0.1, "tv", verifier=True),
        TableDrafter(FEW),
        PLAIN,
        leniency=0.1,
        divergence="tv",
        residual="verifier",
    ),
    "typical, drawn": case("typical", L.typical(), TableDrafter(FEW), PLAIN),
    "typical by the entropy": case("typical", L.typical(0.9, 0.5), TableDrafter(FEW), PLAIN, epsilon=0.9, factor=0.5),
    "typical, point mass": case("typical", L.typical(0.3, 1.2), TableDrafter(POINT), PLAIN, epsilon=0.3, factor=1.2),
}


def params_of(name: str) -> SamplingParams:
    _, _, _, drafter, options = CASES[name]
    longer = not drafter.sampling.temperature or name == "linear, all of the drafter's"
    return SamplingParams(max_tokens=5 if longer else 4, **options)


@pytest.mark.parametrize("name", CASES)
def test_the_output_has_the_law_that_is_claimed(name: str) -> None:
    """Over at least two rounds with drafts that fall."""
    rule, options, by_hand, drafter, _ = CASES[name]
    params = params_of(name)
    wanted, _ = relaxed_law(by_hand, drafter, params, PROMPT[-1])
    made = make_rule(rule, **options)
    assert total_variation(output_law(made, drafter, params), wanted) < 1e-12
    assert total_variation(wanted, plain_law(params, PROMPT[-1])) > 1e-3 and not made.lossless


@pytest.mark.parametrize("sampling", [DRAWN, POINT])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_drafted_position_has_the_mixture_and_the_last_token_the_targets_law(
    sampling: DraftSampling, share: float
) -> None:
    """The two claims themselves, read off the enumerated law: the first position of a round, and the token after the
    drafts of a round in which all stand (at lambda 1 they always do)."""
    drafter, params = TableDrafter(sampling), SamplingParams(max_tokens=6 if share == 1 else 4, temperature=1.0)
    first = PROMPT[-1]
    p = filtered(TARGET[PROMPT[-1], first], 1.0)
    q = draft_law(drafter, 0, first)
    found = output_law(make_rule("linear", leniency=share), drafter, params)
    law = [sum(mass for output, mass in found.items() if output[1] == i) for i in range(IDS)]
    assert law == pytest.approx([(1 - share) * a + share * b for a, b in zip(p, q, strict=True)], abs=1e-12)
    if share == 1:
        for a in range(IDS):
            for b in range(IDS):
                both = [sum(m for out, m in found.items() if out[1:4] == (a, b, c)) for c in range(IDS)]
                drafted = q[a] * draft_law(drafter, 1, first)[b]
                assert both == pytest.approx([drafted * c for c in filtered(TARGET[a, b], 1.0)], abs=1e-12)


@pytest.mark.parametrize("name", ["linear, both filtered", "linear at temperature 0", "lenience at temperature 0"])
def test_tokens_that_the_target_rules_out_are_counted(name: str) -> None:
    rule, options, by_hand, drafter, _ = CASES[name]
    params = params_of(name)

    def once(branches: Any) -> int:
        (request,) = run(make_rule(rule, **options), drafter, [params], [EnumeratedNoise(branches)])
        return sum(each.outside for each in request.rounds)

    counted = sum(count * mass for count, mass in outcomes(once).items())
    _, wanted = relaxed_law(by_hand, drafter, params, PROMPT[-1])
    assert counted == pytest.approx(wanted, abs=1e-12) and wanted > 0.01


def test_drafts_that_a_stop_cuts_off_are_not_counted() -> None:
    drafter, params = TableDrafter(POINT), SamplingParams(max_tokens=40)
    rule = make_rule("linear", leniency=1.0)
    (whole,) = run(rule, drafter, [params], [Noise(0)])
    second = whole.rounds[1]
    assert second.outside == second.accepted == 2 and second.committed[0] not in whole.output[:4]
    (cut,) = run(rule, drafter, [params], [Noise(0)], stop_ids=second.committed[:1])
    assert cut.rounds[1].accepted == 2 and cut.rounds[1].committed == second.committed[:1]
    assert cut.rounds[1].outside == 1 and cut.done


# --------------------------------------------------------------------------------------------- the ends of the scale

STRICTEST: dict[str, dict[str, Any]] = {
    "linear": {"leniency": 0.0},
    "linear by position": {"leniency": (0.0, 0.0)},
    "lenience": {"leniency": 1.0},
    "lenience relaxed": {"leniency": 1.0, "residual": "relaxed"},
    "cactus": {"leniency": 0.0},
    "cactus exact_kl": {"leniency": 0.0, "divergence": "exact_kl"},
    "cactus verifier": {"leniency": 0.0, "residual": "verifier"},
}


@pytest.mark.parametrize("name", STRICTEST)
@pytest.mark.parametrize("sampling", [DRAWN, FEW, POINT])
@pytest.mark.parametrize("options", [PLAIN, PLAIN | {"top_k": 3} | PENALTIES, {}])
def test_at_the_strict_end_a_rule_is_exact_number_for_number(
    name: str, sampling: DraftSampling, options: dict[str, Any]
) -> None:
    """The same text and the same rounds under the same seeds, with the real noise."""
    rule = make_rule(name.split()[0], **STRICTEST[name])
    assert rule.lossless and "not the target's" not in rule.law()
    params, noises = [SamplingParams(max_tokens=120, **options)] * 3, [Noise(seed) for seed in range(3)]
    ours, exact = (run(each, TableDrafter(sampling, chain=True), params, noises) for each in (rule, make_rule("exact")))
    assert [each.rounds for each in ours] == [each.rounds for each in exact]
    assert sum(len(each.rounds) for each in exact) < 3 * 119


@pytest.mark.parametrize("sampling", [DRAWN, FEW, POINT])
@pytest.mark.parametrize("options", [PLAIN, PLAIN | {"top_k": 1}, {}])
def test_at_lambda_1_every_draft_stands(sampling: DraftSampling, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=300, **options)
    done = run(make_rule("linear", leniency=1.0), TableDrafter(sampling), [params] * 2, [Noise(8), Noise(9)])
    for request in done:
        assert all(each.accepted == len(each.drafted) for each in request.rounds)
        assert len(request.rounds) == 100


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("sampling", [DRAWN, POINT])
def test_unverified_output_is_the_drafters_own_up_to_the_limit(sampling: DraftSampling, chain: bool) -> None:
    """Two blocks of two, each from the last token before it, and one token of the target's where nothing is drafted."""
    drafter, params = TableDrafter(sampling, chain=chain), SamplingParams(max_tokens=6, temperature=1.0)
    wanted = {(PROMPT[-1],): 1.0}
    for number in range(5):
        longer: dict[tuple[int, ...], float] = {}
        for output, mass in wanted.items():
            row = number % 2
            law = draft_law(drafter, row, output[-1] if chain or not row else output[-2])
            law = filtered(TARGET[output[-2], output[-1]], 1.0) if number == 4 else law
            longer |= {(*output, token): mass * each for token, each in enumerate(law) if each}
        wanted = longer
    rule = make_rule("unverified")
    assert total_variation(output_law(rule, drafter, params), wanted) < 1e-12 and not rule.lossless


@pytest.mark.parametrize("options", [PLAIN, PLAIN | {"top_k": 1}, {}])
def test_unverified_rounds_are_blocks_and_count_what_the_target_rules_out(options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=202, **options)
    (done,) = run(make_rule("unverified"), TableDrafter(FEW), [params], [Noise(8)])
    assert all(each.committed == each.drafted and each.accepted == len(each.drafted) == 2 for each in done.rounds[:-1])
    assert done.rounds[-1].drafted == () and len(done.rounds) == 101
    outside = 0
    for i, token in enumerate(done.output[:-1]):
        before = (*PROMPT, *done.output)[i : i + 2]
        outside += i > 0 and processed(TARGET[before], params, PROMPT, done.output[:i])[token] == 0
    assert sum(each.outside for each in done.rounds) == outside and (outside > 0) == (options != PLAIN)


@pytest.mark.parametrize(
    "name", ["linear, drawn", "linear, point mass", "lenience, drawn", "cactus, drawn", "typical, drawn"]
)
def test_no_number_is_looked_at_twice(name: str) -> None:
    rule, options, _, drafter, _ = CASES[name]
    for keys in keys_of(make_rule(rule, **options), drafter):
        assert len({key[1:] for key in keys}) == len(keys)


# ------------------------------------------------------------------------------------------------------------- mutants


def mixed(p: Law, proposal: Proposal, last: int) -> Law:
    """p and the law of the last draft, half each."""
    if not isinstance(proposal, Sampled) or not last:
        return p
    q = proposal.law(last - 1)
    return Law(torch.tensor([0.5 * p.prob(i) + 0.5 * q.prob(i) for i in range(IDS)], dtype=torch.float64).log())


# name -> module, what is changed, into what, and the case above that shows it
WRONG: dict[str, tuple[types.ModuleType, str, str, str]] = {
    "bonus from the relaxed law": (
        relaxed,
        "noise.draw(target.law(last), Purpose.TARGET",
        "noise.draw(mixed(target.law(last), proposal, last), Purpose.TARGET",
        "linear, both filtered",
    ),
    "bonus from the draft's row": (relaxed, "target.law(last)", "target.law(last - 1)", "linear, both filtered"),
    "residual from p": (linear, "draft.p.minus(draft.q)", "draft.p", "linear, both filtered"),
    "one lambda for all positions": (
        linear,
        "min(draft.row, len(self._shares) - 1)",
        "0",
        "linear, chain, by position",
    ),
    "the shares exchanged": (linear, "(1 - share) * draft.p", "share * draft.p", "linear, both filtered"),
    "p of another row": (
        relaxed,
        "p, position = target.law(i)",
        "p, position = target.law(i + 1)",
        "linear, both filtered",
    ),
    "residual stream = accept stream": (
        relaxed,
        "Purpose.RESIDUAL, position",
        "Purpose.ACCEPT, position",
        "linear, both filtered",
    ),
    "lenience that makes drafts dearer": (
        lenience,
        "draft.p.prob(draft.token) / self._lenience",
        "draft.p.prob(draft.token) * self._lenience",
        "lenience, drawn",
    ),
    "the other residual of lenience": (
        lenience,
        'if residual == "relaxed"',
        'if residual != "relaxed"',
        "lenience, drawn",
    ),
    "lenience at temperature 0 by the mass alone": (
        lenience,
        ">= self._lenience * raw.prob(best)",
        ">= self._lenience",
        "lenience at temperature 0",
    ),
    "cactus with half the budget": (cactus, "2 * delta * a", "delta * a", "cactus, drawn"),
    "cactus that leaves the others as they are": (cactus, "others / (others - step)", "1.0", "cactus, drawn"),
    "the other residual of cactus": (
        cactus,
        'self._residual == "verifier"',
        'self._residual != "verifier"',
        "cactus, exact KL",
    ),
    "typical by the entropy's sign": (typical, "-draft.p.entropy()", "draft.p.entropy()", "typical by the entropy"),
    "typical that draws in place of a draft": (
        typical,
        "Law.point(draft.p.likeliest())",
        "draft.p",
        "typical, drawn",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mutants_have_another_law(name: str) -> None:
    """Each in a case that the code itself passes above."""
    module, old, new, like = WRONG[name]
    names = mutant(module, old, new, mixed=mixed)
    rule, options, by_hand, drafter, _ = CASES[like]
    made = make_rule(rule, **options)
    if module is relaxed:
        made = type("Mutant", (type(made),), {"judge": names["Relaxed"].judge})(**options)
    else:
        made = names[type(made).__name__](**options)
    params = params_of(like)
    wanted, _ = relaxed_law(by_hand, drafter, params, PROMPT[-1])
    assert total_variation(output_law(made, drafter, params), wanted) > 1e-3
