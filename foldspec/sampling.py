"""From logits to laws: what the sampling options make of a row, for the target's rows and for a drafter's.

The order of processing, each step over what the one before has left:

1. logit bias is added;
2. repetition penalty r: a positive logit is divided by r, another multiplied, for ids in the prompt or the output;
3. presence and frequency penalty: ``presence + frequency * count`` is subtracted, for ids in the output;
4. ids that would stop the request are barred while the output has fewer than ``min_tokens``;
5. temperature (0: the largest logit, and the rest does not matter), top-k, top-p, min-p.

"The output" at a row includes the drafts before it: they stand if the row is used at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from foldspec.effort import Effort
from foldspec.laws import Law, law_of
from foldspec.noise import Noise, Purpose
from foldspec.options import MethodOptions, SamplingParams
from foldspec.records import Proposal, Sampled

__all__ = ["ARGMAX", "DraftSampling", "Law", "PackedRows", "TargetLaws", "Text", "greedy", "law_of", "target_laws"]


def greedy(logits: torch.Tensor) -> list[int]:
    """logits [n, vocabulary] -> n ids; of equal logits the lowest id."""
    return torch.argmax(logits, dim=-1).tolist() if len(logits) else []


class Text(Protocol):
    """What the laws of a request depend on, besides the logits."""

    id: int
    prompt: tuple[int, ...]
    output: list[int]
    stop_ids: frozenset[int]
    params: SamplingParams


class PackedRows:
    """The target's rows of all requests, ``logits`` [rows, vocabulary]. The first law that is made takes a look at the
    device, one for all; a rule that decides there takes none."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    @cached_property
    def tops(self) -> tuple[list[float], list[float]]:
        """The argmax and the max of each row."""
        best, peaks = torch.stack((self.logits.argmax(-1).double(), self.logits.amax(-1).double())).tolist()
        return best, peaks

    @cached_property
    def finite(self) -> torch.Tensor:
        """The logits, of a row that is not finite zeros: rules see numbers alone."""
        _, peaks = self.tops
        if all(map(math.isfinite, peaks)):
            return self.logits
        finite = torch.tensor([math.isfinite(peak) for peak in peaks], device=self.logits.device)
        return torch.where(finite[:, None], self.logits, 0.0)


class TargetLaws:
    """The target's laws at one request's rows: row ``i`` judges draft ``i``, and one row more follows the last draft.

    ``position`` is that of the token that row 0 gives; ``params`` how the request is sampled; ``packed`` the rows of
    the pass, of which it has the slice ``own``; ``logits`` [drafts + 1, vocabulary] are these, the target's own.
    """

    def __init__(self, packed: PackedRows, own: slice, text: Text, drafts: Sequence[int]) -> None:
        self.packed, self.own = packed, own
        self.logits, self.params, self.position = packed.logits[own], text.params, len(text.prompt) + len(text.output)
        self._text, self._drafts = text, drafts
        self._plain = text.params.temperature == 0 and not self._changes
        self._counts: Counter[int] | None = None
        self._sound: int | None = None

    @property
    def sound(self) -> int:
        """How many rows are finite before the first that is not. What the later rows say must not be used: NaN weights,
        or an overflow in float16, would else come out as an endless row of one token."""
        if self._sound is None:
            peaks = self.packed.tops[1][self.own]
            self._sound = next((i for i, peak in enumerate(peaks) if not math.isfinite(peak)), len(peaks))
        return self._sound

    @sound.setter
    def sound(self, rows: int) -> None:
        """From a rule that has decided on the device, and so found it out there."""
        self._sound = rows

    def law(self, row: int) -> Law:
        """The law of the token at a row, given that the drafts before it stand."""
        if self._plain:
            return Law.point(int(self.packed.tops[0][self.own][row]))
        params, logits = self.params, self._finite(row)
        if self._changes:
            logits = self._changed(logits, row)
        return law_of(logits, params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)

    def raw(self, row: int) -> Law:
        """The law of the token at a row at temperature 1 and without filters, whatever the options say of those: what
        a rule may look at where temperature 0 has left a single id."""
        return Law(self._changed(self._finite(row), row) if self._changes else self._finite(row))

    def changed(self) -> torch.Tensor | None:
        """[drafts + 1, vocabulary]: the rows as laws are made of them, before temperature and filters; rows that are
        not finite are NaN. None where they are the target's own."""
        if not self._changes:
            return None
        rows = torch.stack([self._changed(row, i) for i, row in enumerate(self.logits)])
        return torch.where(self.logits.amax(-1, keepdim=True).isfinite(), rows, math.nan)

    def _finite(self, row: int) -> torch.Tensor:
        return self.packed.finite[self.own][row]

    @property
    def _changes(self) -> bool:
        """Whether logits are changed before they become a law."""
        p = self.params
        return bool(p.logit_bias) or p.penalizes or len(self._text.output) < p.min_tokens

    def _changed(self, logits: torch.Tensor, row: int) -> torch.Tensor:
        text, p = self._text, self.params
        logits = logits.clone()

        def tensor(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=logits.dtype, device=logits.device)

        if p.logit_bias:
            ids, biases = zip(*p.logit_bias, strict=True)
            logits[list(ids)] += tensor(biases)
        if p.penalizes:
            if self._counts is None:
                self._counts = Counter(text.output)
            counts = self._counts + Counter(self._drafts[:row])
            seen = list(counts.keys() | set(text.prompt))
            found = logits[seen]
            logits[seen] = torch.where(found > 0, found / p.repetition_penalty, found * p.repetition_penalty)
            if counts:
                penalty = [p.presence_penalty + p.frequency_penalty * count for count in counts.values()]
                logits[list(counts)] -= tensor(penalty)
        logits.nan_to_num_()  # options are finite, but what they make of a logit may be too large for its dtype
        if len(text.output) + row < p.min_tokens and text.stop_ids:
            logits[list(text.stop_ids)] = -math.inf
        return logits


