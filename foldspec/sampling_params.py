"""How one request is decoded, as a frozen dataclass whose values are checked once. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import secrets
from dataclasses import dataclass
from typing import Any

from foldspec.errors import UsageError
from foldspec.values import real, several, whole

__all__ = ["SamplingParams"]

SEED_BITS = 64


def _stop_string(value: object) -> None:
    if not isinstance(value, str) or not value:
        raise UsageError(f"must be text of at least one character, not {value!r}", where="stop")
    # neither can stand in decoded text and mean what it says: U+FFFD is what decoders write for bytes that are none
    if "\ufffd" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(f"{value!r} is not valid Unicode text", where="stop", do="give it as UTF-8")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded and where it ends. ``sampling.py`` says in which order what is done to the logits.

    ``max_tokens``   tokens to generate at most; 0 gives an empty completion that finished by ``length``
    ``stop_ids``     ids that end the request, beside the ids that the checkpoint declares
    ``ignore_eos``   go on past the checkpoint's own stop ids (``stop_ids`` still count)
    ``stop``         strings that end the text, which stops before the first of them to be complete
    ``min_tokens``   tokens that come before any that may end the request by its id (barred by then) or by a stop string
    ``logprobs``     keep each token's log-probability, and those of so many most likely ids; None: keep none
    ``temperature``  divides the logits; 0 is greedy decoding (argmax; ties go to the lowest id)
    ``top_k``        keep so many of the likeliest ids; 0 keeps all
    ``top_p``        keep the fewest likeliest ids that have this mass together; 1 keeps all
    ``min_p``        keep ids of at least this share of the largest probability; 0 keeps all
    ``repetition_penalty``  for ids in prompt and output: divides a positive logit, multiplies another; 1: none
    ``presence_penalty``    subtracted from the logits of ids in the output
    ``frequency_penalty``   the same, times their count
    ``logit_bias``   id -> what is added to its logit; kept as pairs in the order of ids
    ``seed``         one seed, one text, alone or among others; None: a fresh one for each request that is sampled,
                     which is reported. Requests with one seed share their noise: give each its own where they are to
                     be independent
    """

    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = ()  # a mapping, or pairs
    seed: int | None = None

    def __post_init__(self) -> None:
        whole("max_tokens", self.max_tokens, 0)
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"must be true or false, not {self.ignore_eos!r}", where="ignore_eos")
        object.__setattr__(self, "stop_ids", several("stop_ids", self.stop_ids))
        for token in self.stop_ids:
            whole("stop_ids", token, 0)
        object.__setattr__(self, "stop", several("stop", self.stop))
        for string in self.stop:
            _stop_string(string)
        whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"is above max_tokens, which is {self.max_tokens}", where="min_tokens")
        whole("logprobs", self.logprobs, 0, optional=True)
        real("temperature", self.temperature, 0, math.inf)
        whole("top_k", self.top_k, 0)
        real("top_p", self.top_p, 0, 1, above=True)
        real("min_p", self.min_p, 0, 1)
        real("repetition_penalty", self.repetition_penalty, 0, math.inf, above=True)
        real("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        real("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        whole("seed", self.seed, 0, optional=True)
        if self.seed is not None and self.seed >= 1 << SEED_BITS:
            raise UsageError(f"must have at most {SEED_BITS} bits, not {self.seed}", where="seed")

    @property
    def penalizes(self) -> bool:
        """Whether what was said before changes what is said next."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def seeded(self, chance: bool = False) -> SamplingParams:
        """The same with a seed: a fresh one of 53 bits (JSON numbers hold those) where one is needed and none is given.
        Greedy decoding needs none, unless ``chance`` has a part in it: that of a lossy rule."""
        if self.seed is not None or (self.temperature == 0 and not chance):
            return self
        return dataclasses.replace(self, seed=secrets.randbits(53))


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """``{id: bias}``, or pairs, as pairs in the order of ids."""
    try:
        pairs = dict(given)
    except (TypeError, ValueError):
        raise UsageError("must map ids to what is added to their logits", where="logit_bias") from None
    for token, bias in pairs.items():
        whole("logit_bias", token, 0)
        real("logit_bias", bias, -math.inf, math.inf)
    return tuple(sorted(pairs.items()))
