"""The throughput model's tables for people: its parameters, and what it predicts beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["METHODS", "PROFILES", "model_remarks"]

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]

SOURCES = {"eq6": "", "chance": " (own)", "counts": " (counts)"}


def _number(name: str, digits: int = 3) -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else f"{row[name]:.{digits}f}"


def _with_interval(name: str, digits: int = 3) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        if row[name] is None:
            return "-"
        low, high = row[f"{name}_ci"]
        return f"{row[name]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    return show


def _steps(row: Row) -> str:
    return f"{row['steps']:.3g}"


def _leniency(row: Row) -> str:
    return "-" if row["leniency"] is None else "/".join(f"{share:g}" for share in row["leniency"])


def _cost(row: Row) -> str:
    return f"{row['a_ms']:.2f} + {row['b_ms']:.2f} K" if row["b_fitted"] else f"{row['a_ms']:.2f} (b = 0: one K)"


PROFILES: list[Column] = [
    ("task", lambda row: str(row["task"])),
    ("length", lambda row: str(row["length"])),
    ("run", lambda row: str(row["run"])),
    ("passes", _steps),
    ("judged", lambda row: str(row["judged"])),
    ("d_K", _with_interval("d")),
    ("change", _with_interval("d_change")),
    ("1 - d_K", _number("accept_by_tv")),
    ("by counts", _number("accept_by_counts")),
    ("draft ms", _number("draft_ms_median", 2)),
    ("target ms", _number("target_ms_median", 2)),
    ("other ms", _number("other_ms_median", 2)),
]
METHODS: list[Column] = [
    ("task", lambda row: str(row["task"])),
    ("length", lambda row: str(row["length"])),
    ("method", lambda row: str(row["method"]) if row["lossless"] else f"{row['method']} (lossy)"),
    ("n", lambda row: str(row["n"])),
    ("passes", _steps),
    ("B", _number("drafts", 1)),
    ("lambda", _leniency),
    ("c_d ms", _cost),
    ("c_v ms", _number("verify_ms", 2)),
    ("mu", lambda row: _number("mu")(row) + SOURCES[row["mu_from"]]),
    ("TV spent", _with_interval("spent")),
    ("tokens a round: model", _number("tokens_a_round_modelled", 2)),
    ("measured", _number("tokens_a_round_measured", 2)),
    ("whole rounds", _number("tokens_a_whole_round", 2)),
    ("tokens/s: model", _number("tokens_s_modelled", 1)),
    ("measured", _number("tokens_s_measured", 1)),
]
LEGEND = (
    "d_K: mean total variation of the target's law and the drafter's over judged drafts at lambda 0 [95% interval "
    "over requests]; change: from the fewest steps; by counts: accepted / (accepted + rejections)",
    "passes: of the drafter in a round, mean, which is the K of the fit: a draft over two of its blocks takes more "
    "than K, a short one fewer",
    "model: mu = 1 - (1 - lambda) d_K for exact and linear, else the mean chance of the method's own drafts (own) or "
    "their counts; tokens a round = sum of mu^j, j = 0 .. B; tokens/s = that over c_d + c_v, c_d = a + b K drafting, "
    "c_v the rest of a round",
    "TV spent: mean total variation of the target's law and that of the token at a drafted position, on the method's "
    "own prefixes",
    "measured: the timed runs, all rounds; whole rounds: those that could draft all, none cut by the limit",
    "model and measurement part where drafts stand or fall together, where leniency leads to other prefixes than "
    "lambda 0, and where a stop or the limit cuts rounds",
)


def model_remarks(temperature: float) -> list[str]:
    """What must stand under the tables."""
    lines = list(LEGEND)
    if temperature == 0:
        lines.append("temperature 0: the target's laws are point masses, and d_K is the share of drafts that miss them")
    return lines
