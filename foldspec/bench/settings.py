"""What a user can set of a bench, checked once. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foldspec.bench.axes import Axes
from foldspec.bench.bootstrap import RESAMPLES
from foldspec.bench.methods import AR, Method, parse_methods
from foldspec.errors import UsageError
from foldspec.values import real

__all__ = ["ORDERS", "BenchSettings"]

ORDERS = ("rotate", "fixed")
# what is beyond fills the memory: inputs are held at once, and so are all resamples of them
BOUNDS: dict[str, tuple[int, int | None]] = {
    "limit": (1, 10_000),
    "warmup": (0, None),
    "seed": (0, None),
    "bootstrap": (100, 100_000),
}


@dataclass(frozen=True)
class BenchSettings:
    """``lengths`` as written (``512,2k``); ``limit`` requests a task and length; ``max_new`` tokens of output (None:
    each task's own); ``data``: the user's own files, as TASK=PATH; ``score``: also by libraries;
    ``warmup`` runs of a method and length at most; ``temperature`` of all requests; ``against``: a method that the
    others are compared with too; ``axes``: what the methods of a sweep were made from (None: a plain bench)."""

    methods: str = "lookup,full,window,fold"
    tasks: str = "docs,code,kv"
    lengths: str = "512,2k,8k"
    limit: int = 20
    max_new: int | None = None
    warmup: int = 4
    seed: int = 0
    bootstrap: int = RESAMPLES
    order: str = "rotate"
    against: str | None = None
    trace: bool = False
    calibrate: bool = False
    temperature: float = 0.0
    ignore_eos: bool = False
    data: Sequence[str] = ()
    score: bool = False
    allow_code_execution: bool = False
    axes: Axes | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value, where = getattr(self, name), f"--{name.replace('_', '-')}"
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise UsageError(f"must be a whole number of at least {low}, not {value!r}", where=where)
            if high is not None and value > high:
                raise UsageError(f"must be at most {high:,}, not {value}", where=where)
        if self.max_new is not None and (not isinstance(self.max_new, int) or self.max_new < 2):
            raise UsageError(f"must be a whole number of at least 2, not {self.max_new!r}", where="--max-new")
        real("--temperature", self.temperature, 0, math.inf)
        if self.order not in ORDERS:
            raise UsageError(f"must be one of {', '.join(ORDERS)}, not {self.order!r}", where="--order")
        _paths(self.data)
        labels = [method.label for method in self.parsed]
        if self.against is not None and (self.against not in labels or self.against == AR or len(labels) < 3):
            known = ", ".join(labels[1:])
            raise UsageError("must be one of the methods, beside another", where="--against", do=f"methods: {known}")

    @property
    def parsed(self) -> list[Method]:
        return parse_methods(self.methods)

    @property
    def task_names(self) -> list[str]:
        return list(dict.fromkeys(filter(None, (name.strip() for name in self.tasks.split(",")))))

    @property
    def paths(self) -> dict[str, Path]:
        """``data`` by task."""
        return _paths(self.data)

    def as_dict(self) -> dict[str, object]:
        """For a report: methods and tasks as lists."""
        own = {name: value for name, value in dataclasses.asdict(self).items() if name != "axes" or self.axes}
        return own | {"methods": [m.label for m in self.parsed], "tasks": self.task_names}


def _paths(data: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for each in data:
        name, _, path = each.partition("=")
        if not path or name in found:
            what = "is given twice" if path else "must be TASK=PATH"
            raise UsageError(what, where=f"--data {each}", do="for example gsm8k=test.jsonl")
        found[name] = Path(os.path.expanduser(path))  # pathlib's raises where there is no such user
    return found
