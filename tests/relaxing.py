"""The lossy rules by hand, over lists, and the law of a whole output that they make. Shares nothing with the rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scipy import optimize, special
from tables import DRAFTS, IDS, PROMPT, TARGET, TableDrafter, filtered, processed

from foldspec.options import SamplingParams

Probs = list[float]
# (p, p at temperature 1 without filters, q, row of the block) -> of each token, the chance that it comes as a draft
# that stands, and that it comes in place of one that does not; all of it sums to 1
Parts = tuple[Probs, Probs]
ByHand = Callable[[Probs, Probs, Probs, int], Parts]


def normed(values: Sequence[float]) -> Probs:
    total = math.fsum(values)
    return [value / total for value in values] if total > 0 else list(values)


def left(p: Sequence[float], q: Sequence[float]) -> Probs:
    return normed([max(0.0, a - b) for a, b in zip(p, q, strict=True)])


def linear(*shares: float) -> ByHand:
    """Theorem 1: the token's law is the mixture, whichever way it comes."""

    def parts(p: Probs, raw: Probs, q: Probs, row: int) -> Parts:
        share = shares[min(row, len(shares) - 1)]
        mixed = [(1 - share) * a + share * b for a, b in zip(p, q, strict=True)]
        stays = [min(a, b) for a, b in zip(mixed, q, strict=True)]
        return stays, [a - b for a, b in zip(mixed, stays, strict=True)]

    return parts


def mixture_argmax(share: float) -> ByHand:
    def parts(p: Probs, raw: Probs, q: Probs, row: int) -> Parts:
        mixed = [(1 - share) * a + share * b for a, b in zip(raw, q, strict=True)]
        best = [float(i == max(range(len(p)), key=lambda j: (mixed[j], -j))) for i in range(len(p))]
        stays = [a * b for a, b in zip(q, best, strict=True)]
        return stays, [(1 - sum(stays)) * a for a in best]

    return parts


def lenience(l: float, *, relaxed: bool = False) -> ByHand:
    def parts(p: Probs, raw: Probs, q: Probs, row: int) -> Parts:
        if max(p) == 1.0:
            stays = [b if a == 1.0 or r >= l * max(raw) else 0.0 for a, b, r in zip(p, q, raw, strict=True)]
        else:
            stays = [min(a / l, b) for a, b in zip(p, q, strict=True)]
        instead = p if max(p) == 1.0 else left(p, [l * b for b in q] if relaxed else q)
        return stays, [(1 - sum(stays)) * a for a in instead]

    return parts


def cactus(delta: float, divergence: str = "taylor", *, verifier: bool = False) -> ByHand:
    def raised(a: float) -> float:
        if a in (0.0, 1.0):
            return a
        if divergence == "exact_kl":
            spent = lambda g: special.rel_entr(g, a) + special.rel_entr(1 - g, 1 - a) - delta  # noqa: E731
            return 1.0 if spent(1.0) <= 0 else optimize.brentq(spent, a, 1.0, xtol=1e-15, rtol=1e-15)
        steps = {"taylor": math.sqrt(2 * delta * a * (1 - a)), "chi2": math.sqrt(delta * a * (1 - a)), "tv": delta}
        return min(1.0, a + steps[divergence])

    def parts(p: Probs, raw: Probs, q: Probs, row: int) -> Parts:
        stays, falls = [0.0] * len(p), [0.0] * len(p)
        for y in range(len(p)):
            g = raised(p[y])
            stays[y] = min(q[y], g)
            if q[y] > stays[y]:
                h = [g if v == y else p[v] * (1 - g) / (1 - p[y]) for v in range(len(p))]
                for v, mass in enumerate(left(p if verifier else h, q)):
                    falls[v] += (q[y] - stays[y]) * mass
        return stays, falls

    return parts


def typical(epsilon: float = 0.09, factor: float = 0.3) -> ByHand:
    def parts(p: Probs, raw: Probs, q: Probs, row: int) -> Parts:
        least = min(epsilon, factor * math.exp(-sum(special.entr(a) for a in p)))
        stays = [b if a > least else 0.0 for a, b in zip(p, q, strict=True)]
        best = max(range(len(p)), key=lambda i: (p[i], -i))
        return stays, [(1 - sum(stays)) * (i == best) for i in range(len(p))]

    return parts


def draft_law(drafter: TableDrafter, row: int, before: int) -> Probs:
    """What a draft is drawn from: over all ids, a point mass where it is an argmax."""
    ids = list(range(IDS)) if drafter.ids is None else drafter.ids.tolist()
    logits = [float(DRAFTS[row, before, i]) for i in ids]
    how = drafter.sampling
    law = filtered(logits, how.temperature, how.top_k, how.top_p)
    return [law[ids.index(i)] if i in ids else 0.0 for i in range(IDS)]


def relaxed_law(
    rule: ByHand, drafter: TableDrafter, params: SamplingParams, first: int
) -> tuple[dict[tuple[int, ...], float], float]:
    """The law of an output that begins with ``first``, and how many tokens come on average although p rules them out.
    Each round: up to ``max_drafts`` relaxed positions, ended by a token in place of a draft or by one of p."""
    law: dict[tuple[int, ...], float] = {}
    outside = 0.0

    def target(output: Sequence[int], p: SamplingParams) -> Probs:
        text = (*PROMPT, *output)
        return processed(TARGET[text[-2], text[-1]], p, PROMPT, output)

    plain = SamplingParams(
        temperature=1.0,
        **{f"{name}_penalty": getattr(params, f"{name}_penalty") for name in ("repetition", "presence", "frequency")},
    )

    def begin(output: tuple[int, ...], probability: float) -> None:
        if len(output) >= params.max_tokens:
            law[output] = law.get(output, 0.0) + probability
        elif probability > 0:
            go(output, 0, len(output), probability)

    def go(output: tuple[int, ...], row: int, start: int, probability: float) -> None:
        nonlocal outside
        p = target(output, params)
        if row == min(drafter.max_drafts, params.max_tokens - start - 1):
            for token, mass in enumerate(p):
                begin((*output, token), probability * mass)
            return
        before = output[-1] if drafter.chain else output[start - 1]
        stays, falls = rule(p, target(output, plain), draft_law(drafter, row, before), row)
        for token in range(IDS):
            outside += probability * (stays[token] if p[token] == 0 else 0.0)
            if stays[token] > 0:
                go((*output, token), row + 1, start, probability * stays[token])
            begin((*output, token), probability * falls[token])

    begin((first,), 1.0)
    return law, outside
