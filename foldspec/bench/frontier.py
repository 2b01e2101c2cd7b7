"""Which settings of a sweep are worth having: dominance, frontiers, and the second paper's two exclusion criteria.

A point is one method on the requests of one task and length. Its place is (speed, quality), larger is better in both;
latency enters as its negative. Of two points with one mean of both, both are kept.

``non_dominated`` goes by means alone, so it also keeps what is better by chance. A frontier is claimed by this rule:

    1. Walk the non-dominated points from the fastest to the slowest; their mean quality rises on the way.
    2. The fastest is a member. Each further point is one if its quality is better than that of the last member before
       it: the 95% interval of the paired difference (its own less that member's, over the requests that have both,
       of which there are ``FEW`` at least) lies above 0. Else it buys nothing for its time, and is passed over.
    3. Lossless points write by one law, so what one is better by than another is chance: beside a lossless member no
       other lossless point becomes one.
    4. Points of one place go together: all of them differ from all of the last member's place, or none is a member.
    5. Fewer than ``FEW`` requests, or than two members' places: no frontier is claimed, and ``why_not`` says so.

So every two neighbours on a frontier differ in quality beyond chance, each by an interval of its own (95% for each, not
for all together). Speeds are compared by their means. The same resamples serve every interval of a cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import groupby, product
from typing import Any

from foldspec.bench.bootstrap import interval
from foldspec.bench.methods import AR
from foldspec.bench.summary import FEW, Group

__all__ = ["QUALITIES", "SPEEDS", "dominates", "exclusions", "frontiers", "non_dominated", "quality"]

QUALITIES = ("score", "logprob", "agreement")
SPEEDS = ("latency_s", "tokens_s")

Cell = tuple[str, int]
Groups = Mapping[Cell, Sequence[Group]]
Point = Mapping[str, Any]
Place = tuple[float, float]  # speed, quality: larger is better


def dominates(a: Place, b: Place) -> bool:
    """Whether ``a`` is at least as good in both, and better in one."""
    return a[0] >= b[0] and a[1] >= b[1] and a != b


def non_dominated(places: Mapping[str, Place]) -> list[str]:
    """The labels of the points that no other dominates, fastest first; of one place, by label."""
    kept = [label for label, own in places.items() if not any(dominates(other, own) for other in places.values())]
    return sorted(kept, key=lambda label: (-places[label][0], label))


def place(point: Point, quality: str, speed: str) -> Place:
    """Raises :class:`TypeError` for a point without that quality."""
    fast = point[speed]["mean"]
    return (-fast if speed == "latency_s" else fast), point[quality]["mean"]


def quality(line: Mapping[str, Any], name: str) -> float | None:
    """Of one request's line of ``requests.jsonl``; larger is better. None where it has none."""
    if name != "agreement":
        return line.get(name)
    if line["method"] == AR:
        return 1.0
    return None if line.get("spent") is None else 1.0 - line["spent"]


def frontiers(groups: Groups, points: Sequence[Point], *, resamples: int, seed: int) -> list[dict[str, Any]]:
    """For each task and length, each quality that a point of the sweep has and each speed: ``non_dominated`` and
    ``frontier`` (labels, fastest first; the latter empty where none is claimed) and ``why_not``, in words.

    ``groups``: method -> line of each request, by (task, length). Points of the kinds ``point`` and ``verifier`` take
    part, where they have the quality; ``drafter`` does not, whose time is derived."""
    found = []
    for cell, requests in groups.items():
        mine = [p for p in points if (p["task"], p["length"]) == cell and p["kind"] != "drafter"]
        for name, speed in product(QUALITIES, SPEEDS):
            having = [p for p in mine if p[name] is not None]
            if not any(p["kind"] == "point" for p in having):
                continue
            places = {p["method"]: place(p, name, speed) for p in having}
            kept = non_dominated(places)
            lossless = {p["method"] for p in having if p["lossless"]}
            members, why_not = _members(requests, kept, places, lossless, name, resamples, seed)
            found.append(
                {
                    "task": cell[0],
                    "length": cell[1],
                    "quality": name,
                    "speed": speed,
                    "non_dominated": kept,
                    "frontier": members,
                    "why_not": why_not,
                }
            )
    return found


def _members(
    requests: Sequence[Group],
    kept: Sequence[str],
    places: Mapping[str, Place],
    lossless: Set[str],
    name: str,
    resamples: int,
    seed: int,
) -> tuple[list[str], str]:
    """The members of the frontier; or none, and why."""
    if len(requests) < FEW:
        return [], f"fewer than {FEW} requests decide nothing"
    steps = [list(step) for _, step in groupby(kept, key=lambda label: places[label])]
    if len(steps) == 1:
        return [], f"nothing is faster or better than {' and '.join(kept)}"
    chosen = [steps[0]]
    for step in steps[1:]:
        if not lossless.isdisjoint(step) and any(not lossless.isdisjoint(member) for member in chosen):
            continue
        apart = [_differences(requests, one, last, name) for one in step for last in chosen[-1]]
        if all(len(each) >= FEW and _summary(each, resamples, seed)["ci"][0] > 0 for each in apart):
            chosen.append(step)
    if len(chosen) == 1:
        return [], f"no slower point is better than {' and '.join(chosen[0])} with its interval"
    return [label for step in chosen for label in step], ""


def _differences(requests: Sequence[Group], one: str, other: str, name: str) -> list[float]:
    """The quality of ``one`` less that of ``other``, of each request that has both."""
    pairs = [(quality(group[one], name), quality(group[other], name)) for group in requests]
    return [a - b for a, b in pairs if a is not None and b is not None]


def _summary(values: Sequence[float], resamples: int, seed: int) -> dict[str, Any]:
    # Rounded: sums of equal numbers in another order differ in their last digits, and 0 must stay 0.
    ends = [round(float(end), 12) for end in interval(values, resamples=resamples, seed=seed)]
    return {"mean": sum(values) / len(values), "ci": ends}


def exclusions(
    groups: Groups, points: Sequence[Point], chances: Mapping[str, float | None], *, resamples: int, seed: int
) -> list[dict[str, Any]]:
    """The two criteria of the second paper's section 4.1, for each task and length whose verifier and drafter alone
    have a score; the drafter is the best of its rows.

    ``no_benefit``: the interval of the paired difference (verifier less drafter) does not lie above 0: they are about
    equal, or the drafter alone is better. ``below_chance``: the drafter's mean score is below that of guessing.
    Fewer than ``FEW`` requests exclude nothing."""
    found = []
    for cell, requests in groups.items():
        mine = [p for p in points if (p["task"], p["length"]) == cell and p["score"] is not None]
        verifier = next((p for p in mine if p["kind"] == "verifier"), None)
        drafter = max((p for p in mine if p["kind"] == "drafter"), key=lambda p: p["score"]["mean"], default=None)
        if verifier is None or drafter is None:
            continue
        values = _differences(requests, verifier["method"], drafter["method"], "score")
        if not values:
            continue
        apart = _summary(values, resamples, seed)
        chance, enough = chances.get(cell[0]), len(values) >= FEW
        found.append(
            {
                "task": cell[0],
                "length": cell[1],
                "drafter": drafter["method"],
                "drafter_score": drafter["score"]["mean"],
                "verifier_score": verifier["score"]["mean"],
                "difference": apart,
                "chance": chance,
                "no_benefit": enough and apart["ci"][0] <= 0,
                "below_chance": enough and chance is not None and drafter["score"]["mean"] < chance,
            }
        )
    return found
