"""``kv``: a JSON object of random keys and values, and a request for one of the values (Retr.KV's generator)."""

from __future__ import annotations

import bisect
import json
import random
import uuid

from foldspec.errors import UsageError
from foldspec.tasks.base import Encode, Item, Score, Task, chat, shuffled

__all__ = ["KeyValue", "asked", "pairs"]

SAMPLES = 500  # as many as InfiniteBench has: sample c asks for what stands at c/500 of the object


class KeyValue(Task):
    """As many pairs as fit: ``length`` is a bound, missed by less than a pair. Every sample has an object of its own.

    At another length a sample has the same pairs, more or fewer of them, and asks for the one at the same share of the
    object, so for another key: with the same key and more pairs only before it, length would not move the answer away.
    """

    name, max_new = "kv", 128
    scoring = "the value stands in the output"

    @property
    def dataset(self) -> str:
        return "Retr.KV pairs, generated"

    def items(self, encode: Encode, length: int, limit: int, seed: int) -> list[Item]:
        return [self._item(encode, length, c, seed) for c in shuffled(range(SAMPLES), seed)[:limit]]

    def score(self, answer: str, text: str) -> Score:
        return Score(float(answer in text))

    def _item(self, encode: Encode, length: int, sample: int, seed: int) -> Item:
        drawn = pairs(seed * SAMPLES + sample, max(1, length // 8))  # a pair has 72 characters and is never 8 tokens

        def prompt(count: int) -> tuple[int, ...]:
            return encode(chat(text(drawn[:count], asked(sample, count))))

        def tokens(count: int) -> int:
            return len(prompt(count))

        low, high = 0, 1  # what fits, and what does not: doubled from below, so that no long text is encoded in vain
        while high <= len(drawn) and tokens(high) <= length:
            low, high = high, 2 * high
        span = range(low + 1, min(high, len(drawn) + 1))
        count = low + bisect.bisect_right(span, length, key=tokens)
        if count == 0:
            raise UsageError(f"{length} tokens are too few: one pair needs {tokens(1)}", where=self.name)
        return Item(f"{self.name}/{sample}", prompt(count), drawn[asked(sample, count)][1])


def pairs(seed: int, count: int) -> list[tuple[str, str]]:
    """``count`` pairs of random UUIDs (version 4), keys distinct, each key drawn before its value. A longer list begins
    with the shorter one."""
    rng, found = random.Random(seed), dict[str, str]()
    while len(found) < count:
        key = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        found[key] = str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return list(found.items())


def asked(sample: int, count: int, samples: int = SAMPLES) -> int:
    """Which of ``count`` pairs a sample asks for."""
    return sample * count // samples


def text(shown: list[tuple[str, str]], index: int) -> str:
    """The whole turn, in words of this project."""
    key = shown[index][0]
    return (
        "Here is a JSON object. It gives a value for each key.\n\n"
        f"{json.dumps(dict(shown))}\n\n"
        f'Which value does it give for the key "{key}"? Answer with the value alone.'
    )
