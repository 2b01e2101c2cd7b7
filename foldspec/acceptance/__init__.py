"""The acceptance rules by name. A rule is one file and one line here."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from foldspec.acceptance.base import AcceptanceRule
from foldspec.errors import UsageError
from foldspec.forcing import Forcing

__all__ = ["RULES", "make_rule"]

# name -> "module:class"; imported when it is asked for
RULES = {
    "exact": "foldspec.acceptance.exact:Exact",
    "match": "foldspec.acceptance.match:Match",
    "linear": "foldspec.acceptance.linear:Linear",
    "lenience": "foldspec.acceptance.lenience:Lenience",
    "cactus": "foldspec.acceptance.cactus:Cactus",
    "typical": "foldspec.acceptance.typical:Typical",
    "unverified": "foldspec.acceptance.unverified:Unverified",
}


def make_rule(name: str, forcing: Forcing | None = None, **options: Any) -> AcceptanceRule:
    """A rule with its options, which are the parameters of its class (``MethodOptions.rule_options``, checked there);
    with a ``forcing`` none of them, but what does as it says. Raises :class:`UsageError` for an unknown name, an option
    that the rule does not take and one that it lacks."""
    if forcing is not None:
        from foldspec.acceptance.forced import Forced

        return Forced(forcing)
    if name not in RULES:
        raise UsageError(f"unknown acceptance rule {name!r}", do=f"known: {', '.join(RULES)}")
    module, _, attribute = RULES[name].partition(":")
    kind = getattr(import_module(module), attribute)
    taken = inspect.signature(kind).parameters
    for option in options:
        if option not in taken:
            do = f"it takes {', '.join(taken)}" if taken else "leave it out"
            raise UsageError(f"changes nothing about the rule {name}", where=option, do=do)
    for option, parameter in taken.items():
        if parameter.default is parameter.empty and option not in options:
            raise UsageError(f"the rule {name} needs it", where=option, do=f"give --{option}")
    rule: AcceptanceRule = kind(**options)
    return rule
