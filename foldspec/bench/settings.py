"""What a user can set of a bench, checked once. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from foldspec.bench.bootstrap import RESAMPLES
from foldspec.bench.methods import AR, Method, parse_methods
from foldspec.errors import UsageError

__all__ = ["ORDERS", "BenchSettings"]

ORDERS = ("rotate", "fixed")


@dataclass(frozen=True)
class BenchSettings:
    """``lengths`` as written (``512,2k``); ``limit`` requests a task and length; ``max_new`` tokens of output;
    ``warmup`` runs of a method and length at most; ``against``: a method that the others are compared with too."""

    methods: str = "lookup,full,window,fold"
    tasks: str = "docs,code,kv"
    lengths: str = "512,2k,8k"
    limit: int = 20
    max_new: int = 128
    warmup: int = 4
    seed: int = 0
    bootstrap: int = RESAMPLES
    order: str = "rotate"
    against: str | None = None
    trace: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        lows = {"limit": 1, "max_new": 2, "warmup": 0, "seed": 0, "bootstrap": 100}
        for name, low in lows.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                where = f"--{name.replace('_', '-')}"
                raise UsageError(f"must be a whole number of at least {low}, not {value!r}", where=where)
        if self.order not in ORDERS:
            raise UsageError(f"must be one of {', '.join(ORDERS)}, not {self.order!r}", where="--order")
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

    def as_dict(self) -> dict[str, object]:
        """For a report: methods and tasks as lists."""
        own = dataclasses.asdict(self)
        return own | {"methods": [m.label for m in self.parsed], "tasks": self.task_names}
