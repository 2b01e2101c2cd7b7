"""A target and a drafter whose laws are tables over a tiny vocabulary, for the real round loop, and that law by hand.

The target's next token depends on the two tokens before it, so that what a row must know of its prefix shows. The
processing of logits is written once more here, in plain Python.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np
import torch

from foldspec.acceptance.base import AcceptanceRule
from foldspec.cache.paged import PagedCache, TargetSpec
from foldspec.cache.rows import Rows
from foldspec.drafters.base import NoDrafter
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import ForwardOutput, ForwardPlan, LanguageModel
from foldspec.models.config import ModelConfig
from foldspec.models.layers import Matrix
from foldspec.noise import Noise
from foldspec.options import SamplingParams
from foldspec.records import PointMass, Proposal
from foldspec.sampling import DraftSampling
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Rounds

IDS = 4
PROMPT = (0, 1)
_RANDOM = np.random.default_rng(11)
TARGET = 1.2 * _RANDOM.normal(size=(IDS, IDS, IDS))  # [before, last, next]
DRAFTS = 1.2 * _RANDOM.normal(size=(3, IDS, IDS))  # [row of the block, anchor or draft before, next]


class TableModel(LanguageModel):
    """Logits from :data:`TARGET`, by the tokens that it was given at the positions before."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = torch.tensor(TARGET)
        self._held: dict[int, dict[int, int]] = {}

    def forward(self, ids: torch.Tensor, plan: ForwardPlan, cache: PagedCache) -> ForwardOutput:
        tokens, logits = ids.tolist(), []
        for request, start, packed in plan.rows:
            held = self._held.setdefault(request, {})
            for i, token in enumerate(tokens[packed]):
                held[start + i] = token
                logits.append(self._rows[held[start + i - 1], token])
        return ForwardOutput(torch.stack(logits), ())

    def hold(self, request: int, prompt: Sequence[int]) -> None:
        self._held[request] = dict(enumerate(prompt))

    @classmethod
    def from_config(cls, config: ModelConfig, tensors: Collection[str], kernels: Kernels) -> TableModel:
        raise NotImplementedError

    def cache_spec(self, dtype: torch.dtype) -> TargetSpec:
        raise NotImplementedError

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        raise NotImplementedError

    def head(self, x: torch.Tensor, matrix: Matrix | None = None, softcap: float | None = None) -> torch.Tensor:
        raise NotImplementedError

    @property
    def head_matrix(self) -> Matrix:
        raise NotImplementedError


class NoCache:
    """Nothing is held, so there is nothing to take back."""

    def truncate(self, request: int, length: int) -> None: ...


class TableDrafter(NoDrafter):
    """Drafts from :data:`DRAFTS`: argmax at temperature 0, else drawn; ``chain``: each given the draft before.

    ``ids``: the draft vocabulary, if it is a part of the target's.
    """

    def __init__(
        self, sampling: DraftSampling, drafts: int = 2, *, chain: bool = False, ids: Sequence[int] | None = None
    ) -> None:
        self.max_drafts, self.sampling, self.chain = drafts, sampling, chain
        self.ids = None if ids is None else torch.tensor(ids)
        self._table = torch.tensor(DRAFTS) if ids is None else torch.tensor(DRAFTS)[..., ids]

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        proposals: list[Proposal] = []
        for start, token, budget, noise in zip(anchors.starts, tokens, budgets, noises, strict=True):
            before, best = token, []
            drawn = self.sampling.begin(noise, start)
            for row in range(budget):
                logits = self._table[row, before]
                if self.sampling.temperature:
                    draft = drawn.draw(self.sampling.law(logits, self.ids))
                else:
                    draft = int(logits.argmax()) if self.ids is None else int(self.ids[logits.argmax()])
                    best.append(draft)
                before = draft if self.chain else token
            proposals.append(drawn if self.sampling.temperature else PointMass(tuple(best)))
        return proposals


def run(
    rule: AcceptanceRule,
    drafter: NoDrafter,
    params: Sequence[SamplingParams],
    noises: Sequence[Noise],
    *,
    first: bool = False,
    stop_ids: Sequence[int] = (),
) -> list[Request]:
    """Requests together through the real loop until all are done. Output begins with the prompt's last token once more,
    or with a token that the rule draws (``first``)."""
    model = TableModel()
    loop = Rounds(model, cast(PagedCache, NoCache()), drafter, rule, device=torch.device("cpu"))
    requests = []
    for number, (each, noise) in enumerate(zip(params, noises, strict=True)):
        request = Request(number, PROMPT, each.max_tokens, frozenset(stop_ids), params=each, noise=noise)
        model.hold(number, PROMPT)
        if first:
            loop.first(request, torch.tensor(TARGET[PROMPT][None]))
        else:
            request.commit([PROMPT[-1]])
        requests.append(request)
    while any(not request.done for request in requests):
        loop.round([request for request in requests if not request.done])
    return requests


# ---------------------------------------------------------------------------------------------------- the law, by hand


def processed(
    logits: Sequence[float], p: Any, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int] = ()
) -> list[float]:
    """The law of the next token after ``prompt`` and ``output``, as the options say."""
    x = [float(value) for value in logits]
    for token, bias in p.logit_bias:
        x[token] += bias
    counts = Counter(output)
    for token in range(len(x)):
        if token in prompt or token in output:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        if token in counts:
            x[token] -= p.presence_penalty + p.frequency_penalty * counts[token]
        if token in stop_ids and len(output) < p.min_tokens:
            x[token] = -math.inf
    return filtered(x, p.temperature, p.top_k, p.top_p, p.min_p)


def filtered(
    x: Sequence[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Temperature, top-k, top-p, min-p in that order, each over what is left, one id after another."""
    if temperature == 0:
        return [float(i == max(range(len(x)), key=lambda j: (x[j], -j))) for i in range(len(x))]
    law = _normed([math.exp((value - max(x)) / temperature) for value in x])
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if top_k:
        law = _normed([value if i in order[:top_k] else 0.0 for i, value in enumerate(law)])
    kept, mass = set(), 0.0
    for i in order:
        if mass < top_p or top_p == 1:
            kept.add(i)
        mass += law[i]
    law = _normed([value if i in kept else 0.0 for i, value in enumerate(law)])
    least = min_p * max(law) * (1 - 1e-12)
    return _normed([value if value >= least else 0.0 for value in law])


def _normed(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def plain_law(p: SamplingParams, first: int | None, stop_ids: Sequence[int] = ()) -> dict[tuple[int, ...], float]:
    """output -> probability under plain decoding. ``first``: the token that the output begins with; None: drawn."""
    law: dict[tuple[int, ...], float] = {}

    def go(output: tuple[int, ...], probability: float) -> None:
        stopped = bool(output) and output[-1] in stop_ids and len(output) > p.min_tokens
        if len(output) >= p.max_tokens or stopped:
            law[output] = law.get(output, 0.0) + probability
            return
        text = (*PROMPT, *output)
        for token, each in enumerate(processed(TARGET[text[-2], text[-1]], p, PROMPT, output, stop_ids)):
            if each > 0:
                go((*output, token), probability * each)

    go(() if first is None else (first,), 1.0)
    return law


def total_variation(a: dict[Any, float], b: dict[Any, float]) -> float:
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2
