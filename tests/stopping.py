"""Where output ends, by its plain definition, which decodes every prefix of the output from scratch.

A stop string ends the output at the first prefix whose text (bytes at its end that are no character yet left out) has
it beyond what the first ``min_tokens`` tokens show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foldspec.text.tokenizer import Tokenizer


class End(NamedTuple):
    ids: list[int]
    text: str
    reason: str
    by: int | str | None


def defined(
    tok: Tokenizer, ids: Sequence[int], stop: Sequence[str], stop_ids: frozenset[int], first: int, limit: int
) -> End | None:
    """Where ``ids`` end by the definition; None where they go on."""
    floor = len(tok.decode(ids[:first]).rstrip("\ufffd"))
    for n in range(1, len(ids) + 1):
        text = tok.decode(ids[:n])
        known = text.rstrip("\ufffd")
        ends = sorted(
            (end, end - len(string), string)
            for string in stop
            for end in range(floor + 1, len(known) + 1)
            if known[:end].endswith(string)
        )
        cut = text[: ends[0][1]] if n > first and ends else text
        if n > first and ids[n - 1] in stop_ids:
            return End(list(ids[:n]), cut, "stop", ids[n - 1])
        if n > first and ends:
            return End(list(ids[:n]), cut, "stop", ends[0][2])
        if n >= limit:
            return End(list(ids[:n]), cut, "length", None)
    return None
