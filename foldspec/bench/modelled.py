"""From the calibrating runs to the model's parameters, and what it predicts beside what was measured. Plain data.

    d_K   mean over all judged drafts, of all requests, of the total variation of both laws, on prefixes of lambda 0
    c_d   a + b K, least squares through the medians of the times of whole rounds; K is the mean of the passes that they
          took, also where a threshold decides on them
    c_v   the rest of a round: the target's pass, the rule, the loop; median over all whole rounds at lambda 0
    mu    by Eq. 6 for ``exact`` and ``linear``; for another rule the mean chance of its own drafts to stand, known
          their tokens; for one that cannot say, by its counts
    E     Prop. 1, mean over the whole rounds at lambda 0, with B what each of them drafted
    T     E / (c_d + c_v)

A whole round is one that could draft all it may: not one near the limit of the output. Measured are the timed runs of
the bench itself, all rounds of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foldspec.bench import metrics
from foldspec.bench import throughput as model
from foldspec.bench.bootstrap import ratio_interval
from foldspec.bench.methods import AR

__all__ = ["Plan", "calibration"]

Group = Mapping[str, Mapping[str, Any]]  # method -> line, of one request
Record = Mapping[str, Any]  # one calibrating run of one request


@dataclass(frozen=True)
class Plan:
    """Which runs a method's figures come from. ``profile``: at lambda 0, drafting as the method does; ``costs``: the
    same with other K, the fewest first; ``own``: under its own rule. ``leniency``: lambda, one for all or one a draft;
    None: the rule is not that of Eq. 6. ``most``: drafts of a whole round at most. ``followed``: whether a token of the
    target's own follows drafts that all stand."""

    label: str
    drafting: str
    profile: str
    costs: tuple[str, ...]
    own: str
    leniency: tuple[float, ...] | None
    most: int
    followed: bool = True

    @property
    def at_lambda_0(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.costs, self.profile)))

    def after(self, drafted: int) -> int:
        """Tokens of a round that are not drafts."""
        return int(self.followed or not drafted)

    def rate(self, d: float, place: int) -> float:
        """Eq. 6 for one draft of a block."""
        assert self.leniency is not None
        return model.accept_rate(d, self.leniency[min(place, len(self.leniency) - 1)])


