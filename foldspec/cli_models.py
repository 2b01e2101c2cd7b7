"""The commands ``foldspec models`` and ``foldspec check``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from foldspec.cli_shared import add_engine, add_pair, ctrl_c_waits, engine_options, notices
from foldspec.errors import ResourceError, UsageError
from foldspec.values import token_count

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add both to the subparsers of the command line."""
    check = commands.add_parser("check", help="what runs here, and whether a pair fits together", allow_abbrev=False)
    check.set_defaults(command=_check)
    add_pair(check)
    add_engine(check)
    check.add_argument("--json", action="store_true", help="print one JSON object")

    models = commands.add_parser("models", help="the pairs that have a name", allow_abbrev=False)
    models.set_defaults(command=_models)
    models.add_argument("pair", nargs="?", metavar="PAIR", help="tell all of one: values and their sources, memory")
    models.add_argument(
        "--max-context", type=token_count, metavar="N", help="memory with so many tokens, as 32k (default: the most)"
    )
    models.add_argument("--markdown", action="store_true", help="print the README's table")
    models.add_argument("--json", action="store_true", help="print one JSON object")


def _check(options: argparse.Namespace) -> int:
    with ctrl_c_waits():
        from foldspec.engine import split_options
        from foldspec.report import check
        from foldspec.terminal import Terminal

    chosen, _ = split_options(engine_options(options))
    with Terminal(quiet=False) as terminal:
        report = check(
            chosen,
            options.pair,
            target=options.target,
            drafter=options.drafter,
            progress=terminal.progress,
        )
    notices(report.pop("notices"))
    short = report["short"]
    if options.json:
        print(json.dumps(report))
    else:
        for title in ("environment", "pair", "memory"):
            if report[title] is not None:
                print(title)
                for line in _lines(report[title]):
                    print(f"  {line}")
    if short is not None:
        notices([short])
        return ResourceError.exit_code
    return 0


def _models(options: argparse.Namespace) -> int:
    _consistent(options)
    with ctrl_c_waits():
        from foldspec.catalog import describe, known, table
        from foldspec.engine import cache_folder

    if options.markdown:
        print(table(), end="")
        return 0
    if options.pair is not None:
        report = describe(options.pair, cache_folder(), options.max_context)
        if options.json:
            print(json.dumps({options.pair: report}))
            return 0
        print(options.pair)
        for line in _lines(report):
            print(f"  {line}")
        return 0
    report = known(cache_folder())
    if options.json:
        print(json.dumps(report))
        return 0
    width = max(len(name) for name in report["pairs"])
    for name, pair in report["pairs"].items():
        print(f"{name:<{width}}  {pair['description']}; {_state(pair)}")
    for kind in ("targets", "drafters", "contexts", "rules"):
        print(f"{kind}: {', '.join(report[kind])}")
    print("foldspec models NAME tells more of a pair")
    return 0


def _consistent(options: argparse.Namespace) -> None:
    if options.max_context is not None:
        if options.pair is None:
            raise UsageError("needs the name of a pair", where="--max-context")
        if options.max_context < 1:
            raise UsageError(f"must be at least 1, not {options.max_context}", where="--max-context")
    if options.markdown and (options.pair is not None or options.json):
        raise UsageError("is the table of all pairs", where="--markdown", do="leave the pair and --json out")


def _state(pair: dict[str, Any]) -> str:
    """In a few words: how large, whether it is here, whether it runs."""
    size = "size unknown" if pair["bytes"] is None else f"{pair['bytes'] / 1e9:.3g} GB"
    here = "on this disk" if pair["on disk"] else "not on this disk"
    runs = {"yes": "", "target alone": ", its target runs, its drafter not yet", "no": ", does not run yet"}
    return f"{size}, {here}{runs[pair['runs']]}"


def _lines(values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and set(value) == {"value", "source"}:
            yield f"{key}: {_word(value['value'])} ({value['source']})"
        elif isinstance(value, dict) and not value:
            yield f"{key}: none"
        elif isinstance(value, dict):
            yield f"{key}:"
            yield from (f"  {line}" for line in _lines(value))
        else:
            yield f"{key}: {_word(value)}"


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
