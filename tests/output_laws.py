"""The law of a whole output through the real round loop, the keys of its draws, and mutants of the code."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from enumerating import Branches, EnumeratedNoise, outcomes
from tables import TableDrafter, run

from foldspec.acceptance.base import AcceptanceRule
from foldspec.noise import Noise
from foldspec.options import SamplingParams

Outputs = dict[tuple[int, ...], float]


def output_law(
    rule: AcceptanceRule, drafter: TableDrafter, params: SamplingParams, place: int = 0, **how: Any
) -> Outputs:
    """The law of one request's output, in a batch of two; the other's output must never change."""
    others: set[tuple[int, ...]] = set()
    rounds: list[int] = []

    def once(branches: Branches) -> tuple[int, ...]:
        noises: list[Noise] = [EnumeratedNoise(branches), Noise(5)]
        pair = [params, SamplingParams(max_tokens=5, temperature=1.0)]
        done = run(rule, drafter, pair[:: 1 - 2 * place], noises[:: 1 - 2 * place], **how)
        others.add(tuple(done[1 - place].output))
        rounds.append(len(done[place].rounds))
        return tuple(done[place].output)

    law = outcomes(once)
    assert len(others) == 1, "a request's noise has reached the other's output"
    assert max(rounds) >= 2
    return law


def keys_of(rule: AcceptanceRule, drafter: TableDrafter, length: int = 4) -> Iterator[list[tuple[Any, ...]]]:
    """The keys that each walk asks its noise for."""
    params, seen = SamplingParams(max_tokens=length, temperature=1.0), []

    def once(branches: Branches) -> int:
        noise = EnumeratedNoise(branches)
        run(rule, drafter, [params], [noise])
        seen.append(noise.keys)
        return 0

    outcomes(once)
    yield from seen


def mutant(module: types.ModuleType, old: str, new: str, **more: Any) -> dict[str, Any]:
    """The names of a module whose source has one thing changed."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is in {module.__name__} {source.count(old)} times"
    changed = types.ModuleType(f"{module.__name__}_mutant")
    sys.modules[changed.__name__] = changed  # dataclasses look their module up
    vars(changed).update(more)
    exec(compile(source.replace(old, new), changed.__name__, "exec"), vars(changed))
    return vars(changed)
