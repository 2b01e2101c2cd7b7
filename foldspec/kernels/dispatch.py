"""Which implementation of an operator runs, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foldspec.errors import UsageError
from foldspec.kernels import multi_read_attention as mra

__all__ = ["Choice", "Kernels"]

OPERATORS = {"multi_read_attention": mra.candidates}


class Choice(NamedTuple):
    """The implementation of ``operator`` that runs, and (name, reason) of each that was passed over."""

    operator: str
    name: str
    refused: tuple[tuple[str, str], ...]


class Kernels:
    """The operators, each bound to the first implementation that fits its arguments, or to the one that was forced.

    Raises :class:`UsageError` if ``force`` names no implementation or one that does not fit.
    """

    def __init__(self, force: str = "auto") -> None:
        known = sorted({name for find in OPERATORS.values() for name, _, _ in find()})
        if force != "auto" and force not in known:
            raise UsageError(f"unknown kernels {force!r}", where="--kernels", do=f"known: auto, {', '.join(known)}")
        self._force = force
        self._chosen: dict[tuple[str, mra.Facts], mra.Attention] = {}
        self.choices: list[Choice] = []

    def multi_read_attention(self, batch: Sequence[Sequence[mra.ReadArgs]]) -> list[mra.Output]:
        """One output a request, from its reads."""
        return self.choose("multi_read_attention", mra.Facts.of(batch[0][0]))(batch)

    def choose(self, operator: str, facts: mra.Facts) -> mra.Attention:
        """The implementation for these facts, picked once and then noted in ``choices``."""
        run = self._chosen.get((operator, facts))
        if run is None:
            run = self._chosen[operator, facts] = self._pick(operator, facts)
        return run

    def _pick(self, operator: str, facts: mra.Facts) -> mra.Attention:
        refused: list[tuple[str, str]] = []
        for name, supports, run in OPERATORS[operator]():
            reason = supports(facts)
            if reason and self._force == name:
                raise UsageError(f"{name}: {reason}", where="--kernels")
            if self._force not in ("auto", name):
                reason = f"--kernels {self._force} was asked for"
            if reason is None:
                self.choices.append(Choice(operator, name, tuple(refused)))
                return run
            refused.append((name, reason))
        raise UsageError(f"no implementation of {operator} fits", where="--kernels")