def calibration(
    cells: Mapping[tuple[str, int], Sequence[Group]], plans: Sequence[Plan], *, resamples: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """``profiles``: a row a task, length and run at lambda 0; ``methods``: one a task, length and method."""
    how = {"resamples": resamples, "seed": seed}
    profiles, methods = [], []
    for (task, length), groups in cells.items():
        wanted = {name for plan in plans for name in (*plan.at_lambda_0, plan.own)}
        there = [group for group in groups if wanted <= (group[AR].get("calibration") or {}).keys()]
        if not there:
            continue
        where = {"task": task, "length": length, "n": len(there)}
        runs = {name: [group[AR]["calibration"][name] for group in there] for name in wanted}
        of_run: dict[str, Plan] = {}
        for plan in plans:
            for name in plan.at_lambda_0:
                of_run.setdefault(name, plan)
        profiles += [where | _profile(name, plan, runs, how) for name, plan in of_run.items()]
        methods += [where | _method(plan, runs, there, how) for plan in plans]
    return {"profiles": profiles, "methods": methods}


def _profile(name: str, plan: Plan, runs: Mapping[str, Sequence[Record]], how: Mapping[str, int]) -> dict[str, Any]:
    """d of one run at lambda 0, its change from that of the fewest steps, and its acceptance by both estimates."""
    records, first = runs[name], plan.costs[0]
    sums, counts = _sums(records, "tv")
    d, ends = _ratio(sums, counts, how)
    change: dict[str, Any] = {"d_change": None, "d_change_ci": None}
    if name != first:
        other = _sums(runs[first], "tv")
        value, both = _ratio(sums, counts, how, other)
        change = {"d_change": value, "d_change_ci": both}
    times = _times(records)
    return {
        "drafting": plan.drafting,
        "run": name,
        "steps": _steps(records),
        "judged": int(sum(counts)),
        "d": d,
        "d_ci": ends,
        **change,
        "accept_by_tv": None if d is None else model.accept_rate(d),
        "accept_by_counts": _counted(records),
        "draft_ms_median": _draft_ms(records),
        "draft_ms_mean": metrics.mean([draft for draft, _, _ in times]),
        "target_ms_median": statistics.median(target for _, target, _ in times),
        "other_ms_median": statistics.median(other for _, _, other in times),
    }


def _method(
    plan: Plan, runs: Mapping[str, Sequence[Record]], groups: Sequence[Group], how: Mapping[str, int]
) -> dict[str, Any]:
    profile, own = runs[plan.profile], runs[plan.own]
    steps = _steps(profile)
    by_k = [runs[name] for name in plan.costs]
    cost = model.fit_draft_cost(list(map(_steps, by_k)), list(map(_draft_ms, by_k)))
    every = [times for name in plan.at_lambda_0 for times in _times(runs[name])]
    verify = statistics.median(target + other for _, target, other in every)
    draft = cost.of(steps)
    d, ends = _ratio(*_sums(profile, "tv"), how)
    spent, spent_ends = _ratio(*_sums(own, "spent"), how)
    mu, source = _rate(plan, d, own)
    whole = [each["drafted"] for each in _whole(profile)]
    tokens = None if mu is None else metrics.mean([_expected(plan, d, mu, drafted) for drafted in whole])
    lines = [group[plan.label] for group in groups]
    return {
        "method": plan.label,
        "profile": plan.profile,
        "steps": steps,
        "drafts": metrics.mean([each["drafted"] for each in _whole(profile)]),
        "leniency": None if plan.leniency is None else list(plan.leniency),
        "a_ms": cost.a,
        "b_ms": cost.b,
        "b_fitted": cost.fitted,
        "draft_ms": draft,
        "draft_ms_measured": _draft_ms(profile),
        "verify_ms": verify,
        "d": d,
        "d_ci": ends,
        "mu": mu,
        "mu_from": source,
        "mu_by_counts": _counted(own),
        "own_d": _ratio(*_sums(own, "tv"), how)[0],
        "spent": spent,
        "spent_ci": spent_ends,
        "tokens_a_round_modelled": tokens,
        "tokens_a_round_measured": metrics.tau_pooled([line["commits"] for line in lines]),
        "tokens_a_whole_round": metrics.mean([each["accepted"] + plan.after(each["drafted"]) for each in _whole(own)]),
        "tokens_s_modelled": None if tokens is None else 1e3 * model.throughput(tokens, draft, verify),
        "tokens_s_measured": 1e3 * sum(line["n_out"] - 1 for line in lines) / sum(line["decode_ms"] for line in lines),
    }


def _rate(plan: Plan, d: float | None, own: Sequence[Record]) -> tuple[float | None, str]:
    """How likely a draft is to stand, and whence that is known: of lambdas by position, the mean over a block."""
    if plan.leniency is not None:
        return None if d is None else metrics.mean([plan.rate(d, i) for i in range(plan.most)]), "eq6"
    mean, _ = _ratio(*_sums(own, "chance"))
    return (mean, "chance") if mean is not None else (_counted(own), "counts")


def _expected(plan: Plan, d: float | None, mu: float, drafted: int) -> float:
    """Prop. 1, with the rate of each place where lambda has one for each."""
    rates = [mu if plan.leniency is None or d is None else plan.rate(d, i) for i in range(drafted)]
    return model.tokens_by_position(rates) - 1 + plan.after(drafted)


def _sums(records: Sequence[Record], what: str) -> tuple[list[float], list[float]]:
    """Of each request: the sum over its judged drafts, and how many said anything."""
    values = [[x for each in record["rounds"] for x in each[what] if x is not None] for record in records]
    return [sum(own) for own in values], [float(len(own)) for own in values]


def _ratio(
    sums: Sequence[float],
    counts: Sequence[float],
    how: Mapping[str, int] | None = None,
    less: tuple[Sequence[float], Sequence[float]] | None = None,
) -> tuple[float | None, list[float] | None]:
    """The mean over all drafts of all requests (minus that of ``less``), and its interval over requests."""
    if not sum(counts) or (less is not None and not sum(less[1])):
        return None, None
    value = sum(sums) / sum(counts) - (0.0 if less is None else sum(less[0]) / sum(less[1]))
    return value, None if how is None else ratio_interval(sums, counts, less, **how)


def _counted(records: Sequence[Record]) -> float | None:
    return model.rate_from_counts(
        (each["accepted"], each["drafted"]) for record in records for each in record["rounds"]
    )


def _whole(records: Sequence[Record]) -> list[Mapping[str, Any]]:
    return [each for record in records for each in record["rounds"] if each["whole"]]


def _times(records: Sequence[Record]) -> list[tuple[float, float, float]]:
    """Milliseconds of drafting, of the target's pass and of all else, of each whole round."""
    return [(draft, target, other) for record in records for draft, target, other in record["ms"]]


def _draft_ms(records: Sequence[Record]) -> float:
    return statistics.median(draft for draft, _, _ in _times(records))


def _steps(records: Sequence[Record]) -> float:
    """Passes of the drafter, the mean over whole rounds that drafted. Asked for more than there are places a drafter
    takes fewer, and a draft that reaches into another of its blocks takes more."""
    steps = [each["steps"] for each in _whole(records) if each["drafted"]]
    return metrics.mean(steps) if steps else 1.0