def target_laws(logits: torch.Tensor, texts: Sequence[Text], proposals: Sequence[Proposal]) -> list[TargetLaws]:
    """The laws of each request, from packed rows [sum(drafts + 1), vocabulary]."""
    packed, laws, row = PackedRows(logits), [], 0
    for text, proposal in zip(texts, proposals, strict=True):
        own = slice(row, row + len(proposal.tokens) + 1)
        laws.append(TargetLaws(packed, own, text, proposal.tokens))
        row = own.stop
    return laws


ONE_STEP = Effort()


@dataclass(frozen=True)
class DraftSampling:
    """How a drafter turns its logits into drafts: by argmax at temperature 0, else by drawing.

    ``shared``: drafts are drawn with the noise with which the target's own token is drawn at the same position, which
    makes the two agree more often. The rule must then draw that token whatever the draft is: ``match`` alone does.
    ``confidence_stop``: a block ends before the first draft whose chance to stand, by the drafter's own estimate, is
    lower; 0 takes all. The estimate knows the drafts before that one alone.
    ``effort``: how a diffusion drafter comes to them; its ``q_mode`` is everyone's: with ``point_mass`` a draft is
    judged as if it had not been drawn.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    shared: bool = False
    confidence_stop: float = 0.0
    effort: Effort = ONE_STEP

    @classmethod
    def of(cls, method: MethodOptions) -> DraftSampling:
        return cls(
            float(method.draft_temperature),
            method.draft_top_k,
            method.draft_top_p,
            method.draft_noise == "shared",
            method.confidence_stop,
            method.effort,
        )

    def law(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> Law:
        """The law of one draft. ``logits`` [m] belong to ``ids`` [m], ascending; None: 0 .. m-1."""
        return law_of(logits, self.temperature, top_k=self.top_k, top_p=self.top_p, ids=ids)

    def begin(self, noise: Noise, anchor: int) -> Sampled[Law]:
        """Drafts after the anchor at a position, none drawn yet."""

        def source(law: Law, i: int, step: int) -> int:
            if self.shared:
                return noise.draw(law, Purpose.TARGET, anchor + 1 + i)
            return noise.draw(law, Purpose.DRAFT, anchor + 1 + i, anchor=anchor, step=step)

        return Sampled(source, points=self.effort.q_mode == "point_mass")


ARGMAX = DraftSampling()
