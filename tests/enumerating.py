"""Every outcome of a random experiment, each with its exact probability: the noise of a request replaced by branches.

Behind each key of a draw lies one number u in [0, 1), as in the real noise; what is known of it is an interval. A draw
is the inverse CDF of u, a comparison splits u's interval; a key that is looked at twice is the same number twice, so
streams that should be independent and are not show in the law of what comes out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from foldspec.laws import Law
from foldspec.noise import Noise, Purpose

Outcome = TypeVar("Outcome", bound=Hashable)
TINY = 1e-15  # parts of an interval below this are rounding


class Branches:
    """One walk through a tree of choices: the first follow ``path``, the others take their first possible way."""

    def __init__(self, path: Sequence[int]) -> None:
        self.path, self.probability = list(path), 1.0
        self.ways: list[int] = []

    def choose(self, weights: Sequence[float]) -> int:
        """Which of the possible (weight above 0) is taken; weights sum to 1."""
        possible = [i for i, weight in enumerate(weights) if weight > TINY]
        if len(self.ways) == len(self.path):
            self.path.append(0)
        taken = possible[self.path[len(self.ways)]]
        self.ways.append(len(possible))
        self.probability *= weights[taken]
        return taken


def outcomes(experiment: Callable[[Branches], Outcome]) -> dict[Outcome, float]:
    """outcome -> probability, over all walks."""
    found: dict[Outcome, float] = defaultdict(float)
    path: list[int] = []
    while True:
        branches = Branches(path)
        found[experiment(branches)] += branches.probability
        path = branches.path
        while path and path[-1] + 1 == branches.ways[len(path) - 1]:
            path.pop()
        if not path:
            return dict(found)
        path[-1] += 1


class EnumeratedNoise(Noise):
    """Noise whose numbers are chosen by branches. ``keys`` records what was asked for, in order."""

    def __init__(self, branches: Branches) -> None:
        super().__init__(0)
        self.keys: list[tuple[Any, ...]] = []
        self._branches = branches
        self._known: dict[tuple[Any, ...], tuple[float, float]] = {}

    def split(self, key: tuple[Any, ...], cuts: Sequence[float]) -> int:
        """In which of the parts of [0, 1) that ``cuts`` (rising, from 0 to 1) make the number of a key lies."""
        low, high = self._known.get(key, (0.0, 1.0))
        parts = [(max(low, a), min(high, max(low, b))) for a, b in pairwise(cuts)]
        taken = self._branches.choose([max(0.0, b - a) / (high - low) for a, b in parts])
        self._known[key] = parts[taken]
        return taken

    def uniform(self, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> Any:
        self.keys.append(("uniform", purpose, position, anchor, step))
        return _Number(self, (purpose, position, anchor, step))

    def whole(self, count: int, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        self.keys.append(("whole", purpose, position, anchor, step))
        return self.split((purpose, position, anchor, step), [i / count for i in range(count + 1)])

    def draw(self, law: Law, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        if law.token is not None:
            return law.token
        self.keys.append(("draw", purpose, position, anchor, step))
        cuts = [0.0, *law.probs().cumsum(0).tolist()]
        cuts[-1] = 1.0
        place = self.split((purpose, position, anchor, step), cuts)
        return place if law.ids is None else int(law.ids[place])


class _Number:
    """u, which can be multiplied and compared, and no more."""

    def __init__(self, noise: EnumeratedNoise, key: tuple[Any, ...], factor: float = 1.0) -> None:
        self._noise, self._key, self._factor = noise, key, factor

    def __mul__(self, factor: float) -> _Number:
        return _Number(self._noise, self._key, self._factor * factor)

    def _below(self, bound: float) -> bool:
        if math.isnan(self._factor):
            return False
        cut = min(1.0, bound / self._factor)
        return self._noise.split(self._key, [0.0, cut, 1.0]) == 0

    __lt__ = __le__ = _below  # the border has no mass


class InverseCdf(Noise):
    """Given numbers: ``accept[i]`` for the draft at position ``first + i``, and one for the last draw (the goldens)."""

    def __init__(self, first: int, accept: Sequence[float], last: float) -> None:
        super().__init__(0)
        self._first, self._accept, self._last = first, accept, last

    def uniform(self, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> float:
        assert purpose is Purpose.ACCEPT
        return self._accept[position - self._first]

    def draw(self, law: Law, purpose: Purpose, position: int, *, anchor: int = 0, step: int = 0) -> int:
        if law.token is not None:
            return law.token
        cuts = law.probs().cumsum(0)
        place = int((cuts <= self._last * cuts[-1]).sum())
        return place if law.ids is None else int(law.ids[place])
