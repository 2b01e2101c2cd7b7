"""The commands that read results of ``foldspec bench``: ``compare``, ``plot`` and ``report``. They import no torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from foldspec.errors import ResourceError

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add all three to the subparsers of the command line."""
    compare = commands.add_parser("compare", help="two results of bench, request by request", allow_abbrev=False)
    compare.set_defaults(command=_compare)
    compare.add_argument("a", metavar="A", help="bench.json, or the folder of --out")
    compare.add_argument("b", metavar="B", help="the same: speedups are B's over A's")
    compare.add_argument("--methods", metavar="LIST", help="default: all of both; full/fold: A's full with B's fold")
    compare.add_argument("--format", default="table", choices=("table", "md", "csv", "json"))

    plot = commands.add_parser("plot", help="figures of a result of bench", allow_abbrev=False)
    plot.set_defaults(command=_plot)
    plot.add_argument("result", metavar="RESULT", help="bench.json, or the folder of --out")
    known = (
        "speedup,tau,acceptance,commits,forest; of a sweep pareto-score,pareto-logprob,pareto-agreement,pareto-model"
    )
    plot.add_argument("--figures", metavar="LIST", help=f"{known}; default: all there are")
    plot.add_argument("--out", metavar="DIR", default=".", help="default: the current folder")

    report = commands.add_parser("report", help="a result of bench as one HTML page", allow_abbrev=False)
    report.set_defaults(command=_report)
    report.add_argument("result", metavar="RESULT", help="bench.json, or the folder of --out")
    report.add_argument("--out", metavar="FILE", default="report.html", help="default: report.html")


def _compare(options: argparse.Namespace) -> int:
    from foldspec.bench.compare import compare, render
    from foldspec.bench.results import as_written, read_result

    methods = [] if options.methods is None else [name for name in options.methods.split(",") if name]
    a, b = (read_result(Path(name)) for name in (options.a, options.b))
    with as_written(options.a, options.b):
        found = compare(a, b, (options.a, options.b), methods=methods)
        text = json.dumps(found, allow_nan=False) if options.format == "json" else render(found, options.format)
    print(text)
    return 0


def _plot(options: argparse.Namespace) -> int:
    from foldspec.bench import plot
    from foldspec.bench.results import as_written, read_result

    chosen = None if options.figures is None else plot.names(options.figures.split(","))
    path = Path(options.result)
    result = read_result(path)
    with as_written(options.result):
        figures = plot.draw(result, chosen)
    stem = path.stem if path.is_file() and path.stem != "bench" else path.resolve().name if path.is_dir() else "bench"
    with as_written(options.result):  # some of a figure is made when it is saved
        saved = plot.save(figures, Path(options.out), stem)
    for written in saved:
        print(written)
    return 0


def _report(options: argparse.Namespace) -> int:
    from foldspec.bench.files import replace
    from foldspec.bench.page import page
    from foldspec.bench.results import as_written, read_result

    result = read_result(Path(options.result))
    with as_written(options.result):
        text = page(result)
    try:
        replace(Path(options.out), text.encode())
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        why = error.strerror if isinstance(error, OSError) else error
        raise ResourceError(f"cannot be written ({why})", where=f"--out {options.out}") from None
    print(options.out, file=sys.stdout)
    return 0
