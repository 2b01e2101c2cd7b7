"""``--methods``: names with options, ``ar,lookup,full,fold:alpha=4:window=128``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foldspec.errors import UsageError
from foldspec.options import MethodOptions

__all__ = ["AR", "AR_AGAIN", "Method", "order", "parse_methods"]

AR, AR_AGAIN = "ar", "ar again"  # plain decoding, and its second run on every request: the noise floor
_KINDS = {"int": int, "float": float, "str": str}


@dataclass(frozen=True)
class Method:
    """``label`` as the user wrote it; ``changes`` are what ``Engine.using`` takes."""

    label: str
    changes: dict[str, Any]


def parse_methods(text: str) -> list[Method]:
    """AR first, whether it was named or not, then the others in order. Raises :class:`UsageError`."""
    methods = [Method(AR, {"draft_tokens": 0})]
    for words in filter(None, (part.strip() for part in text.split(","))):
        method = _parse(words)
        if method.label == AR:
            continue
        if any(method.label == known.label or method.changes == known.changes for known in methods):
            raise UsageError("is named twice", where=f"--methods {words}")
        methods.append(method)
    if len(methods) == 1:
        raise UsageError("names nothing to compare with plain decoding", where="--methods", do="for example full,fold")
    return methods


def _parse(words: str) -> Method:
    name, *pairs = words.split(":")
    if name == AR:
        if pairs:
            raise UsageError("plain decoding takes no options", where=f"--methods {words}")
        return Method(AR, {"draft_tokens": 0})
    fields = {f.name: str(f.type).removesuffix(" | None") for f in dataclasses.fields(MethodOptions)}
    changes: dict[str, Any] = {"drafter": "lookup"} if name == "lookup" else {"context": name}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in fields or key in changes:
            do = f"keys: {', '.join(sorted(fields.keys() - {'context', 'drafter'}))}; each KEY=VALUE once"
            raise UsageError(f"{pair!r} is no option of a method", where=f"--methods {words}", do=do)
        try:
            changes[key] = _KINDS[fields[key]](value)
        except ValueError:
            raise UsageError(f"{value!r} is not a number", where=f"--methods {words}, {key}") from None
    unknown = changes.keys() - fields.keys()
    if unknown:
        raise UsageError(f"there is no {name!r} here", where=f"--methods {words}")
    try:
        MethodOptions(**changes)
    except UsageError as error:
        raise UsageError(error.what, where=f"--methods {words}, {error.where}") from None
    return Method(words, changes)


def order(arms: Sequence[str], request: int, rule: str) -> list[str]:
    """The order in which request number ``request`` runs the arms. ``rotate``: requests 2i and 2i+1 begin at the i-th
    arm and run in opposite directions (ABBA), so that drift falls on all arms alike. ``fixed``: as named."""
    if rule == "fixed":
        return list(arms)
    first = request // 2 % len(arms)
    turned = [*arms[first:], *arms[:first]]
    return turned[::-1] if request % 2 else turned
