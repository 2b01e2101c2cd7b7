"""What a table or figure leaves: JSON, Markdown, PNG and SVG, and a few lines on the terminal."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from foldspec.bench.files import replace, write_json
from foldspec.bench.machine import environment
from foldspec.bench.methods import AR_AGAIN
from foldspec.bench.report import as_text
from reproduce import figure
from reproduce.requests import Taken, short, shown, speedup_of, summed_up

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from foldspec.engine import Engine


@dataclass(frozen=True)
class Report:
    """``results`` go to the JSON; ``table`` is Markdown; ``notes`` stand under it, a sentence each; ``origins`` say of
    what was read or measured its settings, command and machine. A table may have no figure."""

    results: Mapping[str, Any]
    table: str
    drawn: Figure | None
    origins: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = field(default_factory=list)


def write(out: Path | None, name: str, module: ModuleType, made: Report, command: Sequence[str]) -> None:
    """``module`` says in MIRRORS which table of which paper this is, and in DIFFERS how. ``out`` None: only print."""
    notes = [f"Mirrors {module.MIRRORS}.", f"Differs: {module.DIFFERS}.", *made.notes]
    head = {
        "name": name,
        "mirrors": module.MIRRORS,
        "differs": module.DIFFERS,
        "notes": list(made.notes),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": without_paths(command),
        "origins": list(made.origins),
    }
    text = f"{made.table}\n\n" + "\n".join(f"- {note}" for note in notes) + "\n"
    if out is not None:
        if made.drawn is not None:
            figure.save(made.drawn, out, name)
        replace(out / f"{name}.md", text.encode(errors="replace"))
        write_json(out / f"{name}.json", {**head, **made.results})
    print(text, end="")


def without_paths(words: Iterable[str]) -> list[str]:
    """A command with the names alone of folders that lie somewhere on this machine."""
    return [Path(word).name if Path(word).is_absolute() else word for word in words]


def origin(engine: Engine, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Of a measurement that is made now: what it was asked for, and where."""
    return dict(json.loads(json.dumps({"plan": plan, "env": environment(engine)})))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return as_text(head, rows, "md")


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same with columns of one width, for a terminal; numbers to the right."""
    wide = [max(3, *map(len, column)) for column in zip(head, *rows, strict=True)]
    right = [all(not row[i] or row[i][0] in "+-0123456789" for row in rows) for i in range(len(head))]

    def padded(row: Sequence[str]) -> list[str]:
        return [cell.rjust(n) if r else cell.ljust(n) for cell, n, r in zip(row, wide, right, strict=True)]

    dashes = ["-" * (n - 1) + ":" if r else "-" * n for n, r in zip(wide, right, strict=True)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (padded(head), dashes, *map(padded, rows)))


def sample(taken: Taken) -> str:
    """Pair, requests and what was left out, in a sentence."""
    first = next(iter(taken.plan["methods"].values()))
    cells = taken.cells()
    counts = sorted({len(requests) for requests in cells.values()})
    lengths = sorted({length for _, length in cells})
    out: Counter[str] = Counter()
    for (_, _, why), count in taken.left_out.items():
        out[why] += count
    return (
        f"{taken.way.capitalize()}, {first['pair'] or first['target']['name']}: "
        f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} requests each of "
        f"{', '.join(dict.fromkeys(task for task, _ in cells))} at {', '.join(map(short, lengths))} tokens; "
        f"left out for all methods: {reasons(out) or 'none'}."
        + "".join(f" PARITY RED, {name} is left out: {why}." for name, why in taken.red.items())
    )


def noise(taken: Taken) -> str:
    """Of live requests: what plain decoding is against itself."""
    again = summed_up(taken.requests, speedup_of(AR_AGAIN))
    return f"Plain decoding run twice on every request has a speedup of {shown(again)} over itself."


def reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in sorted(counts.items()))
