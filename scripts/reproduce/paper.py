"""The papers' own numbers, as their stored text has them: one JSON file a table in ``papers/``. Facts, no figures of
ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["cell", "facts", "inputs", "requests"]

FOLDER = Path(__file__).parent / "papers"


@lru_cache
def facts(name: str) -> dict[str, Any]:
    """Of a file; empty without a name."""
    if not name:
        return {}
    return dict(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def cell(name: str, pair: str, column: str) -> Mapping[str, Sequence[float | None]]:
    """By method the figures of a column, in the order of the file's ``figures``; empty where the paper has none."""
    table = facts(name)
    if column not in table.get("columns", ()):
        return {}
    place = table["columns"].index(column)
    rows = table["rows"].get(pair, {})
    return {method: values[place] for method, values in rows.items() if values[place] is not None}


def requests(name: str, pair: str, label: str) -> int | None:
    """How many requests of a part (``govreport``, ``lca 32k``) the paper has under a pair: from the table's own file,
    else from FOLD's Table 7, which lists targets, not drafters. None: it does not say."""
    own = facts(name).get("requests", {})
    own = own.get(pair) or own.get("all pairs") or {}
    if label in own:
        return int(own[label])
    found = _cell(pair, label)
    return None if found is None else found["n"]


def inputs(pair: str, label: str) -> str | None:
    """The range of input lengths in tokens that FOLD's Table 7 prints, as ``1.8K-27K``."""
    found = _cell(pair, label)
    return None if found is None else found["input"]


def _cell(pair: str, label: str) -> dict[str, Any] | None:
    found = facts("fold_table7")["cells"].get(label, {})
    return found.get(pair) or found.get(pair.replace("dspark", "dflash"))
