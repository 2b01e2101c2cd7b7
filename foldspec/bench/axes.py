"""What a sweep varies: drafts a round, how much a draft is denoised, and how lenient the rule is; and the methods that
these make. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from foldspec.bench.methods import AR, parse_methods
from foldspec.errors import UsageError
from foldspec.options import WITHOUT_WEIGHTS, MethodOptions

__all__ = ["ACCEPTS", "Asked", "Axes", "Point"]

# rule -> leniencies where none are asked for, the strictest first; none: it takes none
ACCEPTS: Final[Mapping[str, tuple[float, ...]]] = {
    "linear": (0.0, 0.4, 1.0),
    "lenience": (1.0, 0.5, 0.2),
    "cactus": (0.0, 0.1, 1.0),
    "exact": (),
    "match": (),
    "typical": (),
}
STEPS = (1, 2, 4)
EFFORTS = {"steps": "K", "confidence": "confidence", "entropy_bound": "entropy"}
_KINDS: dict[str, Any] = {"draft_tokens": int, "steps": int, "confidence": float, "entropy_bound": float}


@dataclass(frozen=True)
class Point:
    """A method of a sweep. ``kind``: ``point``, ``verifier`` (plain decoding) or ``drafter`` (no draft is verified)."""

    label: str
    kind: str = "point"
    draft_tokens: int | None = None
    effort: str | None = None
    leniency: float | None = None


@dataclass(frozen=True)
class Axes:
    """``head``: how the drafter reads, as in ``--methods`` (``full``, ``fold:alpha=4``), or a drafter without weights.
    ``efforts``: (field of :class:`Effort`, value), or None for a drafter that has one. ``leniency`` is empty for a rule
    that takes none. ``draft_temperature``: of all drafts; 0: an argmax."""

    head: str
    draft_tokens: tuple[int, ...]
    efforts: tuple[tuple[str, float] | None, ...]
    accept: str
    leniency: tuple[float, ...]
    draft_temperature: float

    @property
    def points(self) -> list[Point]:
        """Plain decoding first; then, of each number of drafts and effort, the strictest point first and the drafter
        alone last."""
        found = [Point(AR, "verifier")]
        for drafts, effort in itertools.product(self.draft_tokens, self.efforts):
            base = f"{self.head}:draft_tokens={drafts}"
            if effort is not None:
                base += f":{effort[0]}={_text(effort[1])}"
            if self.draft_temperature:
                base += f":draft_temperature={_text(self.draft_temperature)}"
            name = effort_name(effort)
            for share in self.leniency or (None,):
                label = f"{base}:accept={self.accept}" + ("" if share is None else f":leniency={_text(share)}")
                found.append(Point(label, "point", drafts, name, share))
            found.append(Point(f"{base}:accept=unverified", "drafter", drafts, name))
        return found

    @property
    def methods(self) -> str:
        """As ``--methods`` has them."""
        return ",".join(point.label for point in self.points[1:])

    def as_dict(self) -> dict[str, Any]:
        """For a result."""
        return {
            "draft_tokens": list(self.draft_tokens),
            "effort": [effort_name(effort) for effort in self.efforts],
            "accept": self.accept,
            "leniency": list(self.leniency),
        }


@dataclass(frozen=True)
class Asked:
    """Lists as a user writes them (``4,8``), checked one by one; None: not given. ``context``: as the head of
    :class:`Axes`; ``accept``: a rule, which may have options of its own."""

    draft_tokens: str | None = None
    steps: str | None = None
    confidence: str | None = None
    entropy_bound: str | None = None
    accept: str = "linear"
    leniency: str | None = None
    context: str = "full"
    draft_temperature: float | None = None

    @property
    def rule(self) -> str:
        """The name of ``accept``, which may have options: ``cactus:divergence=exact_kl``."""
        return self.accept.partition(":")[0]

    def __post_init__(self) -> None:
        self._check_context()
        if self.rule not in ACCEPTS or "," in self.accept:
            do = f"known: {', '.join(ACCEPTS)}; the drafter alone comes along in any case"
            raise UsageError(f"{self.accept!r} is no rule that a sweep varies", where="--accept", do=do)
        self._check_rule()
        if self.leniency is not None and not ACCEPTS[self.rule]:
            raise UsageError(f"changes nothing about the rule {self.rule}", where="--leniency", do="leave it out")
        for name in (*_KINDS, "leniency"):
            self.values(name)
        _check("draft_temperature", self.draft_temperature)

    def _check_context(self) -> None:
        where = f"--context {self.context}"
        try:
            (*_, method) = parse_methods(self.context)
        except UsageError as error:
            raise UsageError(error.what, where=where, do=error.do) from None
        if "," in self.context or "context" not in method.changes:
            raise UsageError("is not one context method", where=where, do="for lookup and the like, use --drafter")
        _own_options(method.changes, where, *_KINDS, "leniency", "accept", "draft_temperature")

    def _check_rule(self) -> None:
        where = f"--accept {self.accept}"
        given = [pair.partition("=")[0] for pair in self.accept.split(":")]
        _own_options(given, where, *_KINDS, "leniency", "draft_temperature")
        strict = "".join(f":leniency={share}" for share in ACCEPTS[self.rule][:1])
        try:
            parse_methods(f"{Asked.context}:accept={self.accept}{strict}")
        except UsageError as error:
            raise UsageError(error.what, where=where, do=error.do) from None

    def values(self, name: str) -> tuple[Any, ...] | None:
        """One of the lists. Raises :class:`UsageError` for what is no number, out of range, or named twice."""
        text: str | None = getattr(self, name)
        if text is None:
            return None
        where = _flag(name)
        words = [word.strip() for word in text.split(",")]
        if not all(words):
            raise UsageError("names nothing" if not any(words) else "has an empty place", where=where, do="as 1,2,4")
        values = []
        for word in words:
            try:
                values.append(_KINDS.get(name, float)(word))
            except ValueError:
                raise UsageError(f"{word[:20]!r} is not a number", where=where) from None
            _check(name, values[-1], self.rule if name == "leniency" else "exact")
            if name == "draft_tokens" and values[-1] == 0:
                raise UsageError("0 drafts are plain decoding, which always runs", where=where, do="1 or more")
        twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
        if twice is not None:
            raise UsageError(f"{twice:g} is named twice", where=where)
        return tuple(values)

    def axes(self, *, drafter: str | None, takes_steps: bool, drafts: int, temperature: float) -> Axes:
        """With what is left to the drafter: ``drafter`` is the name of one without weights, else None; ``drafts`` what
        it proposes. ``temperature`` of the requests, and of drafts where nothing else is said. Raises
        :class:`UsageError` for points that are all one."""
        head = self.context
        if drafter in WITHOUT_WEIGHTS:
            if self.context != Asked.context:
                raise UsageError(f"{drafter} reads no context", where="--context", do="leave it out")
            head = str(drafter)
        lengths = self.values("draft_tokens") or (drafts,)
        efforts: list[tuple[str, float] | None] = [
            (name, value) for name in EFFORTS for value in self.values(name) or ()
        ]
        if not efforts:
            steps = [k for k in STEPS if k <= max(lengths)] if takes_steps else []
            efforts = [("steps", k) for k in steps] or [None]
        leniency = self.values("leniency") or ACCEPTS[self.rule]
        if temperature == 0 and self.rule == "cactus" and len(leniency) > 1:
            what = "at temperature 0 it is the rule exact, whatever its leniency: all points would be one"
            raise UsageError(what, where="--accept cactus", do="give --temperature 1, or use linear")
        drawn = temperature if self.draft_temperature is None else self.draft_temperature
        if head in WITHOUT_WEIGHTS and self.draft_temperature is None:
            drawn = 0.0
        return Axes(head, tuple(lengths), tuple(efforts), self.accept, tuple(leniency), drawn)


def effort_name(effort: tuple[str, float] | None) -> str:
    return "K 1" if effort is None else f"{EFFORTS[effort[0]]} {_text(effort[1])}"


def _check(name: str, value: Any, accept: str = "exact") -> None:
    """One value, by what is asked of it anywhere."""
    try:
        MethodOptions(**{"accept": accept, name: value} if value is not None else {})
    except UsageError as error:
        raise UsageError(error.what, where=_flag(name), do=error.do) from None


def _own_options(given: Collection[str], where: str, *names: str) -> None:
    """Raises :class:`UsageError` for one of the names among what is given in a place of another."""
    for name in names:
        if name in given:
            raise UsageError(f"{name} has an option of its own", where=where, do=f"use {_flag(name)}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: float) -> str:
    """As short as it can be read back."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)
