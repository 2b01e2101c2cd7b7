"""What may be drafted and how it is judged, over tiny vocabularies, and the tables of ``docs/losslessness.md``, which
``PYTHONPATH=tests:. python tests/losslessness.py`` writes anew."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from pathlib import Path
from typing import Any

import relaxing
import torch
from denoising import (
    Begin,
    Drafted,
    Toy,
    ToyDrafter,
    continued,
    drafted,
    plain_law,
    random_toy,
    run_law,
    run_law_by_hand,
)
from relaxing import ByHand
from tables import total_variation

from foldspec.acceptance import make_rule
from foldspec.drafters.denoise import Masked
from foldspec.drafters.denoise_uniform import Ancestral, Annealed
from foldspec.effort import ORDERS, Q_MODES, Effort
from foldspec.laws import Law
from foldspec.noise import Noise
from foldspec.records import Sampled
from foldspec.sampling import DraftSampling

DOCUMENT = Path(__file__).parents[1] / "docs" / "losslessness.md"

IDS, DRAWN = 2, DraftSampling(temperature=1.0)
PAIR, TRIPLE = random_toy(IDS, 2), random_toy(IDS, 3)


class InBlocks:
    """Masked blocks of two places, one after the other, as SDAR drafts more than one."""

    def __init__(self, effort: Effort, sampling: DraftSampling, noise: Noise, anchor: int, count: int) -> None:
        self._begin = partial(Masked, effort, sampling, noise, anchor)
        self._before: list[int | None] = []
        self._left, self._now = max(0, count - 2), self._begin(min(2, count), block=2)

    @property
    def canvas(self) -> list[int | None]:
        return [*self._before, *self._now.canvas, *[None] * self._left]

    @property
    def masked(self) -> list[int]:
        return [len(self._before) + place for place in self._now.masked]

    @property
    def done(self) -> bool:
        return self._now.done and not self._left

    @property
    def proposal(self) -> Sampled[Law]:
        return self._now.proposal

    def step(self, logits: torch.Tensor) -> None:
        self._now.step(logits)
        if self._now.done and self._left:
            self._before += self._now.canvas
            count, self._left = min(2, self._left), max(0, self._left - 2)
            self._now = self._begin(count, block=2, drafts=self._now.proposal)


STILL = "uniform, until it is still"
# what a drafter does, but for its q_mode: name -> effort, and what makes a block
EFFORTS: dict[str, tuple[Effort, Begin]] = {
    "one step": (Effort(), Masked),
    **{order: (Effort(steps=2, order=order), Masked) for order in ORDERS[:6]},
    "origin, Dream's coins": (Effort(steps=2, order="origin"), partial(Masked, quota="dream")),
    "static, in two blocks": (Effort(steps=2, order="static"), InBlocks),
    "dynamic": (Effort(confidence=0.7, order="dynamic"), Masked),
    "dynamic_top1": (Effort(confidence=0.7), Masked),
    "entropy bound": (Effort(entropy_bound=0.3), Masked),
    "entropy bound, sequential": (Effort(entropy_bound=0.6, order="sequential"), Masked),
    "uniform, ancestral": (Effort(steps=2), partial(Ancestral, vocabulary=IDS)),
    "uniform, annealed": (Effort(steps=2, entropy_bound=0.3), partial(Annealed, vocabulary=IDS)),
    STILL: (Effort(steps=3), partial(Annealed, vocabulary=IDS, still=0.5)),
}
COMBINATIONS = [(name, mode) for name in EFFORTS for mode in Q_MODES if name != STILL or mode == "exact"]


def drafter_of(toy: Toy, name: str, mode: str) -> ToyDrafter:
    effort, begin = EFFORTS[name]
    drafter = ToyDrafter(toy, dataclasses.replace(effort, q_mode=mode).settled(True), DRAWN, begin)
    drafter.biased = "" if "uniform" in name else drafter.biased
    return drafter


@cache
def blocks(toy: Toy, name: str, mode: str) -> tuple[list[Drafted], str]:
    """Every block that may be drafted, and why drafts do not follow their laws, by the drafter's own word."""
    drafter = drafter_of(toy, name, mode)
    return drafted(toy, drafter, IDS), drafter.biased


