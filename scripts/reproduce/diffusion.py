"""What the figures of the second paper share: a sweep over denoising effort and leniency, measured pair by pair by the
code of `foldspec pareto`, and the table of its points."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from _options import real

from foldspec.bench import plot
from foldspec.bench.axes import Asked, Axes
from foldspec.bench.pareto_report import LEGEND, columns, pareto_remarks
from foldspec.bench.settings import BenchSettings
from foldspec.bench.sources import About
from foldspec.engine import Engine
from foldspec.errors import UsageError
from foldspec.loading import FoundPair
from foldspec.options import MethodOptions
from foldspec.resources import DRAFTS, filled_in
from reproduce import counts, live, paper, report, tables
from reproduce.study import Part, Study, one

__all__ = ["DIFFERS", "DREAM", "GEMMA", "TASKS", "add", "axes", "columns_of", "measured", "run", "study"]

DREAM, GEMMA = "qwen2.5-32b-dream-7b", "gemma-4-31b-diffusiongemma"
TASKS = ("gsm8k", "humaneval", "gpqa_diamond")
CONTEXT = {"all pairs": 8192}  # tokens: prompts are short
DIFFERS = "the paper's prompts, temperature, limits of output, batch, GPU and step counts are not in its stored text"
OURS = (
    "Ours, since the stored text has none: zero-shot chat, one sample, seed 0, temperature 1 (--temperature), outputs "
    "of 1,024 tokens at most (gpqa_diamond 4,096), contexts of 8,192, one request at a time, the GPU.",
    "humaneval is scored only with --allow-code-execution: it runs what the model writes.",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Beside those of every table."""
    swept = parser.add_argument_group("what is swept (lists, as 1,2,4; default: as --dry-run says)")
    swept.add_argument("--draft-tokens", metavar="LIST", help="drafts a round")
    swept.add_argument("--steps", metavar="LIST", help="denoising steps a draft")
    swept.add_argument("--confidence", metavar="LIST", help="reveal all places that are surer")
    swept.add_argument("--leniency", metavar="LIST")
    swept.add_argument("--temperature", type=real(0, 100), default=1.0, metavar="X", help="default: %(default)s")
    swept.add_argument("--allow-code-execution", action="store_true", help="run what the model writes: no sandbox")


def axes(
    found: FoundPair,
    chosen: argparse.Namespace,
    *,
    accept: str = "linear",
    leniency: str,
    steps: str | None = None,
    confidence: str | None = None,
    drafts: str | None = None,
) -> Axes:
    """The sweep of one pair; what the options name comes first. A drafter of one step has no efforts to sweep; one that
    does not run here is taken at its word."""
    entry, network = found.entry, found.network
    takes = ("steps", "confidence") if network is None else network.efforts
    asked = Asked(
        chosen.draft_tokens or drafts,
        (chosen.steps or steps) if "steps" in takes else None,
        (chosen.confidence or confidence) if "confidence" in takes else None,
        None,
        accept,
        chosen.leniency or leniency,
    )
    if network is not None:
        most = network.most or filled_in(MethodOptions(), found).draft_tokens
    else:
        most = entry.block if entry is not None else None
    if network is not None and network.most and max(asked.values("draft_tokens") or (1,)) > network.most:
        raise UsageError(f"the drafter proposes {network.most} at most", where="--draft-tokens")
    steppy = "steps" in takes
    return asked.axes(drafter=None, takes_steps=steppy, drafts=most or DRAFTS, temperature=chosen.temperature)


def study(*, notes: tuple[str, ...] = (), **own: Any) -> Study:
    """One of this paper's, with what is ours in all of them. ``notes`` of its own stand before :data:`OURS`."""
    return Study(max_context=CONTEXT, gpu="h200", notes=(*notes, *OURS), **own)


def columns_of(*tasks: str) -> Any:
    """The same tasks for every pair."""
    return lambda pair: [one(task, Part(task)) for task in tasks]


