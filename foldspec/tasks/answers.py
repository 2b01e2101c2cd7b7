"""What an output answers: numbers, letters and words in it. Output is text as a model wrote it, reasoning included."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

__all__ = ["final", "letter", "named_letter", "number", "said", "same_number", "token_f1", "words"]

# A minus belongs to a number unless something stands before it that it may be taken from: 16-4, (x)-4.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d(?:[\d,]*\d)?(?:\.\d+)?")
_FRACTION = re.compile(r"(-?)\s*\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(-?)(\d+)\s*/\s*(\d+)")
_STATED = re.compile(r"(?i:\banswer)[\s*]*:[\s*$(]*([A-D])(?![A-Za-z])")
_BOXED_LETTER = re.compile(r"\\boxed\{\s*(?:\\text\{)?\(?([A-D])\)?\}?\s*\}")


def said(text: str) -> str | None:
    """The output without its ``<think>`` blocks; None if one was opened and never closed. One that the prompt opened
    is only closed here."""
    rest = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    return None if "<think>" in rest else rest.rpartition("</think>")[2]


def number(text: str) -> str | None:
    """The last number in a box; without a box the first after ``####``; else the last of all. As ``-3``, ``18.00`` or
    ``1/2``: no commas, signs or units."""
    box = _last_box(text)
    if box is not None:
        box = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", box).rpartition("=")[2]
        fraction = _FRACTION.search(_plain(box))
        if fraction:
            sign, above, below = (fraction[i] if fraction[i] is not None else fraction[i + 3] for i in (1, 2, 3))
            return f"{sign}{above}/{below}"
        return _nth_number(box, 0)
    _, marker, after = text.partition("####")
    found = _nth_number(after, 0) if marker else None
    return found if found is not None else _nth_number(text, -1)


def same_number(a: str, b: str) -> bool:
    """As exact rationals: 18.00 is 18, 1/2 is 0.5."""
    try:
        return Fraction(a) == Fraction(b)
    except (ValueError, ZeroDivisionError):
        return False


def letter(text: str) -> str | None:
    """The last ``Answer: X`` with X from A to D, else a boxed letter. The last, since an answer may be corrected."""
    stated = _STATED.findall(text) or _BOXED_LETTER.findall(text)
    return stated[-1] if stated else None


def named_letter(text: str) -> str | None:
    """LongBench v2's: what follows ``The correct answer is``."""
    plain = text.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(r"The correct answer is ([A-D])", plain)
    return found[1] if found else None


def final(text: str) -> str:
    """What comes after the last ``answer`` (is, :), all of it if there is none: for texts that reason first."""
    found = re.search(r"(?is).*\banswer\b(?:\s+is\b)?[\s:*]*(.*)", text)
    return found[1] if found and found[1].strip() else text


def words(text: str) -> list[str]:
    """InfiniteBench's: parted at blanks and at ``: " ' . , ? ! { }``."""
    return re.sub("[\n:\"'.,?!{}]", " ", text).split()


def token_f1(text: str, golds: Sequence[str]) -> float:
    """The best F1 over words that any right answer gives: lower case, no punctuation, no articles."""
    own = _normal(text)
    return max((_f1(own, _normal(gold)) for gold in golds), default=0.0)


def _f1(own: list[str], gold: list[str]) -> float:
    common = (Counter(own) & Counter(gold)).total()
    return 2 * common / (len(own) + len(gold)) if common else 0.0


def _normal(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def _plain(text: str) -> str:
    return text.replace("{,}", ",").replace("\u2212", "-").replace("\\!", "")


def _nth_number(text: str, n: int) -> str | None:
    found = _NUMBER.findall(_plain(text).replace("$", " ").replace("\\%", " ").replace("%", " "))
    return found[n].replace(",", "") if found else None


def _last_box(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` whose braces are balanced."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start:i]
    return None
