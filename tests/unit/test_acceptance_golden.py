"""The rules against recorded numbers: single tokens, blocks with inverse-CDF draws, and the laws of what comes out."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
import torch
from deciding import decide
from enumerating import Branches, EnumeratedNoise, InverseCdf, outcomes

from foldspec.laws import Law
from foldspec.noise import Noise
from foldspec.records import PointMass, Sampled, Verdict

GOLDEN: dict[str, Any] = json.loads((tiny.GOLDEN / "golden_acceptance.json").read_text())
PAIRS = {pair["name"]: pair for pair in GOLDEN["acceptance"]["pairs"]}
POSITION = 1  # of the first drafted token: the prompt of these requests is one token


def logs(probs: Any) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def drafted(tokens: list[int], laws: list[list[float]]) -> Sampled[Law]:
    """Tokens as if they had been drawn from these laws."""
    proposal: Sampled[Law] = Sampled(lambda law, i: tokens[i])
    for law in laws:
        proposal.draw(Law(logs(law)))
    return proposal


TOKENS = [case for case in GOLDEN["acceptance"]["token"] if case["rule"] == "lossless"]


@pytest.mark.parametrize("case", TOKENS, ids=lambda case: f"{case['pair']} {case['y']}")
def test_one_token(case: dict[str, Any]) -> None:
    """Accepted below its probability and refused from there on (a block below has a number that is the very ratio);
    what replaces it is drawn from the residual. A token that p rules out is refused by a number of exactly 0."""
    pair, y = PAIRS[case["pair"]], case["y"]
    rows = torch.stack([logs(pair["p"]), logs(pair["p"])])
    for u, accepted in [*case["u_accept"], (case["accept_prob"] + 1e-12, False)]:
        if u < 1:
            (verdict,) = decide(
                "exact", rows, [drafted([y], [pair["q"]])], InverseCdf(POSITION, [u], 0.5), temperature=1.0
            )
            assert verdict.accepted == int(accepted), u
    if case["residual"] is not None:
        assert [
            Law(logs(pair["p"])).minus(Law(logs(pair["q"]))).prob(i) for i in range(len(pair["p"]))
        ] == pytest.approx(case["residual"], abs=1e-10)


BLOCKS = [case for case in GOLDEN["block_verify"]["cases"] if case["rule"] == "lossless"]


def test_the_golden_blocks_are_there() -> None:
    assert [case["name"] for case in BLOCKS] == ["reject_first", "reject_third", "all_accepted", "u_exactly_ratio"]


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case["name"])
def test_blocks(case: dict[str, Any]) -> None:
    block = GOLDEN["block_verify"]
    proposal = drafted(case["y"], block["Q"])
    noise = InverseCdf(POSITION, case["u"], case["v_final"])
    (verdict,) = decide("exact", logs(block["P"]), [proposal], noise, temperature=1.0)
    assert verdict.accepted == case["accepted_draft"]
    assert [*case["y"][: verdict.accepted], verdict.next_token] == case["committed"]
    assert (verdict.accepted < len(case["y"])) == case["rejected"]
    assert verdict.accepted + 1 == case["tokens_this_round"]


@pytest.mark.parametrize("rule", ["lossless", "match"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_law_of_one_token(rule: str, pair: str) -> None:
    """Of the token after one draft, and how often the draft stands."""
    (wanted,) = (x for x in GOLDEN["acceptance"]["distribution"] if (x["rule"], x["pair"]) == (rule, pair))
    p, q = PAIRS[pair]["p"], PAIRS[pair]["q"]
    rows = torch.stack([logs(p), logs(p)])

    def once(branches: Branches) -> tuple[int, int]:
        noise = EnumeratedNoise(branches)
        place = branches.choose(q)
        name = "exact" if rule == "lossless" else rule
        (verdict,) = decide(name, rows, [drafted([place], [q])], noise, temperature=1.0)
        return verdict.accepted, place if verdict.accepted else verdict.next_token

    found = outcomes(once)
    law = [sum(mass for (_, token), mass in found.items() if token == i) for i in range(len(p))]
    assert law == pytest.approx(wanted["output"], abs=1e-10)
    stood = sum(mass for (accepted, _), mass in found.items() if accepted)
    assert stood == pytest.approx(wanted["expected_accept"], abs=1e-10)


@pytest.mark.parametrize("rule", ["exact", "match"])
@pytest.mark.parametrize("case", GOLDEN["greedy"], ids=lambda case: f"{case['raw_p']} {case['y']}")
def test_at_temperature_0_a_draft_stands_if_it_is_the_argmax(rule: str, case: dict[str, Any]) -> None:
    rows = logs([case["raw_p"]] * 2)
    for proposal in (PointMass((case["y"],)), drafted([case["y"]], [case["raw_p"]])):
        (verdict,) = decide(rule, rows, [proposal], Noise(3))
        wanted = Verdict(1, case["argmax"]) if case["lossless_accept"] else Verdict(0, case["correction"])
        assert verdict == wanted


def test_a_draft_that_p_rules_out_is_refused_by_a_number_of_0_and_one_of_mass_1_never_is() -> None:
    rows = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    for proposal in (PointMass((1,)), drafted([1], [[0.5, 0.5]])):
        assert decide("exact", rows, [proposal], InverseCdf(POSITION, [0.0], 0.5), temperature=1.0) == [Verdict(0, 0)]
    below_one = 1 - 2.0**-53
    noise = InverseCdf(POSITION, [below_one], 0.9)
    assert decide("exact", rows, [PointMass((0,))], noise, temperature=1.0) == [Verdict(1, 1)]


def test_q_that_is_not_finite_costs_the_draft_and_not_the_law() -> None:
    """A drafter's network may overflow: nothing is accepted, and what comes out is p."""
    broken: Sampled[Law] = Sampled(lambda law, i: 0)
    broken.draw(Law(torch.tensor([float("nan"), 0.0])))
    rows = logs([[0.25, 0.75], [0.5, 0.5]])
    found = outcomes(
        lambda branches: decide("exact", rows, [broken], EnumeratedNoise(branches), temperature=1.0)[0].next_token
    )
    assert found == pytest.approx({0: 0.25, 1: 0.75})
