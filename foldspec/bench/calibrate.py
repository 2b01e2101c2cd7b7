"""``--calibrate``: what the throughput model needs to know of each method, measured in runs that no other figure uses.

A method is its rule and how it drafts. For every way of drafting there are runs at lambda 0 (the rule ``exact``): with
K = 1, 2, 4 and 8 steps where the drafter takes steps, else with its one K; and with what the method itself asks for.
Each of them runs twice from the same prefix: once for its times, the device waited for at each mark, and once for both
laws at every judged draft, which takes time of its own. A method of another rule also has such a second run under that.
``modelled.py`` makes figures of all this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from foldspec.acceptance.recorded import Judged
from foldspec.bench.modelled import Plan
from foldspec.bench.protocol import Arm
from foldspec.engine import Engine, Prefix
from foldspec.errors import ResourceError, UsageError
from foldspec.options import RULE_FIELDS, MethodOptions, SamplingParams
from foldspec.records import Round
from foldspec.schedule.trace import Stopwatch, unmarked, waiting

__all__ = ["STEPS", "Calibrator"]

STEPS = (1, 2, 4, 8)
_RULE = frozenset({"accept", "steps", "draft_noise", *RULE_FIELDS})  # what a way of drafting does not have in its name
_ADAPTIVE = frozenset({"confidence", "entropy_bound", "order"})  # what makes the network decide on the steps


class Calibrator:
    """``plans`` say which runs each method's figures come from; ``engines`` are those runs, by name."""

    def __init__(self, arms: Sequence[Arm], params: SamplingParams) -> None:
        """``arms`` without plain decoding. Raises :class:`UsageError` for what cannot be calibrated."""
        self.engines: dict[str, Engine] = {}
        self._options: dict[str, Any] = {}  # name of a run -> its options
        self.plans = [self._planned(arm.label, arm.engine, params) for arm in arms]

    def _planned(self, label: str, engine: Engine, params: SamplingParams) -> Plan:
        where = f"--calibrate, {label}"
        if engine.method.force_accept is not None:
            what = "how many drafts stand is decided beforehand: there is nothing to model"
            raise UsageError(what, where=where, do="leave --force-accept out")
        if params.max_tokens < engine.drafts + 2:
            what = f"no round would draft all of its {engine.drafts} tokens"
            raise UsageError(what, where=where, do=f"--max-new {engine.drafts + 2} or more")
        base, method = _without(label, _RULE), engine.method
        rule = {"accept": "exact", "draft_noise": "own", **dict.fromkeys(RULE_FIELDS)}
        adaptive = method.effort.thresholded
        profile = self._add(f"{base}, adaptive" if adaptive else f"{base}, K {method.steps or 1}", engine.using(**rule))
        costs = {} if adaptive else {method.steps or 1: profile}
        if takes_steps(engine):
            fixed = rule | (dict.fromkeys(_ADAPTIVE) if adaptive else {})
            plain = _without(label, {*_RULE, *_ADAPTIVE}) if adaptive else base
            for k in STEPS:
                if k not in costs:
                    costs[k] = self._add(f"{plain}, K {k}", engine.using(**fixed, steps=k))
        if method.accept != "exact":
            self.engines[label] = engine
        return Plan(
            label=label,
            drafting=base,
            profile=profile,
            costs=tuple(costs[k] for k in sorted(costs)) or (profile,),
            own=profile if method.accept == "exact" else label,
            leniency=_leniency(method, params),
            most=engine.drafts,
            followed=method.accept != "unverified",
        )

    def _add(self, name: str, engine: Engine) -> str:
        """The name of a run with these options: that of one that is there already, if there is one."""
        for known, options in self._options.items():
            if options == engine.method:
                return known
        while name in self.engines:
            name += "'"
        self.engines[name], self._options[name] = engine, engine.method
        return name

    def request(self, prefix: Prefix, params: SamplingParams, limit: int) -> dict[str, Any] | None:
        """What is kept of one request: name of a run -> ``rounds`` (of :func:`_judged`), and at lambda 0 ``ms`` (of
        :func:`_timed`). ``limit``: the tokens that come out at most. None: there was no room for one of the runs."""
        found: dict[str, Any] = {}
        try:
            for name, engine in self.engines.items():
                found[name] = {"rounds": _judged(engine, prefix, params, limit)}
                if name in self._options:
                    found[name]["ms"] = _timed(engine, prefix, params, limit)
        except ResourceError:
            return None
        return found


def takes_steps(engine: Engine) -> bool:
    """Whether its drafter denoises in as many steps as one asks for."""
    network = engine.resources.found.network
    return engine.method.drafter is None and network is not None and "steps" in network.efforts


def _judged(engine: Engine, prefix: Prefix, params: SamplingParams, limit: int) -> list[dict[str, Any]]:
    """Of each round: whether it could draft all (``whole``), what it ``drafted``, how many were ``accepted`` and in how
    many ``steps``; and of each of its judged drafts ``tv``, ``chance`` and ``spent``."""
    heard: list[Judged] = []
    engine.record(heard.append)
    try:
        done = engine.stream(prefix, params).finish()
    finally:
        engine.record(None)
    judged = {each.position: each for each in heard}
    rounds = []
    for each in done.rounds:
        told = judged.get(each.anchor_pos + 1, Judged(0, 0, 0, (), (), ()))
        rounds.append(
            {
                "whole": _whole(engine, each, prefix, limit),
                "drafted": len(each.drafted),
                "accepted": each.accepted,
                "steps": each.steps,
                "tv": list(told.tv),
                "chance": list(told.chance),
                "spent": list(told.spent),
            }
        )
    return rounds


def _whole(engine: Engine, each: Round, prefix: Prefix, limit: int) -> bool:
    """Whether a round could draft all it may: the target's own token takes one place of what the limit leaves."""
    before = each.anchor_pos + 1 - len(prefix.token_ids)
    return limit - before - 1 >= engine.drafts


def _timed(engine: Engine, prefix: Prefix, params: SamplingParams, limit: int) -> list[list[float]]:
    """Of each whole round the milliseconds of drafting, of the target's pass, and of all else."""
    watch = Stopwatch(waiting(engine.resources.device))
    engine.listen(watch)
    times = []
    try:
        generation = engine.stream(prefix, params)
        with contextlib.suppress(StopIteration):
            next(generation)
            watch.start()
        for _ in generation:
            watch("host")
            part = watch.seconds
            times.append([1e3 * part["draft"], 1e3 * part["verify"], 1e3 * (part["accept"] + part["host"])])
            watch.start()
    finally:
        engine.listen(unmarked)
    rounds = generation.completion.rounds
    return [own for own, each in zip(times, rounds, strict=True) if _whole(engine, each, prefix, limit)]


def _without(label: str, keys: Collection[str]) -> str:
    """A method's label without some of its options."""
    name, *pairs = label.split(":")
    return ":".join([name, *(pair for pair in pairs if pair.partition("=")[0] not in keys)])


def _leniency(method: MethodOptions, params: SamplingParams) -> tuple[float, ...] | None:
    """Lambda, for all drafts or one for each; None for a rule that Eq. 6 does not describe."""
    if method.accept == "exact":
        return (0.0,)
    if method.accept != "linear" or (params.temperature == 0 and method.at_zero == "mixture_argmax"):
        return None
    assert method.leniency is not None
    return method.leniency if isinstance(method.leniency, tuple) else (method.leniency,)
