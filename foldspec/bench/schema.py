"""``bench.schema.json``, and a result checked against it where jsonschema is installed (extra ``bench``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foldspec.errors import MeasurementError

__all__ = ["NAME", "check", "schema"]

NAME = "foldspec.bench/1"


def schema(of: str | None = None) -> dict[str, Any]:
    """The schema of ``bench.json``, or of one of its definitions: ``request`` is a line of ``requests.jsonl``."""
    whole: dict[str, Any] = json.loads(Path(__file__).with_name("bench.schema.json").read_text(encoding="utf-8"))
    return whole if of is None else {**whole["$defs"][of], "$defs": whole["$defs"]}


def check(result: Any, of: str | None = None) -> None:
    """Raises :class:`MeasurementError` if the result breaks the schema. Without jsonschema nothing is checked."""
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        return
    for error in Draft202012Validator(schema(of)).iter_errors(result):
        where = "/".join(map(str, error.path))
        raise MeasurementError(f"the result breaks its schema: {error.message:.200}", where=where)