def match(p: list[float], raw: list[float], q: list[float], row: int) -> tuple[list[float], list[float]]:
    """A token of p comes in any case."""
    return [a * b for a, b in zip(p, q, strict=True)], [a * (1 - b) for a, b in zip(p, q, strict=True)]


RULES: dict[str, tuple[str, dict[str, Any], ByHand]] = {
    "exact": ("exact", {}, relaxing.linear(0.0)),
    "match": ("match", {}, match),
    "linear 0": ("linear", {"leniency": 0.0}, relaxing.linear(0.0)),
    "linear 0.4": ("linear", {"leniency": 0.4}, relaxing.linear(0.4)),
    "linear 0.2/0.7": ("linear", {"leniency": (0.2, 0.7)}, relaxing.linear(0.2, 0.7)),
    "linear 1": ("linear", {"leniency": 1.0}, relaxing.linear(1.0)),
    "lenience 0.5": ("lenience", {"leniency": 0.5}, relaxing.lenience(0.5)),
    "lenience 0.5, relaxed": (
        "lenience",
        {"leniency": 0.5, "residual": "relaxed"},
        relaxing.lenience(0.5, relaxed=True),
    ),
    "cactus 0.1": ("cactus", {"leniency": 0.1}, relaxing.cactus(0.1)),
    "cactus 0.05, exact KL": (
        "cactus",
        {"leniency": 0.05, "divergence": "exact_kl"},
        relaxing.cactus(0.05, "exact_kl"),
    ),
    "typical": ("typical", {"epsilon": 0.3, "factor": 0.9}, relaxing.typical(0.3, 0.9)),
}


@cache
def run_of(toy: Toy, rule: str, name: str, mode: str) -> dict[tuple[int, ...], float]:
    made, options, _ = RULES[rule]
    return run_law(toy, make_rule(made, **options), blocks(toy, name, mode)[0])


def off_target(toy: Toy, rule: str, name: str, mode: str) -> float:
    """Total variation of a whole block from plain decoding."""
    return total_variation(continued(toy, run_of(toy, rule, name, mode), toy.places), plain_law(toy, toy.places))


def off_claim(toy: Toy, rule: str, name: str, mode: str) -> float:
    """Total variation of a round from what the rule claims of drafts that follow their laws."""
    return total_variation(
        run_of(toy, rule, name, mode), run_law_by_hand(toy, RULES[rule][2], blocks(toy, name, mode)[0])
    )


# ------------------------------------------------------------------------------------------------------------- tables


def _cell(rule: str, name: str, mode: str) -> str:
    toy = PAIR if "uniform" in name else TRIPLE
    off, run = off_target(toy, rule, name, mode), run_of(toy, rule, name, mode)
    tokens = sum(mass * len(out) for out, mass in run.items())
    return f"{'0' if off < 1e-12 else f'{off:.4f}'} ({tokens:.3f})"


def efforts_table() -> str:
    """What the rule exact makes of every effort under every q_mode."""
    lines = ["| drafts | reveal_step | exact | point_mass |", "|---|---|---|---|"]
    for name in EFFORTS:
        modes = ("reveal_step", "exact", "point_mass")
        cells = [_cell("exact", name, mode) if (name, mode) in COMBINATIONS else "" for mode in modes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rules_table() -> str:
    """Every rule, with drafts that follow their laws and with drafts that do not."""
    lines = ["| rule | its claim | off the target, exact | off the claim, exact | off the target, reveal_step |"]
    lines.append("|---|---|---|---|---|")
    for rule, (name, options, _) in RULES.items():
        made = make_rule(name, **options)
        off = [off_target(TRIPLE, rule, "static", mode) for mode in ("exact", "reveal_step")]
        numbers = [off[0], off_claim(TRIPLE, rule, "static", "exact"), off[1]]
        cells = ["0" if each < 1e-12 else f"{each:.4f}" for each in numbers]
        lines.append(f"| {rule} | {'the target' if made.lossless else 'lossy'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    for name, table in (("efforts", efforts_table()), ("rules", rules_table())):
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        assert mark and end, f"no place for the table {name}"
        text = f"{before}{mark}{table}\n{end}{after}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
