"""A sweep that nobody measured, for figures and pages: numbers made from formulas, so that all of it is known.

More effort drafts better and slower; leniency accepts more and spends more. The request's own share of luck is drawn,
the same for all points, so that paired differences are small where their means are close.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from foldspec.bench.frontier import exclusions, frontiers

EFFORTS = ("K 1", "K 2", "K 4", "confidence 0.5")
LENIENCIES = (0.0, 0.2, 0.4, 0.7, 1.0)
HOW = {"resamples": 200, "seed": 0}


def swept(cells: Sequence[tuple[str, int]], count: int, drafts: Sequence[int] = (4, 8), skill: float = 0.35) -> Any:
    """The part ``pareto``, of so many requests a cell. ``skill``: the score of the drafter alone; the verifier's is
    near 0.8."""
    found: dict[str, Any] = {"points": [], "axes": {"draft_tokens": list(drafts), "effort": list(EFFORTS)}}
    found["axes"] |= {"accept": "linear", "leniency": list(LENIENCIES)}
    groups: dict[Any, Any] = {}
    for number, cell in enumerate(cells):
        luck = np.random.default_rng(number)
        rows = [_made(luck, count, "ar", "verifier", None, None, None, 3.0, 0.8, 0.0)]
        for length, (step, effort) in product(drafts, enumerate(EFFORTS)):
            far = (0.6, 0.45, 0.35, 0.4)[step]  # the drafter's d_K
            head = f"full:draft_tokens={length}:effort={effort.replace(' ', '-')}"
            cost = 1.0 + 0.12 * (1, 2, 4, 3)[step]
            for share in LENIENCIES:
                kept = 1 - (1 - share) * far
                tokens = sum(kept**j for j in range(length + 1))
                at = 3.0 * cost / tokens, 0.8 - (0.8 - skill) * share * far, share * far
                rows.append(_made(luck, count, f"{head}:leniency={share:g}", "point", length, effort, share, *at))
            rows.append(
                _made(luck, count, f"{head}:accept=unverified", "drafter", length, effort, None, 0.4, skill, far)
            )
        groups[cell] = [{row["method"]: line for row, line in zip(rows, each, strict=True)} for each in _lines(rows)]
        found["points"] += [{"task": cell[0], "length": cell[1], **row} for row in rows]
    for point in found["points"]:
        point.pop("values")
    found["frontiers"] = frontiers(groups, found["points"], **HOW)
    found["exclusions"] = exclusions(groups, found["points"], {"kv": 0.25}, **HOW)
    return found


def _lines(rows: Sequence[dict[str, Any]]) -> Any:
    names = ("score", "logprob", "spent")
    for values in zip(*(row["values"] for row in rows), strict=True):
        yield [
            {"method": row["method"], **dict(zip(names, each, strict=True))}
            for row, each in zip(rows, values, strict=True)
        ]


def _made(
    luck: np.random.Generator,
    count: int,
    method: str,
    kind: str,
    drafts: int | None,
    effort: str | None,
    leniency: float | None,
    seconds: float,
    score: float,
    spent: float,
) -> dict[str, Any]:
    scores, spents = (np.clip(mean + 0.05 * luck.normal(size=count), 0, 1) for mean in (score, spent))
    logprobs = -0.5 - 2 * spents

    def summary(values: Any, spread: float = 0.0) -> dict[str, Any]:
        mean = float(np.mean(values))
        wide = spread * mean + float(np.std(values)) * 2 / count**0.5
        return {"mean": mean, "ci": [mean - wide, mean + wide]}

    point = kind == "point"
    return {
        "method": method,
        "kind": kind,
        "draft_tokens": drafts,
        "effort": effort,
        "leniency": leniency,
        "lossless": kind == "verifier" or leniency == 0,
        "n": count,
        "score": summary(scores),
        "logprob": summary(logprobs),
        "agreement": summary(1 - spents) if kind != "verifier" else summary([1.0]),
        "latency_s": summary([seconds], 0.05),
        "tokens_s": summary([90 / seconds], 0.05),
        "agreement_modelled": 1 - spent if point else None,
        "tokens_s_modelled": 100 / seconds if point else None,
        "values": list(zip(scores.tolist(), logprobs.tolist(), spents.tolist(), strict=True)),
    }
