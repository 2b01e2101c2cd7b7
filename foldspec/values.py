"""Values as a user may write them: read from text, and checked, each error with the name of the option."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from foldspec.errors import UsageError

__all__ = ["by_layer", "leniency", "one_of", "read_pairs", "real", "several", "token_count", "whole"]

UNITS = {"k": 1 << 10, "m": 1 << 20}


def token_count(text: str) -> int:
    """``512``, ``8k`` or ``10M`` as a number of tokens: k is 1,024, M is 1,024 k. Raises :class:`ValueError`."""
    unit = UNITS.get(text[-1:].lower())
    return int(text) if unit is None else int(text[:-1]) * unit


def by_layer(number: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A parser of ``2/4/2``: one number a layer."""
    return lambda text: tuple(number(part) for part in text.split("/"))


def leniency(text: str) -> float | tuple[float, ...]:
    """``0.4``, or ``0.1/0.2/0.4``: one a position. Raises :class:`ValueError`."""
    values = tuple(float(part) for part in text.split("/"))
    return values if len(values) > 1 else values[0]


def whole(name: str, value: object, low: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UsageError(f"must be a whole number of at least {low}, not {value!r}", where=name)


def real(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """A finite number from ``low`` to ``high``, or above ``low``."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    # a whole number may be too large to be a float
    if (
        not -sys.float_info.max <= number <= sys.float_info.max
        or not low <= number <= high
        or (above and number == low)
    ):
        least = f" above {low:g}" if above else f" of at least {low:g}" if low > -math.inf else ""
        most = f" and at most {high:g}" if high < math.inf else ""
        raise UsageError(f"must be a finite number{least}{most}, not {value!r}", where=name)


def several(name: str, value: object) -> tuple[object, ...]:
    if isinstance(value, Iterable):  # a string by itself is one, not its characters
        return (value,) if isinstance(value, str) else tuple(value)
    raise UsageError(f"must be a list or a tuple, not {value!r}", where=name)


def one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"must be one of {', '.join(known)}, not {value!r}", where=name)


def read_pairs(
    pairs: Mapping[str, str], fields: Mapping[str, Callable[[str], object]], flag: str, values: dict[str, object]
) -> None:
    """Add ``KEY=VALUE`` strings to values."""
    for key, text in pairs.items():
        if key not in fields:
            raise UsageError(f"unknown key {key!r}", where=flag, do=f"known keys: {', '.join(fields)}")
        if key in values:
            raise UsageError("given twice", where=f"--{key} and {flag} {key}=")
        try:
            values[key] = fields[key](text)
        except ValueError:
            several = "numbers of a list are joined by /" if "," in text else ""
            raise UsageError(f"{text[:40]!r} is not a number", where=f"{flag} {key}", do=several) from None
