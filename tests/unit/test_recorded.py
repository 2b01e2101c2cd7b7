"""What a rule that is listened to says of each judged draft: against recorded laws, by hand, and by what it did."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import relaxing
import tables
import tiny
import torch
from deciding import decide
from relaxing import ByHand, draft_law
from tables import IDS, TARGET, TableDrafter, processed, run

from foldspec import SamplingParams
from foldspec.acceptance import RULES, make_rule
from foldspec.acceptance.recorded import Judged, Recorded
from foldspec.bench.throughput import rate_from_counts
from foldspec.laws import Law
from foldspec.noise import Noise
from foldspec.records import PointMass, Sampled, Verdict
from foldspec.sampling import DraftSampling

GOLDEN: dict[str, Any] = json.loads((tiny.GOLDEN / "golden_acceptance.json").read_text())["acceptance"]
PAIRS = {pair["name"]: pair for pair in GOLDEN["pairs"]}
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


def judged(rule: Any, p: list[float], q: list[float] | None, token: int) -> Judged:
    rows = torch.tensor([p, p], dtype=torch.float64).log()
    drawn: Sampled[Law] = Sampled(lambda law, place, step: token)
    if q is not None:
        drawn.draw(Law(torch.tensor(q, dtype=torch.float64).log()))
    heard: list[Judged] = []
    decide(Recorded(rule, heard.append), rows, [PointMass((token,)) if q is None else drawn], temperature=1.0)
    (one,) = heard
    return one


def named(case: dict[str, Any]) -> str:
    return " ".join(str(case[key]) for key in ("pair", "rule", "par"))


@pytest.mark.parametrize("case", GOLDEN["distribution"], ids=named)
def test_means_over_the_draft_are_the_recorded_numbers(case: dict[str, Any]) -> None:
    """q's mean of ``chance`` is the expected acceptance. ``spent`` is the total variation of the output's law and p."""
    name, parameters, more = NAMES[case["rule"]]
    values = case["par"] if isinstance(case["par"], list) else [case["par"]] if parameters else []
    rule = make_rule(name, **dict(zip(parameters, values, strict=True)), **more)
    p, q = PAIRS[case["pair"]]["p"], PAIRS[case["pair"]]["q"]
    each = [(mass, judged(rule, p, q, y)) for y, mass in enumerate(q) if mass]
    for _, one in each:
        assert one.tv == (pytest.approx(case["tv_pq"], abs=1e-10),) and one.drafted == 1 and one.position == 1
    chances, spent = ([getattr(one, what)[0] for _, one in each] for what in ("chance", "spent"))
    if name in ("exact", "match"):
        assert set(chances) == {None} and set(spent) == {0.0}
        return
    mean = [math.fsum(mass * x for (mass, _), x in zip(each, values, strict=True)) for values in (chances, spent)]
    assert mean[0] == pytest.approx(case["expected_accept"], abs=1e-10)
    assert spent == [pytest.approx(case["tv_to_p"], abs=1e-10)] * len(spent)


DRAWN, POINT = DraftSampling(temperature=1.3), DraftSampling()
PROCESSED = {"temperature": 0.8, "top_k": 3, "presence_penalty": 0.5}
CHI_SQUARE = {"leniency": 0.1, "divergence": "chi2", "residual": "verifier"}
RULES_BY_HAND: list[tuple[str, dict[str, Any], ByHand]] = [
    ("linear", {"leniency": 0.4}, relaxing.linear(0.4)),
    ("linear", {"leniency": (0.2, 0.9)}, relaxing.linear(0.2, 0.9)),
    ("linear", {"leniency": 0.6, "at_zero": "mixture_argmax"}, relaxing.mixture_argmax(0.6)),
    ("lenience", {"leniency": 0.2}, relaxing.lenience(0.2)),
    ("lenience", {"leniency": 0.5}, relaxing.lenience(0.5)),
    ("lenience", {"leniency": 0.4, "residual": "relaxed"}, relaxing.lenience(0.4, relaxed=True)),
    ("cactus", {"leniency": 0.1}, relaxing.cactus(0.1)),
    ("cactus", {"leniency": 2.0}, relaxing.cactus(2.0)),
    ("cactus", {"leniency": 0.05, "divergence": "exact_kl"}, relaxing.cactus(0.05, "exact_kl")),
    ("cactus", {"leniency": 0.2, "divergence": "tv"}, relaxing.cactus(0.2, "tv")),
    ("cactus", CHI_SQUARE, relaxing.cactus(0.1, "chi2", verifier=True)),
    ("typical", {}, relaxing.typical()),
    ("typical", {"epsilon": 0.9, "factor": 0.5}, relaxing.typical(0.9, 0.5)),
]


@pytest.mark.parametrize("sampling", [DRAWN, POINT], ids=["drawn", "point mass"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, PROCESSED])
@pytest.mark.parametrize(("name", "options", "by_hand"), RULES_BY_HAND)
def test_through_the_round_loop_by_hand(
    name: str, options: dict[str, Any], by_hand: ByHand, params: dict[str, Any], sampling: DraftSampling
) -> None:
    """Every judged position of some rounds, temperature 0 and processed laws among them: the laws are made once more in
    plain Python, from the text that was there when the row was judged."""
    heard: list[Judged] = []
    drafter, made = TableDrafter(sampling), SamplingParams(max_tokens=40, **params)
    if made.temperature and "at_zero" in options:
        by_hand = relaxing.linear(0.6)
    (request,) = run(Recorded(make_rule(name, **options), heard.append), drafter, [made], [Noise(3)])
    (plain,) = run(make_rule(name, **options), drafter, [made], [Noise(3)])
    assert request.rounds == plain.rounds and request.output == plain.output
    with_drafts = [each for each in request.rounds if each.drafted]
    assert [(j.position, j.drafted, j.accepted) for j in heard] == [
        (r.anchor_pos + 1, len(r.drafted), r.accepted) for r in with_drafts
    ]
    raw = SamplingParams(temperature=1.0, presence_penalty=made.presence_penalty)
    for each, one in zip(with_drafts, heard, strict=True):
        said = request.output[: each.anchor_pos + 1 - len(tables.PROMPT)]
        assert len(one.tv) == min(each.accepted + 1, len(each.drafted)) == len(one.chance) == len(one.spent)
        for row, (tv, chance, spent) in enumerate(zip(one.tv, one.chance, one.spent, strict=True)):
            output = [*said, *each.drafted[:row]]
            text = (*tables.PROMPT, *output)
            p, of_one = (processed(TARGET[text[-2], text[-1]], how, tables.PROMPT, output) for how in (made, raw))
            q, token = draft_law(drafter, row, said[-1]), each.drafted[row]
            stays, falls = by_hand(p, of_one, q, row)
            law = [a + b for a, b in zip(stays, falls, strict=True)]
            assert tv == pytest.approx(sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2, abs=1e-9)
            assert chance == pytest.approx(stays[token] / q[token], abs=1e-9)
            assert spent == pytest.approx(sum(abs(a - b) for a, b in zip(law, p, strict=True)) / 2, abs=1e-9)


def test_one_minus_tv_and_the_counts_say_the_same_the_first_with_less_noise() -> None:
    heard: list[Judged] = []
    rule = Recorded(make_rule("exact"), heard.append)
    params = SamplingParams(max_tokens=500, temperature=1.0)
    run(rule, TableDrafter(DRAWN, chain=True), [params] * 4, [Noise(seed) for seed in range(4)])
    stays = [1 - tv for one in heard for tv in one.tv]
    by_tv, by_counts = sum(stays) / len(stays), rate_from_counts((one.accepted, one.drafted) for one in heard)
    # each draft that is judged stands with chance 1 - TV, given all before: a martingale with this variance at most
    sigma = math.sqrt(sum(x * (1 - x) for x in stays)) / len(stays)
    assert len(stays) > 900 and sigma < 0.02
    assert by_counts == pytest.approx(by_tv, abs=4 * sigma) and by_counts != by_tv


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_can_be_listened_to_and_nothing_is_heard_of_a_round_without_drafts(rule: str) -> None:
    options: dict[str, Any] = {} if rule in ("exact", "match", "typical", "unverified") else {"leniency": 0.5}
    heard: list[Judged] = []
    made = Recorded(make_rule(rule, **options), heard.append)
    assert made.lossless == make_rule(rule, **options).lossless and made.law() == make_rule(rule, **options).law()
    assert decide(made, torch.zeros(1, IDS), [PointMass(())], temperature=1.0) and heard == []


def test_rows_that_are_not_finite_are_not_looked_at() -> None:
    rows = torch.eye(4)
    rows[1, 2] = math.nan
    heard: list[Judged] = []
    (verdict,) = decide(Recorded(make_rule("exact"), heard.append), rows, [PointMass((0, 1, 2))])
    assert isinstance(verdict, Verdict) and len(heard[0].tv) == 1
