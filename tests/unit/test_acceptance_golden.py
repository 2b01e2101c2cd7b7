"""The rules against recorded numbers: single tokens, blocks with inverse-CDF draws, and the laws of what comes out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from deciding import decide
from enumerating import EnumeratedNoise, InverseCdf, outcomes
from scipy import special

from foldspec.acceptance import make_rule
from foldspec.acceptance.base import AcceptanceRule
from foldspec.acceptance.cactus import raised_by
from foldspec.laws import Law
from foldspec.records import PointMass, Sampled, Verdict

GOLDEN: dict[str, Any] = json.loads((tiny.GOLDEN / "golden_acceptance.json").read_text())
PAIRS = {pair["name"]: pair for pair in GOLDEN["acceptance"]["pairs"]}
POSITION = 1  # of the first drafted token: the prompt of these requests is one token


def logs(probs: Any) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def drafted(tokens: list[int], laws: list[list[float]]) -> Sampled[Law]:
    """Tokens as if they had been drawn from these laws."""
    proposal: Sampled[Law] = Sampled(lambda law, i, step: tokens[i])
    for law in laws:
        proposal.draw(Law(logs(law)))
    return proposal


# the golden file's name -> ours, the names of its parameters, and what else is given
NAMES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "lossless": ("exact", (), {}),
    "match": ("match", (), {}),
    "linear": ("linear", ("leniency",), {}),
    "lenience": ("lenience", ("leniency",), {}),
    "lenience_scaled": ("lenience", ("leniency",), {"residual": "relaxed"}),
    "cactus_taylor": ("cactus", ("leniency",), {}),
    "cactus_exact": ("cactus", ("leniency",), {"divergence": "exact_kl"}),
    "typical": ("typical", ("epsilon", "factor"), {}),
}


def rule_of(case: dict[str, Any]) -> AcceptanceRule:
    name, parameters, more = NAMES[case["rule"]]
    values = case["par"] if isinstance(case["par"], list) else [case["par"]] if parameters else []
    return make_rule(name, **dict(zip(parameters, values, strict=True)), **more)


def verdicts(rule: AcceptanceRule, p: Any, q: Any, token: int, **params: Any) -> dict[Verdict, float]:
    """What comes of one draft, each with its probability. ``q`` None: a point mass."""
    proposal = PointMass((token,)) if q is None else drafted([token], [q])
    rows = torch.stack([logs(p), logs([1.0] + [0.0] * (len(p) - 1))])  # id 0 follows a draft that stands
    return outcomes(lambda branches: decide(rule, rows, [proposal], EnumeratedNoise(branches), **params)[0])


def named(case: dict[str, Any]) -> str:
    return " ".join(str(case[key]) for key in ("pair", "rule", "par", "y") if key in case)


TOKENS = GOLDEN["acceptance"]["token"]


def test_no_case_was_lost() -> None:
    assert len(TOKENS) == 108 and len(GOLDEN["acceptance"]["distribution"]) == 174
    assert {case["rule"] for case in GOLDEN["acceptance"]["distribution"]} == set(NAMES)
    assert len(GOLDEN["cactus_table"]) == 70 and len(BLOCKS) == 16 and len(GOLDEN["greedy"]) == 10


@pytest.mark.parametrize("case", TOKENS, ids=named)
def test_one_token(case: dict[str, Any]) -> None:
    """Accepted below its probability and refused from there on (a block below has a number that is the very ratio);
    what replaces it is drawn from the residual. A token that p rules out is refused by a number of exactly 0."""
    pair, y, rule = PAIRS[case["pair"]], case["y"], rule_of(case)
    rows = torch.stack([logs(pair["p"]), logs(pair["p"])])
    for u, accepted in [*case["u_accept"], (case["accept_prob"] + 1e-12, False)]:
        if u < 1:
            proposal = drafted([y], [pair["q"]])
            (verdict,) = decide(rule, rows, [proposal], InverseCdf(POSITION, [u], 0.5), temperature=1.0)
            assert verdict.accepted == int(accepted), u
    found = verdicts(rule, pair["p"], pair["q"], y, temperature=1.0)
    stood = sum(mass for verdict, mass in found.items() if verdict.accepted)
    assert stood == pytest.approx(case["accept_prob"], abs=1e-10)
    if stood < 1 - 1e-9:
        instead = {v.next_token: mass / (1 - stood) for v, mass in found.items() if not v.accepted}
        assert [instead.get(i, 0.0) for i in range(len(pair["p"]))] == pytest.approx(case["residual"], abs=1e-10)


BLOCKS = GOLDEN["block_verify"]["cases"]


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: f"{case['name']} {case['rule']}")
def test_blocks(case: dict[str, Any]) -> None:
    block = GOLDEN["block_verify"]
    proposal = drafted(case["y"], block["Q"])
    noise = InverseCdf(POSITION, case["u"], case["v_final"])
    (verdict,) = decide(rule_of(case), logs(block["P"]), [proposal], noise, temperature=1.0)
    assert verdict.accepted == case["accepted_draft"]
    assert [*case["y"][: verdict.accepted], verdict.next_token] == case["committed"]
    assert (verdict.accepted < len(case["y"])) == case["rejected"]
    assert verdict.accepted + 1 == case["tokens_this_round"]


@pytest.mark.parametrize("case", GOLDEN["acceptance"]["distribution"], ids=named)
def test_the_law_of_one_token(case: dict[str, Any]) -> None:
    """Of the token after one draft, and how often the draft stands; what comes although p rules it out is counted."""
    p, q = PAIRS[case["pair"]]["p"], PAIRS[case["pair"]]["q"]
    rule, law, stood, outside = rule_of(case), [0.0] * len(p), 0.0, 0.0
    for y, chance in enumerate(q):
        for verdict, mass in verdicts(rule, p, q, y, temperature=1.0).items() if chance else ():
            law[y if verdict.accepted else verdict.next_token] += chance * mass
            stood += chance * mass * verdict.accepted
            outside += chance * mass * len(verdict.outside)
    assert law == pytest.approx(case["output"], abs=1e-10)
    assert stood == pytest.approx(case["expected_accept"], abs=1e-10)
    ruled_out = sum(mass for mass, own in zip(case["output"], p, strict=True) if not own)
    assert outside == pytest.approx(ruled_out, abs=1e-10)
    assert not rule.lossless or law == pytest.approx(p, abs=1e-10)
    if "closed_form_accept" in case:
        apart = sum(abs(a - b) for a, b in zip(law, p, strict=True)) / 2
        assert (stood, apart) == pytest.approx((case["closed_form_accept"], case["closed_form_tv_to_p"]), abs=1e-10)


@pytest.mark.parametrize("case", GOLDEN["cactus_table"], ids=lambda case: f"{case['p_y']} {case['delta']}")
def test_how_far_cactus_raises_a_token(case: dict[str, Any]) -> None:
    a, delta = case["p_y"], case["delta"]
    assert a + raised_by(a, 1 - a, delta, "taylor") == pytest.approx(case["g_taylor"], abs=1e-11)
    for same in ("exact_kl", "modified"):
        assert a + raised_by(a, 1 - a, delta, same) == pytest.approx(case["g_exact"], abs=1e-11)


DIVERGENCES: dict[str, Callable[[float, float], float]] = {
    "exact_kl": lambda g, a: float(special.rel_entr(g, a) + special.rel_entr(1 - g, 1 - a)),
    "tv": lambda g, a: abs(g - a),
    "chi2": lambda g, a: (g - a) ** 2 / a + (g - a) ** 2 / (1 - a),
}


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("a", [1e-9, 0.003, 0.2, 0.5, 0.77, 0.999])
@pytest.mark.parametrize("delta", [1e-8, 0.01, 0.3, 2.0])
def test_the_budget_of_divergence_is_spent_and_not_exceeded(name: str, a: float, delta: float) -> None:
    g = a + raised_by(a, 1 - a, delta, name)
    spent = DIVERGENCES[name](min(g, 1.0), a)
    assert spent == pytest.approx(delta, rel=1e-6) if g < 1 - 1e-12 else spent <= delta * (1 + 1e-9) + 1e-12
    # the official code's second order of KL is a ball of chi-square of twice the radius
    assert raised_by(a, 1 - a, delta, "taylor") == pytest.approx(raised_by(a, 1 - a, 2 * delta, "chi2"), rel=1e-12)


def test_a_token_that_is_all_but_sure_is_raised_by_what_the_others_have() -> None:
    """1 - p(y) is taken as the sum of the others: as a difference it would have lost all but four digits here."""
    p = Law(torch.tensor([0.0, math.log(3e-13), -math.inf], dtype=torch.float64))
    assert p.others(0) == pytest.approx(3e-13, rel=1e-9)
    assert raised_by(p.prob(0), p.others(0), 1e-14, "taylor") == pytest.approx(math.sqrt(2e-14 * 3e-13), rel=1e-9)


# ------------------------------------------------------------------------------------------------------ temperature 0

GREEDY = [case for case in GOLDEN["greedy"] if "y" in case]
MIXTURES = [case for case in GOLDEN["greedy"] if "mixture" in case]
AS_EXACT = [make_rule("exact"), make_rule("match"), make_rule("typical"), make_rule("typical", epsilon=0.5, factor=2.0)]
AS_EXACT += [make_rule("cactus", leniency=d, divergence=name) for d in (0.0, 1.0, 50.0) for name in ("taylor", "tv")]
AS_EXACT += [make_rule("lenience", leniency=1.0), make_rule("linear", leniency=0.0, at_zero="mixture_argmax")]


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: str(case["y"]))
@pytest.mark.parametrize("drawn", [False, True])
def test_at_temperature_0(case: dict[str, Any], drawn: bool) -> None:
    """Most rules let a draft stand that is the argmax and no other; lenience one that is nearly as likely, and linear
    any with probability lambda. The argmax replaces what falls."""
    p, y = case["raw_p"], case["y"]
    q = p if drawn else None
    assert case["lossless_accept"] == case["cactus_accept_any_delta"] == case["typical_accept_on_onehot"]
    for rule in AS_EXACT:
        (verdict,) = verdicts(rule, p, q, y)
        assert verdict == (Verdict(1, 0) if case["lossless_accept"] else Verdict(0, case["correction"]))
    for l, stands in case["lenience_accept"].items():
        (verdict,) = verdicts(make_rule("lenience", leniency=float(l)), p, q, y)
        outside = () if y == case["argmax"] else (0,)
        assert verdict == (Verdict(1, 0, outside) if stands else Verdict(0, case["correction"]))
    for share, chance in case["linear_onehot_accept_prob"].items():
        found = verdicts(make_rule("linear", leniency=float(share)), p, q, y)
        assert sum(mass for verdict, mass in found.items() if verdict.accepted) == pytest.approx(chance, abs=1e-12)
        assert {verdict.next_token for verdict in found if not verdict.accepted} <= {case["correction"]}


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: str(case["lambda"]))
def test_the_argmax_of_the_mixture(case: dict[str, Any]) -> None:
    p, q, best = case["raw_p"], case["raw_q"], case["mixture_argmax"]
    rule = make_rule("linear", leniency=case["lambda"], at_zero="mixture_argmax")
    for y in range(4):
        (verdict,) = verdicts(rule, p, q, y)
        assert (verdict.accepted, verdict.next_token) == ((1, 0) if y == best else (0, best))
        (verdict,) = verdicts(rule, p, None, y)  # an argmax draft counts with all of lambda
        mixed = [(1 - case["lambda"]) * own + case["lambda"] * (i == y) for i, own in enumerate(p)]
        best_of = max(range(4), key=lambda i: (mixed[i], -i))
        assert (verdict.accepted, verdict.next_token) == ((1, 0) if y == best_of else (0, best_of))


def test_a_draft_that_p_rules_out_is_refused_by_a_number_of_0_and_one_of_mass_1_never_is() -> None:
    rows = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    for proposal in (PointMass((1,)), drafted([1], [[0.5, 0.5]])):
        assert decide("exact", rows, [proposal], InverseCdf(POSITION, [0.0], 0.5), temperature=1.0) == [Verdict(0, 0)]
    below_one = 1 - 2.0**-53
    noise = InverseCdf(POSITION, [below_one], 0.9)
    assert decide("exact", rows, [PointMass((0,))], noise, temperature=1.0) == [Verdict(1, 1)]


def test_q_that_is_not_finite_costs_the_draft_and_not_the_law() -> None:
    """A drafter's network may overflow: nothing is accepted, and what comes out is p."""
    broken: Sampled[Law] = Sampled(lambda law, i, step: 0)
    broken.draw(Law(torch.tensor([float("nan"), 0.0])))
    rows = logs([[0.25, 0.75], [0.5, 0.5]])
    found = outcomes(
        lambda branches: decide("exact", rows, [broken], EnumeratedNoise(branches), temperature=1.0)[0].next_token
    )
    assert found == pytest.approx({0: 0.25, 1: 0.75})
