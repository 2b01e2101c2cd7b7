"""One HTML page of a result: tables, figures and how all of it was made. It needs no network to be read."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foldspec.bench import plot
from foldspec.bench.report import remarks, tables

__all__ = ["page"]

TITLES = {
    "speedup": "Speedup by length of the prompt",
    "tau": "Tau by length of the prompt",
    "acceptance": "Acceptance by position in the block",
    "commits": "Tokens that rounds committed",
    "forest": "Paired speedups",
}
SHOUTED = re.compile(r"\b[A-Z]{4,} [A-Z]{2,}\b|\bLOSSY\b|^INCOMPLETE|^FAILED")  # what the report says in capitals


def page(result: Mapping[str, Any]) -> str:
    """Raises :class:`UsageError` where matplotlib is missing, and where there is nothing to show."""
    import jinja2

    drafter = result["drafter"]
    said = remarks(result)
    shouted = [line for line in said if SHOUTED.search(line)]
    values = {
        "title": f"foldspec bench: {result['target']['name']}" + (f" with {drafter['name']}" if drafter else ""),
        "created": result["created"],
        **{name: result["env"][name] for name in ("device", "threads", "torch", "foldspec", "git")},
        "warnings": shouted,
        "remarks": [line for line in said if line not in shouted],
        "tables": [
            {
                "title": title,
                "head": [name for name, _ in columns],
                "rows": [[f(row) for _, f in columns] for row in rows],
            }
            for title, columns, rows in tables(result)
        ],
        "figures": [(TITLES[name], _svg(figure, name)) for name, figure in plot.draw(result).items()],
        "command": shlex.join(result["command"]),
        "parts": [(name, json.dumps(result[name], indent=1)) for name in ("env", "settings", "methods", "tasks")],
    }
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(values)


def _svg(figure: Any, name: str) -> str:
    """The figure as an element of a page. Ids are made its own: those of two figures must not meet."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
