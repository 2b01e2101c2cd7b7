"""The context methods by name. A method is one file and one line here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from foldspec.context.base import ContextMethod, DrafterLayer
from foldspec.errors import UsageError
from foldspec.options import MethodOptions

__all__ = ["METHODS", "make_method", "uses"]

# name -> "module:class"; imported when it is asked for
METHODS = {
    "full": "foldspec.context.full:Full",
    "window": "foldspec.context.window:Window",
    "fold": "foldspec.context.fold:Fold",
}


def make_method(options: MethodOptions, layers: Sequence[DrafterLayer], block: int) -> ContextMethod:
    """Raises :class:`UsageError` for an unknown name."""
    return _find(options.context)(options, layers, block)


def uses(name: str) -> frozenset[str]:
    """The options that a method looks at, of those that say how context is read. Raises :class:`UsageError` for an
    unknown name."""
    return _find(name).uses


def _find(name: str) -> type[ContextMethod]:
    if name not in METHODS:
        raise UsageError(f"unknown context method {name!r}", do=f"known: {', '.join(METHODS)}")
    module, _, attribute = METHODS[name].partition(":")
    method: type[ContextMethod] = getattr(import_module(module), attribute)
    return method
