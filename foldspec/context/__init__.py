"""The context methods by name. A method is one file and one line here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from foldspec.context.base import ContextMethod, DrafterLayer
from foldspec.errors import UsageError
from foldspec.options import MethodOptions

__all__ = ["METHODS", "make_method"]

# name -> "module:class"; imported when it is asked for
METHODS = {
    "full": "foldspec.context.full:Full",
    "window": "foldspec.context.window:Window",
    "fold": "foldspec.context.fold:Fold",
}


def make_method(options: MethodOptions, layers: Sequence[DrafterLayer], block: int) -> ContextMethod:
    """Raises :class:`UsageError` for an unknown name."""
    if options.context not in METHODS:
        raise UsageError(f"unknown context method {options.context!r}", do=f"known: {', '.join(METHODS)}")
    module, _, attribute = METHODS[options.context].partition(":")
    method: type[ContextMethod] = getattr(import_module(module), attribute)
    return method(options, layers, block)
