"""``generate --prompts FILE.jsonl``: many requests from a file, each answer as it completes."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from foldspec.cli_shared import INTERRUPTED, ctrl_c_waits
from foldspec.errors import FoldspecError, UsageError
from foldspec.options import SamplingParams

if TYPE_CHECKING:
    from foldspec.engine import Engine
    from foldspec.memory import MemoryPlan
    from foldspec.records import Completion

__all__ = ["Asked", "answer", "parse", "show_plan"]

Prompt: TypeAlias = str | tuple[int, ...] | list[Mapping[str, str]]
KINDS = ("prompt", "messages", "prompt_ids")


@dataclass(frozen=True)
class Asked:
    """One line of the file: its ``id`` (its number, where it has none), the prompt, and how it is decoded."""

    id: str | int
    prompt: Prompt
    params: SamplingParams


def parse(text: str, defaults: SamplingParams) -> list[Asked]:
    """The requests of a JSONL file: on each line an object with one of ``prompt``, ``messages`` and ``prompt_ids``, an
    ``id`` if it likes, and fields of :class:`SamplingParams` in place of the command line's. Blank lines are nothing.

    Raises :class:`UsageError`, which names the line.
    """
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON's strings may hold U+2028 as it is
        if not line.strip():
            continue
        where = f"--prompts line {number}"
        try:
            found.append(_asked(json.loads(line), number, defaults))
        except UsageError as error:
            raise UsageError(error.what, where=f"{where}, {error.where}" if error.where else where) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"is no request ({' '.join(str(error).split()):.100})", where=where) from None
    if not found:
        raise UsageError("has no requests", where="--prompts")
    return found


def _asked(values: Any, number: int, defaults: SamplingParams) -> Asked:
    if not isinstance(values, dict):
        raise UsageError("must be a JSON object")
    kinds = [kind for kind in KINDS if kind in values]
    if len(kinds) != 1:
        raise UsageError(f"must have exactly one of {', '.join(KINDS)}")
    own = {f.name for f in dataclasses.fields(SamplingParams)}
    for name in values:
        if name not in own | {*KINDS, "id"}:
            raise UsageError(f"has an unknown field {name!r}", do=f"known: {', '.join(sorted(own))}")
    named = values.get("id", number)
    if not isinstance(named, (str, int)):
        raise UsageError(f"must be text or a number, not {named!r}", where="id")
    if isinstance(bias := values.get("logit_bias"), dict):  # JSON's keys are text
        values["logit_bias"] = [(int(token) if token.isdecimal() else token, of) for token, of in bias.items()]
    params = dataclasses.replace(defaults, **{name: value for name, value in values.items() if name in own})
    return Asked(named, _prompt(kinds[0], values[kinds[0]]), params)


def _prompt(kind: str, value: Any) -> Prompt:
    if kind == "prompt":
        if not isinstance(value, str):
            raise UsageError("must be text", where=kind)
        return value
    if not isinstance(value, list) or not value:
        raise UsageError("must be a list that is not empty", where=kind)
    if kind == "messages":
        if not all(
            isinstance(m, dict) and all(isinstance(m.get(key), str) for key in ("role", "content")) for m in value
        ):
            raise UsageError("must be objects with role and content", where=kind)
        return value
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        raise UsageError("must be whole numbers", where=kind)
    return tuple(value)


def show_plan(plan: MemoryPlan) -> None:
    """The memory plan on stderr, before anything is allocated."""
    print(f"foldspec: memory on {plan.device}: {plan}", file=sys.stderr)


def answer(
    engine: Engine,
    asked: Sequence[Asked],
    *,
    encode: Callable[[Prompt], tuple[tuple[int, ...], bool]],
    report: Callable[[Completion], dict[str, Any]],
    used: Mapping[str, Any],
    as_json: bool,
    quiet: bool,
) -> int:
    """Run all, print each as it completes, and return the exit code: that of the first that failed, if any did.
    ``used`` are settings of the command line that ``encode`` looks at, for the report."""
    from foldspec.records import Completion

    going: list[tuple[Asked, tuple[int, ...], bool]] = []
    codes: list[int] = []

    def tell(one: Asked, done: Completion, chat: bool) -> None:
        if done.error is not None:
            codes.append(done.error.exit_code)
            if not quiet:
                print(f"foldspec: {one.id}: {' '.join(str(done.error).split())}", file=sys.stderr)
        if as_json:
            line = {"id": one.id, **report(done)}
            line["settings"] = line["settings"] | vars(one.params) | {"chat": chat, **used}
            line["error"] = None if done.error is None else str(done.error)
            print(json.dumps(line), flush=True)
        else:
            said = ", ".join(filter(None, (done.finish_reason, engine.made_up)))
            print(f"== {one.id} ({said})\n{done.text}", flush=True)

    try:
        for one in asked:
            try:
                going.append((one, *encode(one.prompt)))
            except FoldspecError as error:
                with ctrl_c_waits():
                    tell(one, Completion((), finish_reason="error", error=error), False)
        for i, done in engine.completions([ids for _, ids, _ in going], [one.params for one, _, _ in going]):
            with ctrl_c_waits():
                tell(going[i][0], done, going[i][2])
    except KeyboardInterrupt:
        return INTERRUPTED
    return codes[0] if codes else 0
