"""``--dry-run``: what would be measured, in which memory, and about how long a GPU needs. From the registry alone: no
weights, no network, no matplotlib; a tokenizer only where ``--data`` names data to count."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from foldspec.bench.inputs import parse_lengths
from foldspec.bench.methods import parse_methods
from foldspec.bench.sources import About
from foldspec.checkpoints.registry import find
from foldspec.errors import CheckpointError, FoldspecError
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import FoundPair, built_in, find_pair
from foldspec.memory import MemoryPlan, make_plan, size
from foldspec.options import RULE_FIELDS, EngineOptions, MethodOptions
from foldspec.resources import CHUNKS, filled_in, pick_context
from foldspec.tasks import MADE, PUBLISHED, make_task
from foldspec.tasks.published import longest_prompt
from reproduce import counts, live, offline, paper, report, tables
from reproduce.requests import short
from reproduce.roofline import ASSUMED, GPUS, Gpu, Roofline
from reproduce.study import Column, Part, Study, one

__all__ = ["lines", "of_options"]

K = 1024
UNKNOWN = 256  # tokens of a prompt of which no length is known


@dataclass(frozen=True)
class Planned:
    """One part under one pair. ``n`` None: not known; ``whose`` count it is; ``tokens`` of a prompt, about."""

    pair: str
    column: str
    part: Part
    output: int
    n: int | None
    whose: str
    input: str
    tokens: int
    hours: float | None


@dataclass(frozen=True)
class Known:
    """A pair as the registry has it; ``refused``: why its drafter is left out."""

    name: str
    found: FoundPair
    arms: Sequence[str]
    refused: str
    longest: int
    plan: MemoryPlan


def lines(name: str, module: ModuleType, study: Study, chosen: argparse.Namespace) -> Iterator[str]:
    """The report, a line each."""
    gpu, about = GPUS[chosen.gpu], [f"Dry run of {name}: {module.MIRRORS}. Nothing is measured."]
    pairs = [_known(pair, study, chosen) for pair in tables.pairs_of(study, chosen)]
    planned, remarks = list[Planned](), list[str]()
    for each in pairs:
        rows, why = _planned(each, study, chosen, gpu)
        planned += rows
        remarks += why
    yield from about
    yield ""
    yield _pairs(pairs, gpu)
    yield ""
    if planned:
        yield _requests(planned, study, gpu)
        yield ""
    for what, names in _runs(pairs, study, chosen) if study.bench else ():
        yield f"- Runs of each request, {' and '.join(names)}: ar, {what}, and ar again."
    yield from (f"- {remark}" for remark in remarks)
    yield from (f"- {line}" for line in _left_out(pairs, planned))
    yield from (f"- {note}" for note in study.notes)
    facts = paper.facts(study.facts)
    if facts:
        yield f"- Beside it stands: {facts['source']}."
    yield from (f"- The paper: {line}" for line in facts.get("says", ()))
    yield from (f"- {line}" for line in facts.get("missing", ()))
    yield f"- Differs: {module.DIFFERS}."
    if study.bench:
        what = f"{_total(planned)} on one {gpu.name}, an estimate and no measurement"
        unknown = f"prompts of unknown length count as {UNKNOWN} tokens; " if any(not p.input for p in planned) else ""
        yield f"- Expected: {what}: {ASSUMED}; {unknown}{_speeds(study)}."
    else:
        yield "- Its time is not estimated: it is not measured as a bench is."


def of_options(module: ModuleType, chosen: argparse.Namespace) -> Study:
    """A diagnostic over tasks that are made here, as its options have it."""
    chosen.pair = None if chosen.pair is None else [chosen.pair]
    way, wanted = getattr(chosen, "way", ""), getattr(chosen, "live_lengths", None) or chosen.lengths
    chosen.lengths, _ = parse_lengths(f"{chosen.lengths},{wanted}", 1 << 40)
    chosen.data, methods = None, {"": "full", "offline": offline.METHODS}.get(way, live.METHODS)
    parts = [Part(task, tuple(chosen.lengths), chosen.limit) for task in chosen.tasks]
    notes = list[str]()
    if getattr(chosen, "load_format", "") == "dummy":
        parts = []
        notes.append(f"Contexts are made up, of {', '.join(map(short, chosen.lengths))} tokens: there are no requests.")
    if way in ("offline", "both"):
        notes.append(f"Offline, these draft at every position of one text: {offline.METHODS.replace(',', ', ')}.")
    chosen.tasks, chosen.lengths = [], []  # they are in the parts
    return Study(
        facts="",
        pairs=("smollm2-135m",),
        columns=lambda pair: [one(part.task, part) for part in parts],
        arms=methods.split(","),
        notes=tuple(notes),
        bench=way in ("live", "both"),
    )


def _runs(pairs: Sequence[Known], study: Study, chosen: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """What runs beside plain decoding, and of which pairs."""
    found: dict[str, list[str]] = {}
    for each in pairs:
        what = ", ".join(each.arms)
        if study.axes is not None:
            swept = study.axes(each.name, each.found, chosen).as_dict()
            drafts, efforts, leniency = (", ".join(map(str, swept[k])) for k in ("draft_tokens", "effort", "leniency"))
            what = f"{len(each.arms)} points: {drafts} drafts a round by effort {efforts} by {swept['accept']} with "
            what += f"leniency {leniency}, and the drafter alone of each effort"
        found.setdefault(what, []).append(each.name)
    yield from found.items()


def _speeds(study: Study) -> str:
    if "speedup" in paper.facts(study.facts).get("figures", ()):
        return "methods have the paper's speedups where it has any of the pair and task, else decode as plain decoding"
    slow = "as slow as plain decoding, since no speedup is known"
    return f"every method decodes {slow}" if study.axes is None else f"each point runs twice a request, {slow}"


def _known(pair: str | None, study: Study, chosen: argparse.Namespace) -> Known:
    kernels, refused = Kernels.of(EngineOptions()), ""
    if chosen.target is not None or chosen.drafter is not None:
        options = EngineOptions(offline=chosen.offline)
        found = find_pair(pair, chosen.target, chosen.drafter, options=options, kernels=kernels, peeking=True)
    else:
        entry = find(pair or "")
        try:
            found = built_in(entry, kernels)
        except CheckpointError as error:
            found, refused = built_in(entry, kernels, alone=True), str(error)
    wanted = chosen.max_context or study.context_of(pair)
    longest = pick_context(wanted, found)
    arms = study.arms_of(pair or "", found, chosen)
    plans = [
        _plan(found, method, kernels, longest)
        for method in _distinct(arms)
        if found.network is not None or method == MethodOptions()
    ]
    if not plans:
        plans = [_plan(found, MethodOptions(draft_tokens=0), kernels, longest)]
    name = pair or str(found.target.source["name"])
    return Known(name, found, arms, refused, longest, max(plans, key=lambda plan: plan.total))


def _distinct(arms: Sequence[str]) -> list[MethodOptions]:
    """What differs in memory: the rule of acceptance does not."""
    found: dict[MethodOptions, None] = {}
    for method in parse_methods(",".join(arms)):
        found[MethodOptions(**{key: v for key, v in method.changes.items() if key not in ("accept", *RULE_FIELDS)})] = (
            None
        )
    return list(found)


def _plan(found: FoundPair, method: MethodOptions, kernels: Kernels, longest: int) -> MemoryPlan:
    return make_plan(
        found,
        EngineOptions(max_batch=1),
        filled_in(method, found),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),  # which has no graphs of its own to plan for
        kernels=kernels,
        chunk=CHUNKS["cuda"],
        longest=longest,
        must_fit=False,
    )


def _planned(known: Known, study: Study, chosen: argparse.Namespace, gpu: Gpu) -> tuple[list[Planned], list[str]]:
    """Each part once, under its first column; and why something could not be counted."""
    roof, rows, remarks = Roofline(known.found, gpu), list[Planned](), list[str]()
    about = _about(known, study, chosen, remarks)
    done = set[Part]()
    for column in study.chosen(known.name, chosen.tasks, chosen.lengths):
        for part in column.parts:
            if part in done:
                continue
            done.add(part)
            counted = _counted(about, part, chosen, remarks)
            n, whose, tokens, text = counted or _said(known, study, part, chosen)
            output = chosen.max_new or make_task(part.task).max_new
            seconds = (
                None
                if n is None or not study.bench
                else roof.requests(n, tokens, output, _speedups(study, known, column))
            )
            hours = None if seconds is None else seconds / 3600
            rows.append(Planned(known.name, column.name, part, output, n, whose, text, tokens, hours))
    if known.refused:
        remarks.append(f"{known.name}: its drafter is left out of the memory: {known.refused}")
    return rows, remarks


def _about(known: Known, study: Study, chosen: argparse.Namespace, remarks: list[str]) -> About | None:
    """What data is counted with, where some is given."""
    if not counts.data_of(chosen).paths:
        return None
    try:
        pair = known.found.entry.name if known.found.entry is not None else None
        return counts.about(chosen, pair, known.longest)
    except FoldspecError as error:
        remarks.append(f"{known.name}: --data is not counted, for want of its tokenizer ({error})")
        return None


def _counted(
    about: About | None, part: Part, chosen: argparse.Namespace, remarks: list[str]
) -> tuple[int, str, int, str] | None:
    """``n``, whose it is, mean length and range: of our own requests, where the data is given."""
    if about is None or part.task not in counts.data_of(chosen).paths:
        return None
    try:
        sizes = [len(item.ids) for cell in counts.cells_of(about, [part], chosen) for item in cell.inputs]
    except FoldspecError as error:
        remarks.append(f"{part.label} is not counted: {error}")
        return None
    return len(sizes), "ours", sum(sizes) // len(sizes), counts.span(sizes)


def _said(known: Known, study: Study, part: Part, chosen: argparse.Namespace) -> tuple[int | None, str, int, str]:
    """The same from what the paper says, or from what is asked for."""
    count, span = paper.requests(study.facts, known.name, part.label), paper.inputs(known.name, part.label)
    most = chosen.limit or (part.most if part.task in MADE else None)
    bound = None if most is None else most * max(1, len(part.lengths))
    exact = part.lengths and part.task not in ("repobench", "repobench_java")
    tokens = sum(part.lengths) // len(part.lengths) if exact else _middle(span) or UNKNOWN
    if span is None:
        span = " ".join(map(short, part.lengths)) if part.lengths else ""
    if part.task in PUBLISHED and exact and min(part.lengths) > longest_prompt(known.longest, 1):
        return 0, "none fits", tokens, span
    if count is None and bound is None:
        return None, "needs its data", tokens, span
    if count is None or (bound is not None and bound < count):
        return bound, "as asked for", tokens, span
    return count, paper.facts(study.facts).get("count of", "the paper's"), tokens, span


def _middle(span: str | None) -> int | None:
    """Of ``1.8K-27K``, in tokens."""
    if span is None:
        return None
    ends = [float(end.rstrip("K†")) for end in span.split("-")]
    return round(sum(ends) / len(ends) * K)


def _speedups(study: Study, known: Known, column: Column) -> list[float]:
    """Of each run of a method: a sweep runs each point once more, to calibrate the throughput model."""
    figures, names = study.figures(known.name, column), paper.facts(study.facts).get("figures", [])
    if study.axes is not None or "speedup" not in names:
        return [1.0] * len(known.arms) * (1 if study.axes is None else 2)
    place = names.index("speedup")
    return [float(figures[arm][place] or 1.0) if arm in figures else 1.0 for arm in known.arms]


def _pairs(pairs: Sequence[Known], gpu: Gpu) -> str:
    rows = []
    for each in pairs:
        drafter = each.found.drafter.source["name"] if each.found.drafter is not None else None
        if drafter is None and each.found.entry is not None and each.found.entry.drafter is not None:
            drafter = each.found.entry.drafter.name
        fits = "fits" if each.plan.total <= 0.9 * gpu.memory else "does not fit"
        names = [str(each.found.target.source["name"]), str(drafter or "none")]
        rows.append([each.name, *names, f"{each.longest:,}", size(each.plan.total), fits])
    return report.aligned(["pair", "target", "drafter", "max context", "one request takes", f"on {gpu.name}"], rows)


def _requests(planned: Sequence[Planned], study: Study, gpu: Gpu) -> str:
    rows, before = [], ""
    for each in planned:
        hours = "" if each.hours is None else _hours(each.hours)
        n = "?" if each.n is None else str(each.n)
        pair = "" if each.pair == before else each.pair
        column = "" if each.column == each.part.label else each.column
        row = [pair, each.part.label, column, n, each.whose, each.input or "not known", f"{each.output:,}"]
        rows.append([*row, hours] if study.bench else row)
        before = each.pair
    head = ["pair", "task", "column", "n", "whose n", "prompt tokens", "output"]
    return report.aligned([*head, f"on {gpu.name}"] if study.bench else head, rows)


def _left_out(pairs: Sequence[Known], planned: Sequence[Planned]) -> Iterator[str]:
    """The rules by which requests are left out, with their bounds."""
    outputs = {
        (each.longest, p.output)
        for each in pairs
        for p in planned
        if (p.pair, p.part.task in PUBLISHED) == (each.name, True)
    }
    for longest in sorted({longest for longest, _ in outputs}):
        bounds = [f"{longest_prompt(longest, o):,} (output {o:,})" for at, o in sorted(outputs) if at == longest]
        yield (
            f"Left out, since no prompt is cut: those that are longer than {', '.join(bounds)} in a context of "
            f"{longest:,}: ceil((prompt + output + 65) / 256) x 256 must fit."
        )
    if any(p.part.least for p in planned):
        least = max(p.part.least for p in planned)
        yield f"Left out too: prompts of the general tasks of fewer than {least:,} tokens."
    tasks = {p.part.task for p in planned}
    if "lca" in tasks:
        yield "Left out too: repositories that are too small for a length of lca."
    if tasks & {*PUBLISHED}:
        yield "Left out too: prompts that come twice; and for all methods, what ends after one token with any of them."


def _total(planned: Sequence[Planned]) -> str:
    known = [each.hours for each in planned if each.hours is not None]
    missing = len(planned) - len(known)
    return _hours(sum(known)) + (f" and what {missing} tasks of unknown size take" if missing else "")


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.2g} s"
    return f"{hours * 60:.2g} min" if hours < 1 else f"{hours:.1f} h" if hours < 100 else f"{hours:,.0f} h"
