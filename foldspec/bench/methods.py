"""``--methods``: names with options, ``ar,lookup,full,fold:alpha=4:window=128``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foldspec.errors import UsageError
from foldspec.options import CONTEXT_FIELDS, RULE_FIELDS, WITHOUT_WEIGHTS, MethodOptions

__all__ = ["AR", "AR_AGAIN", "Method", "check_drafts", "order", "parse_methods"]

AR, AR_AGAIN = "ar", "ar again"  # plain decoding, and its second run on every request: the noise floor
_KINDS: dict[str, Callable[[str], object]] = {"int": int, "float": float, "str": str}


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
    del fields["context"], fields["drafter"]  # the name says them
    # a context method reads with the pair's own drafter, whatever runs where no method is named (--drafter lookup)
    changes: dict[str, Any] = {"context": name, "drafter": None}
    if name in WITHOUT_WEIGHTS:
        changes = {"drafter": name}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in fields or key in changes:
            do = f"keys: {', '.join(sorted(fields))}; each KEY=VALUE once"
            raise UsageError(f"{pair!r} is no option of a method", where=f"--methods {words}", do=do)
        try:
            changes[key] = ((CONTEXT_FIELDS | RULE_FIELDS).get(key) or _KINDS[fields[key]])(value)
        except ValueError:
            raise UsageError(f"{value!r} is not a number", where=f"--methods {words}, {key}") from None
    try:
        MethodOptions(**changes)
    except UsageError as error:
        raise UsageError(error.what, where=f"--methods {words}, {error.where}") from None
    return Method(words, changes)


def check_drafts(label: str, draft_tokens: int | None, drafter: object) -> None:
    """Raises :class:`UsageError` for a method that would run as plain decoding under another name."""
    where = f"--methods {label}"
    if draft_tokens == 0:
        raise UsageError("verifies no drafts (draft_tokens is 0): that is plain decoding", where=where)
    if drafter is None:
        raise UsageError("there is no drafter, so a context method has nothing to read with", where=where)


def order(arms: Sequence[str], request: int, rule: str) -> list[str]:
    """The order in which request number ``request`` runs the arms. ``rotate``: requests 2i and 2i+1 begin at the i-th
    arm and run in opposite directions (ABBA), so that drift falls on all arms alike. ``fixed``: as named."""
    if rule == "fixed":
        return list(arms)
    first = request // 2 % len(arms)
    turned = [*arms[first:], *arms[:first]]
    return turned[::-1] if request % 2 else turned
