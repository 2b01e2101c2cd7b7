"""What is known of a request, by method, wherever it was measured; and means of that, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foldspec.bench.bootstrap import interval
from foldspec.bench.methods import AR
from foldspec.bench.store import differences
from foldspec.errors import UsageError


@dataclass(frozen=True)
class Request:
    """``length`` is what was asked for, ``n_in`` the prompt's tokens. ``tau`` and ``rounds`` by method: live, committed
    tokens a round; offline, tau_fs, and the positions that it is the mean of. ``tpot`` in milliseconds by method, plain
    decoding included, and the methods whose output ``differs`` from plain decoding's; empty offline."""

    task: str
    length: int
    id: str
    n_in: int
    tau: dict[str, float]
    rounds: dict[str, int]
    tpot: dict[str, float] = field(default_factory=dict)
    differs: frozenset[str] = frozenset()


SETTINGS = {"pair", "target", "window", "max_context"}  # of a method, that tables tell
Figure = Callable[[Request], float]  # of one request
Summary = dict[str, Any]  # mean, low, high


@dataclass(frozen=True)
class Taken:
    """All requests of one way of measuring, task by task. ``left_out``: by (task, length, why); ``red``: methods that
    are left out, and why. ``origins``: of each file its machine and command; with the first stands the plan (settings
    and weights), which is that of all."""

    way: str
    requests: list[Request] = field(default_factory=list)
    left_out: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    origins: list[dict[str, Any]] = field(default_factory=list)
    red: dict[str, str] = field(default_factory=dict)

    @property
    def methods(self) -> list[str]:
        """Those that every request has."""
        first, *others = self.requests
        return [name for name in first.tau if all(name in each.tau for each in others)]

    @property
    def plan(self) -> dict[str, Any]:
        return dict(self.origins[0]["plan"])

    def add(self, path: Path, plan: dict[str, Any], about: dict[str, Any]) -> None:
        """A file more. Raises :class:`UsageError` if its plan is none, or not that of the others."""
        methods = plan.get("methods")
        each = list(methods.values()) if isinstance(methods, dict) else []
        if not each or not all(isinstance(one, dict) and one.keys() >= SETTINGS for one in each):
            raise UsageError("says not what was measured", where=str(path), do="choose another folder")
        if self.origins and (differing := list(differences(self.plan, plan))):
            raise UsageError(f"is not of the settings of {self.origins[0]['file']}: {differing[0]}", where=str(path))
        self.origins.append({"way": self.way, "file": path.name, **about} | ({} if self.origins else {"plan": plan}))

    def cells(self, methods: Iterable[str] = ()) -> dict[tuple[str, int], list[Request]]:
        """By task and length. Raises :class:`UsageError` if a method is missing."""
        missing = set(methods) - set(self.methods)
        if missing:
            what = f"{self.way} requests have no {', '.join(sorted(missing))}"
            raise UsageError(what, do=f"they have {', '.join(self.methods)}; take others, or measure anew")
        found: dict[tuple[str, int], list[Request]] = {}
        tasks = list(dict.fromkeys(each.task for each in self.requests))
        for each in sorted(self.requests, key=lambda each: (tasks.index(each.task), each.length)):
            found.setdefault((each.task, each.length), []).append(each)
        return found

    def reasons(self, task: str, length: int) -> dict[str, int]:
        """Why requests of a cell were left out, and how many."""
        return {why: n for (*where, why), n in self.left_out.items() if where == [task, length]}


def tau_of(method: str) -> Figure:
    return lambda each: each.tau[method]


def speedup_of(method: str) -> Figure:
    """TPOT of plain decoding over the method's."""
    return lambda each: each.tpot[AR] / each.tpot[method]


def less(a: Figure, b: Figure) -> Figure:
    return lambda each: a(each) - b(each)


def summed_up(requests: Sequence[Request], value: Figure) -> Summary:
    """The mean over requests and its 95% bootstrap interval; values of one request stay together."""
    values = [value(each) for each in requests]
    low, high = interval(values)
    return {"mean": sum(values) / len(values), "low": float(low), "high": float(high)}


def pooled_tau(requests: Sequence[Request], method: str) -> float:
    """Of all rounds at once."""
    rounds = sum(each.rounds[method] for each in requests)
    return sum(each.tau[method] * each.rounds[method] for each in requests) / rounds


def short(length: int) -> str:
    """2048 is 2k; 8144 stays."""
    return str(length) if length % 1024 else f"{length // 1024}k"


def shown(found: Summary, sign: str = "", digits: int = 2) -> str:
    mean, low, high = (f"{found[key]:{sign}.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"
