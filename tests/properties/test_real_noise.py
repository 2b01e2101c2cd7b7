"""With the real noise: how often drafts stand, and chi-square of the first tokens of very many requests."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tables import DRAFTS, IDS, PROMPT, TARGET, TableDrafter, filtered, plain_law, run

from foldspec import laws, sampling
from foldspec.acceptance import make_rule
from foldspec.laws import Law
from foldspec.noise import Noise, philox
from foldspec.options import SamplingParams
from foldspec.sampling import DraftSampling

T, DRAFT_T = 1.0, 1.3


@pytest.mark.parametrize("way", ["exact", "match", "match, shared"])
def test_drafts_stand_as_often_as_the_rule_says(way: str) -> None:
    """One draft a round: with ``exact`` by sum min(p, q), with ``match`` by sum p q, and where the noise is shared at
    least by (1 - TV) / (1 + TV), which here is more than ``match`` has without."""
    rule, _, shared = way.partition(", ")
    drafter = TableDrafter(DraftSampling(DRAFT_T, shared=bool(shared)), drafts=1)
    params = SamplingParams(max_tokens=1500, temperature=T)
    requests = run(make_rule(rule), drafter, [params] * 2, [Noise(1), Noise(2)])
    stood, wanted, variance, least = 0, 0.0, 0.0, 0.0
    for request in requests:
        text = [*PROMPT, *request.output]
        for one in request.rounds:
            if not one.drafted:
                continue
            before, last = text[one.anchor_pos - 1], text[one.anchor_pos]
            p, q = np.array(filtered(TARGET[before, last], T)), np.array(filtered(DRAFTS[0, last], DRAFT_T))
            apart = np.abs(p - q).sum() / 2
            chance = {"exact": 1 - apart, "match": float(p @ q), "match, shared": (1 - apart) / (1 + apart)}[way]
            stood, wanted, variance = stood + one.accepted, wanted + chance, variance + chance * (1 - chance)
            least += float(p @ q)
    off = (stood - wanted) / math.sqrt(variance)
    if shared:
        assert off > -3 and wanted > least
    else:
        assert abs(off) < 4


@pytest.mark.parametrize("rule", ["exact", "match"])
def test_one_seed_gives_one_text_alone_and_among_others_with_a_seed_or_without(rule: str) -> None:
    """Greedy and sampled requests together, of different lengths: none of them moves another's numbers."""
    drafter = TableDrafter(DraftSampling(DRAFT_T))
    params = [
        SamplingParams(max_tokens=n, temperature=t, top_p=0.95) for n, t in ((30, T), (7, 0.0), (50, 0.7), (41, T))
    ]
    seeds = [3, 4, 3, SamplingParams(temperature=T).seeded().seed or 0]
    together = run(make_rule(rule), drafter, params, [Noise(seed) for seed in seeds])
    for i in (3, 0, 2, 1):
        (alone,) = run(make_rule(rule), drafter, params[i : i + 1], [Noise(seeds[i])])
        assert alone.output == together[i].output and alone.rounds == together[i].rounds


class Tabled(Noise):
    """The real noise of many seeds, computed for all of them at once: only the shape of the computation differs."""

    SEEDS = 1 << 18
    tables: dict[tuple[int, int, int], torch.Tensor] = {}  # noqa: RUF012

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._seed = seed

    def _gumbel(self, law: Law, position: int, anchor: int, last: int) -> torch.Tensor:
        key = position, anchor, last
        if key not in self.tables:
            seeds = torch.arange(self.SEEDS)[:, None]
            a, b, c, d = philox((torch.arange(IDS // 2), position, anchor, last), (seeds, 0))  # type: ignore[arg-type]
            bits = torch.stack((a << 20 | b >> 12, c << 20 | d >> 12), dim=-1).flatten(1)
            self.tables[key] = -(-((bits.double() + 0.5) * 2.0**-52).log()).log()
        row = self.tables[key][self._seed]
        return row if law.ids is None else row[law.ids]


def test_the_tabled_noise_is_the_real_noise() -> None:
    law, part = Law(torch.zeros(IDS)), Law(torch.zeros(2), torch.tensor([1, 2]))
    for seed in (0, 5, 77_777):
        for each in (law, part):
            assert torch.equal(Tabled(seed)._gumbel(each, 3, 2, 260), Noise(seed)._gumbel(each, 3, 2, 260))


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws and residuals of the few rows that the tables have are computed once each."""
    made: dict[tuple[Any, ...], Law] = {}

    def law_of(logits: torch.Tensor, temperature: float, **filters: Any) -> Law:
        key = *logits.tolist(), temperature, *filters.items()
        if key not in made:
            made[key] = laws.law_of(logits, temperature, **filters)
        return made[key]

    def minus(p: Law, q: Law) -> Law:
        key = id(p), id(q) if q.token is None else q.token, q.token is None  # laws are kept: ids are not used again
        if key not in made:
            made[key] = residual(p, q)
        return made[key]

    residual = Law.minus
    monkeypatch.setattr(sampling, "law_of", law_of)
    monkeypatch.setattr(Law, "minus", minus)


CASES = {
    "exact, drawn": ("exact", DraftSampling(DRAFT_T, top_k=3), {"temperature": T, "top_p": 0.9}),
    "exact, point mass": ("exact", DraftSampling(), {"temperature": T, "frequency_penalty": 0.8}),
    "match, shared": ("match", DraftSampling(DRAFT_T, shared=True), {"temperature": T, "top_k": 3}),
}


def chi_square(case: str, count: int) -> float:
    """p-value of the first two tokens of ``count`` requests, each with its own seed: 0, 1, 2, ..."""
    rule, drafts, options = CASES[case]
    params = SamplingParams(max_tokens=4, **options)  # a block of two drafts stands whole, or falls anywhere
    found: Counter[tuple[int, ...]] = Counter()
    for start in range(0, count, 1000):
        noises = [Tabled(seed) for seed in range(start, min(count, start + 1000))]
        done = run(make_rule(rule), TableDrafter(drafts), [params] * len(noises), noises)
        found.update(tuple(request.output[1:3]) for request in done)
    wanted: Counter[tuple[int, ...]] = Counter()
    for output, mass in plain_law(params, PROMPT[-1]).items():
        wanted[output[1:3]] += mass * count  # type: ignore[assignment]
    assert found.keys() <= wanted.keys()
    return float(stats.chisquare([found[key] for key in wanted], list(wanted.values())).pvalue)


@pytest.mark.parametrize("case", CASES)
def test_chi_square(case: str) -> None:
    assert chi_square(case, 2000) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_chi_square_of_200_000(case: str, remembered: None) -> None:
    assert chi_square(case, 200_000) > 1e-3
