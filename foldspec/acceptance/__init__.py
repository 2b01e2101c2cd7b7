"""The acceptance rules by name. A rule is one file and one line here."""

from __future__ import annotations

from importlib import import_module

from foldspec.acceptance.base import AcceptanceRule
from foldspec.errors import UsageError
from foldspec.forcing import Forcing

__all__ = ["RULES", "make_rule"]

# name -> "module:class"; imported when it is asked for
RULES = {"exact": "foldspec.acceptance.exact:Exact", "match": "foldspec.acceptance.match:Match"}


def make_rule(name: str, forcing: Forcing | None = None) -> AcceptanceRule:
    """The rule of that name; with a ``forcing`` none, but what does as it says. Raises :class:`UsageError` for an
    unknown name."""
    if forcing is not None:
        from foldspec.acceptance.forced import Forced

        return Forced(forcing)
    if name not in RULES:
        raise UsageError(f"unknown acceptance rule {name!r}", do=f"known: {', '.join(RULES)}")
    module, _, attribute = RULES[name].partition(":")
    rule: AcceptanceRule = getattr(import_module(module), attribute)()
    return rule
