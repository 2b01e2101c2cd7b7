"""The context methods by name. A method is one file and one line here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from foldspec.context.base import ContextMethod, DrafterLayer
from foldspec.errors import UsageError
from foldspec.options import CONTEXT, MethodOptions

__all__ = ["METHODS", "coverage_of", "make_method", "uses"]

# name -> "module:class"; imported when it is asked for
METHODS = {
    "full": "foldspec.context.full:Full",
    "window": "foldspec.context.window:Window",
    "fold": "foldspec.context.fold:Fold",
    "fold_auto": "foldspec.context.fold_auto:FoldAuto",
    "shared_window": "foldspec.context.shared_window:SharedWindow",
    "streaming": "foldspec.context.streaming:Streaming",
    "yarn": "foldspec.context.yarn:YaRN",
    "rerope": "foldspec.context.rerope:ReRoPE",
    "infllm": "foldspec.context.infllm:InfLLM",
    "cmr": "foldspec.context.cmr:CMR",
}


def make_method(options: MethodOptions, layers: Sequence[DrafterLayer], block: int) -> ContextMethod:
    """Raises :class:`UsageError` for an unknown name, or for values by layer that are not one a layer."""
    return _find(options.context or CONTEXT)(options, layers, block)


def uses(name: str) -> frozenset[str]:
    """The options that a method looks at, of those that say how context is read. Raises :class:`UsageError` for an
    unknown name."""
    return _find(name).uses


def coverage_of(name: str) -> str:
    """The drafter layers that a method is for unless an option says otherwise: ``all``, or ``full`` ones. Raises
    :class:`UsageError` for an unknown name."""
    return _find(name).coverage


def _find(name: str) -> type[ContextMethod]:
    if name not in METHODS:
        raise UsageError(f"unknown context method {name!r}", do=f"known: {', '.join(METHODS)}")
    module, _, attribute = METHODS[name].partition(":")
    method: type[ContextMethod] = getattr(import_module(module), attribute)
    return method