def measured(study: Study, chosen: argparse.Namespace) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each pair's result, as `foldspec pareto --out` leaves it in OUT/work/PAIR: measured as far as it is not there."""
    assert study.axes is not None
    for pair in tables.pairs_of(study, chosen):
        name = pair or "the target"
        engine = tables.loaded(study, chosen, pair)
        about = About(engine.vocabulary, engine.max_context, engine.tokenizer, engine.template)
        sets = tables.by_task(study.chosen(pair or "", chosen.tasks, chosen.lengths))
        settings = _settings(study, chosen, engine, pair or "", sets)
        cells = [cell for parts in sets.values() for cell in counts.cells_of(about, parts, chosen)]
        folder: Path = chosen.out / "work" / name.replace("/", "_")
        live.keep(engine, settings, cells, folder)
        del engine
        gc.collect()  # its memory is the next pair's
        yield name, live.result(folder)


def run(study: Study, chosen: argparse.Namespace) -> report.Report:
    """The points of every pair, and what is said of them."""
    found = list(measured(study, chosen))
    temperature = chosen.temperature
    notes = [f"{name}: {line}" for name, result in found for line in said(result["pareto"], temperature)]
    results = {"pairs": [{"pair": name, "pareto": result["pareto"]} for name, result in found]}
    notes += [line for name, result in found for line in _drawn(study, name, result, chosen.out)]
    known = paper.facts(study.facts)
    notes += [*legend(found, temperature), *(f"The paper: {line}" for line in known["says"]), *known["missing"]]
    return report.Report(results, table(found), None, origins(found), [*notes, *study.notes])


def _drawn(study: Study, pair: str, result: Mapping[str, Any], out: Path) -> list[str]:
    """Draw a pair's figures as `foldspec plot` does; what is said of that."""
    if find_spec("matplotlib") is None:
        return ["Not drawn, for want of matplotlib: pip install 'foldspec[bench]', then the same command."]
    figures = {name: drawn for name, drawn in plot.draw(result).items() if name.startswith("pareto")}
    files = plot.save(figures, out, f"{study.facts}-{pair.replace('/', '_')}")
    return [f"{pair}: drawn in {', '.join(file.name for file in files if file.suffix == '.png')} (and SVG)."]


def table(found: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    head, rows = ["pair"], list[list[str]]()
    for name, result in found:
        shown = columns(result["pareto"])
        head = ["pair", *(title for title, _ in shown)]
        rows += [[name, *(cell(point) for _, cell in shown)] for point in result["pareto"]["points"]]
    return report.aligned(head, rows)


def said(pareto: Mapping[str, Any], temperature: float) -> list[str]:
    """Frontiers and exclusions in words: what stands before the legend."""
    return list(takewhile(lambda line: line not in LEGEND, pareto_remarks(pareto, temperature)))


def legend(found: Sequence[tuple[str, Mapping[str, Any]]], temperature: float) -> list[str]:
    """How the columns are to be read, and which points are lossless: each line once."""
    lines = (pareto_remarks(result["pareto"], temperature)[len(said(result["pareto"], temperature)) :]
             for _, result in found)  # fmt: skip
    return list(dict.fromkeys(chain.from_iterable(lines)))


def origins(found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    keys = ("complete", "created", "env", "settings", "target", "drafter")
    return [{"pair": name} | {key: result[key] for key in keys} for name, result in found]


def _settings(
    study: Study, chosen: argparse.Namespace, engine: Engine, pair: str, sets: Mapping[str, Sequence[Part]]
) -> BenchSettings:
    assert study.axes is not None
    made = study.axes(pair, engine.resources.found, chosen)
    return BenchSettings(
        methods=made.methods,
        axes=made,
        tasks=",".join(sets),
        lengths=str(engine.max_context),
        limit=chosen.limit or 10_000,
        max_new=chosen.max_new,
        seed=chosen.seed,
        data=chosen.data or (),
        warmup=2,
        calibrate=True,
        temperature=chosen.temperature,
        allow_code_execution=chosen.allow_code_execution,
    )
