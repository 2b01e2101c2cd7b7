"""Each figure of the check beside its floor, our targets and what the FOLD paper says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["TARGETS", "lines", "show"]

Lines = dict[str, dict[str, Any]]  # rows by name
LLAMA = "llama-3.1-8b-dflash"
LONG = 128 * 1024

# Section 4.2 of the paper, Llama-3.1-8B on an H100 with vLLM: milliseconds of a round, of long requests of four tasks.
PAPER_MS = {"fold": 12.3, "full": 12.0, "infllm": 13.7, "cmr": 14.0}


class Target(NamedTuple):
    """``found`` gives the figure of some rows, None where it was not measured; it must not be above ``most`` (or
    below ``least``)."""

    what: str
    found: Callable[[Lines], float | None]
    least: float = float("-inf")
    most: float = float("inf")

    def verdict(self, rows: Lines) -> str:
        value = self.found(rows)
        if value is None:
            return "not measured"
        return f"{'met' if self.least <= value <= self.most else 'not met'} ({value:.3g})"


def _figure(name: str, key: str) -> Callable[[Lines], float | None]:
    return lambda rows: rows.get(name, {}).get(key)


def _fold_over_full(rows: Lines) -> float | None:
    fold, full = (rows.get(f"round/{LLAMA} {LONG} {name}", {}).get("ms") for name in ("fold", "full"))
    return None if fold is None or full is None else fold - full


def _wrong(rows: Lines) -> float | None:
    """None unless every kernel that is here was looked at."""
    ends = [row["status"] for name, row in rows.items() if name.startswith("right/")]
    looked = [end for end in ends if end not in ("absent", "planned", "left")]
    if any(end == "wrong" for end in ends):
        return float(ends.count("wrong"))
    return 0.0 if looked and all(end in ("done", "absent") for end in ends) else None


TARGETS = (
    Target("no correctness failure", _wrong, most=0),
    Target("plain decoding at 1K: 0.8 of the copy ceiling or more",
           _figure(f"round/{LLAMA} 1024 ar", "share"), least=0.8),
    Target("plain decoding at 128K: 0.8 of the copy ceiling or more",
           _figure(f"round/{LLAMA} {LONG} ar", "share"), least=0.8),
    Target("both branches of a Llama drafter layer at 128K: 180 us or less",
           _figure(f"time/attention Llama-3.1-8B fold {LONG}", "us"), most=180),
    Target("a FOLD round at 128K: 0.3 ms or less above one of `full`", _fold_over_full, most=0.3),
)  # fmt: skip


def lines(documents: list[dict[str, Any]]) -> Iterator[str]:
    """The report of one check or of its parts; where two have a row, the later one counts."""
    rows: Lines = {row["name"]: row for document in documents for row in document["rows"]}
    for document in documents:
        about = document["machine"]
        driver = (about.get("nvidia") or {}).get("driver_version")
        versions = f"driver {driver}, torch {about['torch']}, Triton {about['triton']}, nvcc {about['nvcc']}"
        where = f"commit {about['commit']}, {document['at']}, {document.get('seconds', '?')} s"
        yield f"{about['device']}, {versions}, {where}"
        if document["dry"]:
            yield "DRY: on a CPU, with kernels interpreted: no figure says anything of speed"
    yield ""
    for name, row in rows.items():
        yield f"{name}: {_told(name, row)}"
    yield ""
    dry = any(document["dry"] for document in documents)
    for target in TARGETS:
        yield f"target, {target.what}: {'not measured' if dry else target.verdict(rows)}"
    for method, ms in PAPER_MS.items():
        ours = rows.get(f"round/{LLAMA} {LONG if method in ('fold', 'full') else 32 * 1024} {method}", {}).get("ms")
        here = "not measured" if dry or ours is None else f"{ours:.3g} ms"
        yield f"paper, a round of Llama-3.1-8B with {method}, on an H100, mean of four tasks: {ms:g} ms; here {here}"
    left = [name for name, row in rows.items() if row["status"] in ("left", "planned")]
    if left:
        yield f"left: {', '.join(left)}"


def _told(name: str, row: dict[str, Any]) -> str:
    if row["status"] != "done":
        return f"{row['status']}: {row.get('why', 'not reached')}"
    if "error" in row:
        return f"right: {row['error']:.2g} of the norm, {row['tolerance']:g} allowed"
    if name.startswith("right/"):
        return "right"
    if "bytes_per_second" in row:
        return f"{row['bytes_per_second'] / 1e9:.4g} GB/s"
    unit = next((unit for unit in ("ms", "us") if unit in row), None)
    if unit is None:
        return "done"
    floor, parts = row.get(f"floor_{unit}"), [f"{row[unit]:.4g} {unit}"]
    if floor is not None:
        parts.append(f"floor {floor:.4g} ({row['share']:.0%} of the copy ceiling)")
    parts += [
        f"{key.removesuffix('_us')} {_number(row[key])}" for key in row if key.endswith("_us") and key != "floor_us"
    ]
    if "tau" in row:
        parts += [f"tau {row['tau']:.3g}", f"graphs: {row['graphs']}"]
    return ", ".join(parts)


def _number(value: Any) -> str:
    return f"{value:.4g} us" if isinstance(value, float) else f"({value})"


def show(files: list[Path]) -> int:
    try:
        documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        text = "\n".join(lines(documents))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"gpu_check: {', '.join(map(str, files))}: no result of a check ({type(error).__name__}: {error})")
        return 2
    print(text)
    return 0
