"""The law of the output where another model drafts: the real drafter over a table as its model, through the real round
loop, with noise enumerated exactly."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from output_laws import output_law
from tables import IDS, PROMPT, TableModel, plain_law, total_variation

from foldspec.acceptance import make_rule
from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.drafters.autoregressive import Autoregressive
from foldspec.drafters.base import Host
from foldspec.models.base import ForwardOutput, ForwardPlan
from foldspec.models.layers import Matrix
from foldspec.noise import Noise
from foldspec.options import SamplingParams
from foldspec.records import Proposal
from foldspec.sampling import DraftSampling

TABLE = 1.2 * np.random.default_rng(23).normal(size=(IDS + 1, IDS + 1, IDS + 1))  # [before, last, next], a row too many


class Smaller(TableModel):
    """A drafter's model of so many ids. It forgets nothing by itself: what it is given again, it takes anew."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.max_positions = vocabulary, 100
        self._rows = torch.tensor(TABLE[:vocabulary, :vocabulary, :vocabulary])

    def forward(self, ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> ForwardOutput:
        for request, start, _ in plan.rows:  # the first row has nothing before it
            self._held.setdefault(request, {}).setdefault(start - 1, 0)
        return super().forward(ids, plan, cache)

    @property
    def head_matrix(self) -> Matrix:
        return cast(Matrix, SimpleNamespace(weight=torch.empty(0)))


class NoStates:
    """A cache of nothing: the table remembers by itself."""

    spec = SimpleNamespace(recurrent=())

    def open(self, request: int) -> None: ...

    def close(self, request: int) -> None: ...

    def truncate(self, request: int, length: int) -> None: ...


def drafter(sampling: DraftSampling, vocabulary: int = IDS, kind: type[Autoregressive] = Autoregressive) -> Any:
    """It takes in the prompt when the first round of a request begins, as after a prefill."""

    class Prefilled(kind):  # type: ignore[misc, valid-type]
        def propose(
            self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
        ) -> list[Proposal]:
            for request, start in zip(anchors.requests, anchors.starts, strict=True):
                if start == len(PROMPT):
                    self.close(request)
                    self.open(request)
                    self.absorb(Rows.of([request], [0], [start]), PROMPT, ())
            return super().propose(anchors, tokens, budgets, noises)

        def absorb(self, rows: Rows, tokens: Sequence[int], taps: Any) -> None:
            super().absorb(rows, list(tokens), taps)

    target = TableModel()
    target.vocabulary = IDS
    host = Host(target, cast(PagedCache, None), cast(Any, None))
    return Prefilled(Smaller(vocabulary), cast(PagedCache, NoStates()), host, 2, sampling)


DRAWN, FEW = DraftSampling(1.3), DraftSampling(1.3, top_k=2)
CASES: dict[str, tuple[str, DraftSampling, int, dict[str, Any]]] = {
    "argmax": ("exact", DraftSampling(), IDS, {"temperature": 1.0}),
    "drawn, both sides filtered": ("exact", FEW, IDS, {"temperature": 0.8, "top_p": 0.9}),
    "a smaller table": ("exact", DRAWN, IDS - 1, {"temperature": 1.0}),
    "a larger table": ("exact", FEW, IDS + 1, {"temperature": 1.0}),
    "match, shared, a smaller table": ("match", DraftSampling(1.3, shared=True), IDS - 1, {"temperature": 1.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_output_has_the_law_of_plain_decoding(name: str) -> None:
    rule, sampling, vocabulary, options = CASES[name]
    params = SamplingParams(max_tokens=4, **options)
    law = output_law(make_rule(rule), drafter(sampling, vocabulary), params)
    assert total_variation(law, plain_law(params, PROMPT[-1])) < 1e-12


def test_at_lambda_one_drafted_tokens_have_the_drafters_law() -> None:
    """Each given the one before it; the token after them is the target's."""
    params = SamplingParams(max_tokens=5, temperature=1.0, top_k=1)
    law = output_law(make_rule("linear", leniency=1.0), drafter(DRAWN), params)
    first: dict[tuple[int, ...], float] = {}
    for output, probability in law.items():
        first[output[1:3]] = first.get(output[1:3], 0.0) + probability
    a, b = PROMPT[-1], PROMPT[-1]  # the output begins with the prompt's last token once more
    rows = torch.tensor(TABLE[:IDS, :IDS, :IDS])
    laws = torch.softmax(rows / 1.3, -1)
    expected = {(x, y): float(laws[a, b, x] * laws[b, x, y]) for x in range(IDS) for y in range(IDS)}
    assert total_variation(first, expected) < 1e-12
