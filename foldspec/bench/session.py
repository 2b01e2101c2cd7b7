"""One bench from settings to result: arms, inputs, measurement, ``bench.json``."""

from __future__ import annotations

import datetime
import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from foldspec.acceptance import make_rule
from foldspec.bench import clocks, guards, parity, summary
from foldspec.bench.bandwidth import read_bandwidth
from foldspec.bench.calibrate import Calibrator
from foldspec.bench.fingerprint import fingerprint
from foldspec.bench.inputs import Cell
from foldspec.bench.machine import environment, load, prepared
from foldspec.bench.methods import AR_AGAIN, Method, check_drafts
from foldspec.bench.modelled import calibration
from foldspec.bench.protocol import Arm, Bench, Elsewhere
from foldspec.bench.quality import Quality
from foldspec.bench.schema import NAME, check
from foldspec.bench.settings import BenchSettings
from foldspec.bench.sources import OUTPUT
from foldspec.bench.store import Store
from foldspec.bench.sweep import pareto
from foldspec.context import uses
from foldspec.engine import Engine
from foldspec.errors import UsageError
from foldspec.options import CONTEXT_FIELDS, MethodOptions, SamplingParams
from foldspec.schedule.trace import waiting
from foldspec.tasks import chance

__all__ = ["Session", "check_options", "dry_run", "dry_run_lines"]


