"""One HTML page of a result: tables, figures and how all of it was made. It needs no network to be read."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foldspec.bench import plot
from foldspec.bench.pareto_report import columns, pareto_remarks
from foldspec.bench.report import Column, Row, remarks, tables

__all__ = ["page"]

TITLES = {
    "pareto-score": "Score against speed",
    "pareto-logprob": "Log-probability under the target against speed",
    "pareto-agreement": "Agreement with the verifier against speed",
    "pareto-model": "The throughput model beside what was measured",
    "speedup": "Speedup by length of the prompt",
    "tau": "Tau by length of the prompt",
    "acceptance": "Acceptance by position in the block",
    "commits": "Tokens that rounds committed",
    "forest": "Paired speedups",
}
SHOUTED = re.compile(r"\b[A-Z]{4,} [A-Z]{2,}\b|\bLOSSY\b|^INCOMPLETE")  # what the report says in capitals


def page(result: Mapping[str, Any]) -> str:
    """Raises :class:`UsageError` where matplotlib is missing, and where there is nothing to show."""
    import jinja2

    drafter, kind = result["drafter"], "pareto" if result.get("pareto") else "bench"
    said = remarks(result)
    shouted = [line for line in said if SHOUTED.search(line)]
    values = {
        "title": f"foldspec {kind}: {result['target']['name']}" + (f" with {drafter['name']}" if drafter else ""),
        "created": result["created"],
        **{name: result["env"][name] for name in ("device", "threads", "torch", "foldspec", "git")},
        "warnings": shouted,
        "remarks": [line for line in said if line not in shouted],
        "tables": [
            {
                "title": title,
                "head": [name for name, _ in shown],
                "rows": [[f(row) for _, f in shown] for row in rows],
                "notes": notes,
                "folded": kind == "pareto" and not notes,  # what the same runs are as a bench
            }
            for title, shown, rows, notes in [*_sweep(result), *((*table, []) for table in tables(result))]
        ],
        "figures": [(TITLES[name], _svg(figure, name)) for name, figure in plot.draw(result).items()],
        "command": shlex.join(result["command"]),
        "parts": [(name, json.dumps(result[name], indent=1)) for name in ("env", "settings", "methods", "tasks")],
    }
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(values)


def _sweep(result: Mapping[str, Any]) -> list[tuple[str, Sequence[Column], Sequence[Row], list[str]]]:
    """The points of a sweep; and under them in words its frontiers, what is excluded and how all of it is meant."""
    sweep = result.get("pareto")
    if not sweep or not sweep["points"]:
        return []
    notes = pareto_remarks(sweep, result["settings"]["temperature"])
    return [("every point of the sweep", columns(sweep), sweep["points"], notes)]


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
