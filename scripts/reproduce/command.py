"""Tables and figures of two papers, measured on any pair.

    python scripts/reproduce NAME --dry-run                                 what it would take; nothing is needed for it
    python scripts/reproduce NAME --out DIR [--pair PAIR] [options]         NAME --help has them all

DIR gets NAME.json, NAME.md and figures; what was measured request by request is kept in DIR/work, where the same
command goes on after a stop. Where a NAME has ``--work`` and ``--bench``, they make its table of what lies somewhere
already, and measure nothing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from _options import Parser

from foldspec.cli_shared import INTERRUPTED
from foldspec.errors import FoldspecError, ResourceError, UsageError
from reproduce import diffusion, dry, figure, options, report, tables
from reproduce.study import Study

GROUPS = {
    "FOLD, on the paper's benchmarks (hours on a GPU; other pairs and tasks on any machine)": {
        "table2": "every method with DFlash drafters",
        "table3": "every method with DSpark drafters",
        "table7": "how many requests there are, and of which lengths: no model runs",
        "table8": "every method on SPEED-Bench",
        "table9": "every method with Qwen3-8B's DFlash",
        "table10": "every method in a second engine, which is this one, and outputs that differ",
    },
    "FOLD, on tasks that are made here (minutes on the embedded pair and a CPU, all_methods some 100)": {
        "all_methods": "every method by task and length: tau offline and live, speedup",
        "table4": "what the window brings, and what the far memory, on code",
        "table5": "alpha 2 against 1 and 4 against 2, by group of tasks",
        "table11": "table4 on docs, with intervals",
        "table12": "table5 by task",
        "figure2": "speedup of the original drafter by length",
        "figure5": "speedup of every method by length",
        "figure6": "tau of every method by length",
        "figure1": "where the time of a plain step and of a round goes, by length",
        "finding1": "what drafts are worth where the block alone is moved away",
        "figure3": "whether context features say which of two comes first, and shuffled",
        "adaptive": "fold_auto against fixed alphas and the window, on held-out requests",
    },
    "Speculative diffusion, each a sweep over effort and leniency": {
        "diffusion_table1": "what drafter and verifier score alone, and what is left out for it",
        "diffusion_figure2b": "diffusion alone by its steps, beside lenient speculative decoding",
        "diffusion_figure3": "the throughput model beside what is measured",
        "diffusion_figure4": "frontiers of a masked and a uniform drafter under modified Cactus",
        "diffusion_figure5": "frontiers of drafters with one verifier",
        "diffusion_blocks": "the sweep at several numbers of drafts a round (section G.2)",
    },
}
NAMES = {name: what for group in GROUPS.values() for name, what in group.items()}


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    try:
        make(words)
    except FoldspecError as error:
        return fail(str(error), error.exit_code)
    except OSError as error:
        return fail(str(error), ResourceError.exit_code)
    except KeyboardInterrupt:
        return fail("stopped; the same command goes on from what was kept", INTERRUPTED)
    return 0


def make(words: Sequence[str]) -> None:
    """Measure or read, write the files, print the table."""
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(__doc__)
        for group, names in GROUPS.items():
            print(f"{group}:", *(f"    {each:18}  {what}" for each, what in names.items()), "", sep="\n")
        return
    if name not in NAMES:
        raise UsageError(f"{name[:40]!r} is no table or figure", do=f"known: {', '.join(NAMES)}")
    module = importlib.import_module(f"reproduce.{name}")
    parser = Parser(
        prog=f"reproduce {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    study: Study | None = getattr(module, "STUDY", None)
    if study is None:
        options.add(parser)
        module.options(parser)
    else:
        tables.add(parser, study)
        if study.axes is not None:
            diffusion.add(parser)
    chosen = parser.parse_args(words[1:])
    if chosen.dry_run:
        print("\n".join(dry.lines(name, module, study or dry.of_options(module, chosen), chosen)))
        return
    if chosen.out is None and getattr(module, "WRITES", True):
        raise UsageError("needs --out DIR, or --dry-run", where=name)
    if study is None:
        figure.need_matplotlib()  # said now, not after hours
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
    made = module.run(chosen)
    report.write(chosen.out, name, module, made, ["reproduce", *words])


def fail(what: str, code: int) -> int:
    print(f"reproduce: {' '.join(what.split())}", file=sys.stderr)
    return code