class Session:
    """Measure with :meth:`run`, as far as one gets; :meth:`result` sums up what there is."""

    def __init__(
        self,
        engine: Engine,
        settings: BenchSettings,
        cells: Sequence[Cell],
        *,
        out: Path | None = None,
        resume: bool = False,
        notices: Sequence[str] = (),
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        unbroken: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``unbroken`` makes a context in which an interrupt waits: file and memory hold the same requests.
        Raises :class:`UsageError` for a method that is not there and for a folder that cannot be used."""
        self.settings, self.cells, self.notices = settings, list(cells), [*engine.notices, *notices]
        engines = {m.label: engine.using(**m.changes) for m in settings.parsed}
        arms = [
            Arm(m.label, engines[m.label], "context" in m.changes, engines[m.label].made_up, engines[m.label].lossless)
            for m in settings.parsed
        ]
        self._plain = arms[0].engine
        self.methods = {
            arm.label: arm.engine.settings() | {"memory": arm.engine.resources.method_memory(arm.engine.method)}
            for arm in arms
        }
        _check_methods(self.methods)
        longest = max(item.max_new or OUTPUT for cell in cells for item in cell.inputs)
        params = SamplingParams(max_tokens=longest, ignore_eos=settings.ignore_eos, temperature=settings.temperature)
        self._calibrator = Calibrator(arms[1:], params) if settings.calibrate else None
        plans = () if self._calibrator is None else self._calibrator.plans
        quality = Quality({plan.label: plan.own for plan in plans}) if settings.axes else None
        self.store = Store(out, arms=[arm.label for arm in arms])
        self.bench = Bench(
            arms,
            params,
            self.store,
            engine.stop_ids,
            engine.max_context,
            order=settings.order,
            warmup=settings.warmup,
            trace=settings.trace,
            calibrate=self._calibrator.request if self._calibrator else None,
            quality=quality.request if quality else None,
            clocks=clocks.find(engine.resources.device),
            prepared=prepared,
            part_clock=waiting(engine.resources.device),
            progress=progress,
            unbroken=unbroken,
        )
        self._drafter = next((self.methods[arm.label]["drafter"] for arm in arms if arm.drafts), None)
        self.devices: list[dict[str, Any]] | None = None  # those that measure in place of the engines here
        self._engines = [engine, *engines.values(), *(self._calibrator.engines.values() if self._calibrator else ())]
        self._surroundings: dict[str, Any] | None = None
        self.plan = self._plan()
        self.store.open(self.plan, resume=resume)
        self._load, self._complete = load(), False
        self._probe: dict[str, dict[str, Any]] = {}
        self._bandwidth = read_bandwidth(self._device)

    @property
    def _device(self) -> str:
        return str(self.methods["ar"]["device"])

    def _plan(self) -> dict[str, Any]:
        """What a resumed bench must agree in."""
        settings = self.settings.as_dict()
        # they change no measurement; inputs are compared
        for free in ("bootstrap", "against", "warmup", "data", "include_draft_prefill"):
            settings.pop(free)
        env = self._plain.env()
        machine = {key: env[key] for key in ("device", "threads", "torch", "foldspec")}
        kernels = {operator: choice["runs"] for operator, choice in env["kernels"].items()}
        inputs = {f"{i.task} {i.length} {i.id}": i.sha256 for cell in self.cells for i in cell.inputs}
        found = self._plain.resources.found
        weights = {"target": "dummy" if found.dummy else fingerprint(found.target.weights)}
        if found.drafter is not None and not found.dummy:
            weights["drafter"] = fingerprint(found.drafter.weights)
        return {
            "settings": settings,
            "methods": self.methods,
            "weights": weights,
            "machine": machine | kernels,
            "inputs": inputs,
        }

    def run(self, elsewhere: Elsewhere | None = None) -> None:
        """Whatever ends this, what was measured stays."""
        if elsewhere is None:
            self._look()
        self.bench.run(self.cells, elsewhere)
        self._complete = all(self.store.has(item.key) for cell in self.cells for item in cell.inputs)

    def _look(self) -> None:
        """Clocks at rest, so that something is known of a bench that has nothing left to measure; and parity."""
        self.bench.clocks.read()
        self._probe = parity.probe(self.bench.arms, self.cells[0].spare.ids, self.bench.progress)

    def let_go(self) -> None:
        """Close the engines: they have said what is measured, and others measure, who need the device's memory."""
        self._look()
        self._surroundings = environment(self._plain)
        for engine in dict.fromkeys(self._engines):
            engine.close()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.store.close()

    def result(self, command: Sequence[str] = ()) -> dict[str, Any]:
        """The object of ``bench.schema.json``; also written to the folder. Raises :class:`MeasurementError` if what was
        measured is not what was planned."""
        settings, labels = self.settings, self.bench.labels
        inputs = {item.key: item.sha256 for cell in self.cells for item in cell.inputs}
        guards.check_sample(self.store.lines, inputs, {cell.spare.sha256 for cell in self.cells})
        # in whatever order they were done, the figures are the same
        place = {key: i for i, key in enumerate(inputs)}
        lines = sorted(self.store.lines, key=lambda line: place[line["task"], line["length"], line["id"]])
        cells, left_out = summary.pairs(
            summary.with_draft_prefill(lines) if settings.include_draft_prefill else lines, labels
        )
        judged = parity.verdicts(self.methods, lines, self._probe, drawn=settings.temperature > 0)
        how = {"resamples": settings.bootstrap, "seed": settings.seed}
        rows = summary.rows(cells, labels, bandwidth=self._bandwidth, drawn=settings.temperature > 0, **how)
        excluded = {
            (cell.task, cell.length): {
                "too_long": cell.too_long,
                "repeated": cell.repeated,
                **{why: left_out[cell.task, cell.length, why] for why in guards.VOID},
            }
            for cell in self.cells
        }
        for row in rows:
            row["excluded"] = sum(excluded[row["task"], row["length"]].values())
        averages = summary.averages(cells, labels, **how)
        over = [] if settings.against is None else summary.against(cells, labels, settings.against, **how)
        plans = None if self._calibrator is None else self._calibrator.plans
        model = None if plans is None else calibration(cells, plans, **how)
        for row in (*rows, *averages, *over, *(model["methods"] if model else ())):
            row["lossless"] = row["method"] not in self.methods or self.methods[row["method"]]["lossless"]
        parity.withhold([*rows, *averages, *over], judged)
        first = self.methods["ar"]
        result = {
            "schema": NAME,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": list(command),
            "complete": self._complete,
            "resumed": self.store.resumed,
            "env": self._env(),
            "target": first["target"] | {"dtype": first["dtype"], "weights": first["weights"]},
            "drafter": self._drafter,
            "settings": settings.as_dict()
            | {
                "max_context": self.bench.max_context,
                "stop_ids": sorted(self.bench.stop_ids),
            },
            "methods": self._methods_at_the_end(),
            "tasks": [
                {
                    "name": cell.task,
                    **cell.facts,
                    "max_new": cell.spare.max_new,
                    "length": cell.length,
                    "n": len(cells.get((cell.task, cell.length), ())),
                    "planned": len(cell.inputs),
                    "excluded": excluded[cell.task, cell.length],
                    "ids": [item.id for item in cell.inputs],
                    "inputs_sha256": [item.sha256 for item in cell.inputs],
                    "warm_up_input": "made up" if cell.made_up else cell.spare.id,
                }
                for cell in self.cells
            ],
            "warmup": [
                {"method": w.method, "length": w.length, "runs": w.runs, "change": w.change, "settled": w.settled}
                for w in self.bench.warmed
            ],
            "summary": rows,
            "averages": averages,
            "against": over,
            "noise": summary.noise(cells, **how),
            "parity": judged,
            "failed": [
                {name: line[name] for name in ("task", "length", "id", "method", "error")}
                for line in lines
                if line["finish"] == "failed"
            ],
            "calibration": model,
            "notices": self.notices,
            "requests": summary.requests(cells, labels),
        }
        if settings.axes is not None and model is not None:
            chances = {cell.task: chance(cell.task) for cell in self.cells}
            lossless = {label: bool(method["lossless"]) for label, method in self.methods.items()}
            wrong = parity.red(result)
            result["pareto"] = pareto(settings.axes, cells, model["methods"], lossless, chances, wrong, **how)
        self.store.finish(result)
        check(result)
        return result

    def _methods_at_the_end(self) -> dict[str, Any]:
        """What recording made of a method may only be known now. Of engines that were let go it is what they said."""
        if self._surroundings is not None:
            return self.methods
        return {arm.label: self.methods[arm.label] | {"graphs": arm.engine.graphs} for arm in self.bench.arms}

    def _env(self) -> dict[str, Any]:
        found = self._surroundings or environment(self._plain)
        if self.devices is not None:
            found |= {"devices": self.devices, "peak_mem_bytes": max(one["peak_mem_bytes"] for one in self.devices)}
        return (
            found
            | self.bench.clocks.facts()
            | {"load_before": self._load, "load_after": load(), "read_gb_s": self._bandwidth}
        )


def dry_run(cells: Sequence[Cell], settings: BenchSettings) -> dict[str, Any]:
    """What would be measured. ``prefills`` has how many of each length; every one of them serves all methods."""
    planned = [
        {
            "task": cell.task,
            "length": cell.length,
            **cell.facts,
            "max_new": cell.spare.max_new,
            "requests": [{"id": i.id, "n_in": len(i.ids), "input_sha256": i.sha256} for i in cell.inputs],
            "too_long": cell.too_long,
            "repeated": cell.repeated,
            "warm_up": None if cell.made_up else cell.spare.id,
        }
        for cell in cells
    ]
    methods = [*(m.label for m in settings.parsed), AR_AGAIN]
    prefills = Counter(cell.length for cell in cells for _ in cell.inputs)
    return {
        "methods": methods,
        **({"axes": settings.axes.as_dict()} if settings.axes else {}),
        "max_new": settings.max_new,
        "cells": planned,
        "prefills": dict(sorted(prefills.items())),
    }


def dry_run_lines(plan: Mapping[str, Any]) -> list[str]:
    """The same, a line each."""
    methods = plan["methods"]
    lines = [f"methods: {', '.join(methods[:-1])}, and {methods[-1]}"]
    if axes := plan.get("axes"):
        alone = len(axes["draft_tokens"]) * len(axes["effort"])
        named = ", ".join(f"{share:g}" for share in axes["leniency"])
        lines = [
            f"drafts: {', '.join(map(str, axes['draft_tokens']))}; effort: {', '.join(axes['effort'])}; rule: "
            f"{axes['accept']}{f', leniency {named}' if named else ''}",
            f"{alone * max(1, len(axes['leniency']))} points, {alone} drafters alone, the verifier alone twice; and "
            "runs that calibrate the model",
        ]
    for cell in plan["cells"]:
        sizes = [one["n_in"] for one in cell["requests"]]
        lines.append(
            f"{cell['task']} {cell['length']}: {len(sizes)} requests of {min(sizes)} to {max(sizes)} tokens, "
            f"{cell['too_long']} too long, warm-up input {cell['warm_up'] or 'made up of the first'}, "
            f"{cell['max_new']} tokens of output at most"
        )
    for length, count in plan["prefills"].items():
        many = "prefill" if count == 1 else "prefills"
        lines.append(f"{count} {many} of {length} tokens, {count * len(methods)} runs")
    return lines


def check_options(methods: Sequence[Method]) -> None:
    """Raises :class:`UsageError` for an unknown context method or rule, and for an option that a method has no use for:
    no column may have a name that says what was not done."""
    for method in methods:
        options = MethodOptions(**method.changes)
        try:
            make_rule(options.accept, **options.rule_options)
        except UsageError as error:
            where = f"--methods {method.label}" + (f", {error.where}" if error.where else "")
            raise UsageError(error.what, where=where, do=error.do) from None
        name = method.changes.get("context")
        used = uses(name) if name is not None else frozenset()
        for key in method.changes:
            if key in CONTEXT_FIELDS and key not in used:
                what = f"{key} changes nothing about {name or method.changes.get('drafter')}"
                raise UsageError(what, where=f"--methods {method.label}")


def _check_methods(methods: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises :class:`UsageError` for a method (label -> settings) that is plain decoding or another one again."""
    known = list(methods.items())
    for i, (label, mine) in enumerate(known[1:], 1):
        check_drafts(label, mine["draft_tokens"], mine["drafter"])
        for other, theirs in known[1:i]:
            if mine == theirs:
                raise UsageError(f"is here the same as {other}", where=f"--methods {label}", do="name it once")
