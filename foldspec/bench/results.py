"""``bench.json`` as it is read back by ``compare``, ``plot`` and ``report``: by name, or by its folder's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foldspec.bench.schema import NAME, check
from foldspec.errors import MeasurementError, UsageError

__all__ = ["as_written", "read_result", "runs"]


def read_result(path: Path) -> dict[str, Any]:
    """The result in a file, or in ``bench.json`` of a folder. Raises :class:`UsageError` for what is none."""
    path = path / "bench.json" if path.is_dir() else path
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError("is not there", where=str(path), do="`foldspec bench ... --out DIR` writes one") from None
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror})", where=str(path)) from None
    except (ValueError, RecursionError):
        raise UsageError("is not JSON", where=str(path)) from None
    try:
        json.dumps(result, allow_nan=False)
    except ValueError:
        raise UsageError("has numbers that are not finite: foldspec writes none", where=str(path)) from None
    if not isinstance(result, dict) or result.get("schema") != NAME:
        raise UsageError(f"is no result of foldspec bench ({NAME})", where=str(path))
    try:
        check(result)
    except MeasurementError as error:
        raise UsageError(str(error), where=str(path)) from None
    return result


@contextmanager
def as_written(*names: str) -> Iterator[None]:
    """Around what is made of results that were read. The schema, where jsonschema is there at all, holds the form of a
    file and not its sense: what a changed file says of methods it does not have, or divides by, comes up only here."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"does not agree with itself ({type(error).__name__}: {error!s:.80})"
        do = "if it was changed, `bench ... --resume` or `pareto` sums up anew; else this is a fault in foldspec"
        raise UsageError(what, where=" or ".join(names), do=do) from error


def runs(result: Mapping[str, Any], where: str) -> dict[tuple[str, int, str], dict[str, dict[str, Any]]]:
    """(task, length, id) -> method -> the run of that request, of all that count. Raises :class:`UsageError` where the
    result is of a foldspec that kept none, and for what is no run, or not of every method."""
    table = result.get("requests")
    if table is None:
        raise UsageError("keeps no requests: it is of an older foldspec", where=where, do="run `bench --resume` on it")
    found: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    try:
        for row in table["rows"]:
            run = dict(zip(table["columns"], row, strict=True))
            found.setdefault((run["task"], run["length"], run["id"]), {})[run["method"]] = run
        whole = all(group.keys() >= result["methods"].keys() for group in found.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise UsageError("keeps requests that are not whole", where=where, do="run `bench --resume` on it")
    return found
