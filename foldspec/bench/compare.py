"""Two results side by side, request by request: what became faster, and whether it drafts better.

A request is paired with itself in the other result: by task, length, id and the hash of its ids. The ratio of two
results' times is worth what their machines and loads were worth at two times of a day: plain decoding is compared as
well, and stands first. Within one result, methods are compared on the same minute; that is what ``bench`` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foldspec.bench import metrics, parity
from foldspec.bench.bootstrap import RESAMPLES, interval
from foldspec.bench.methods import AR, AR_AGAIN
from foldspec.bench.report import MARKS, Column, as_csv, as_table, with_draft_prefill
from foldspec.bench.results import runs
from foldspec.bench.summary import NOISY, verdict
from foldspec.errors import UsageError

__all__ = ["compare", "differences", "render"]

Result = Mapping[str, Any]


def compare(a: Result, b: Result, names: Sequence[str] = ("A", "B"), *, methods: Sequence[str] = ()) -> dict[str, Any]:
    """``rows``: for each task, length and method that both have, over the requests of both, with 95% intervals:
    ``speedup`` mean of TPOT_a / TPOT_b, ``relative`` the same of each side's speedup over its own plain decoding (b's
    over a's), ``tau`` mean of tau_b - tau_a, ``equal`` outputs that are the same; ``only`` requests of one side alone;
    ``differ`` what else differs, and ``noise`` of each side, in words; ``red`` pairs that are left out, since a side is
    not plain decoding's equal.

    ``methods``: pairs of labels as ``fold/fold:alpha=4``, or one label for both; none: all that both have. Raises
    :class:`UsageError` for inputs that differ under one id, for speedups of two kinds, and where nothing is left.
    """
    included = [with_draft_prefill(side) for side in (a, b)]
    if included[0] != included[1]:
        with_it, without = names if included[0] else names[::-1]
        what = f"counts draft prefill in TPOT, and {without} does not"
        raise UsageError(what, where=with_it, do="sum up one anew: `foldspec bench ... --resume`, with or without it")
    mine, other = runs(a, names[0]), runs(b, names[1])
    common = [key for key in mine if key in other]
    for key in common:
        hashes = [next(iter(side[key].values()))["input_sha256"] for side in (mine, other)]
        if hashes[0] != hashes[1]:
            what = f"{' '.join(map(str, key))} is another prompt in {names[1]}"
            raise UsageError(what, where=names[0], do="compare benches of the same requests")
    if not common:
        raise UsageError(f"has no request in common with {names[1]}", where=names[0])
    pairs, red = _pairs(a, b, methods, names)
    cells = sorted({key[:2] for key in common})
    rows = [
        _row(task, length, pair, [(mine[k], other[k]) for k in common if k[:2] == (task, length)], included[0])
        for task, length in cells
        for pair in pairs
    ]
    only = {names[0]: len(mine) - len(common), names[1]: len(other) - len(common)}
    return {
        "names": list(names),
        "rows": rows,
        "only": only,
        "differ": differences(a, b),
        "noise": [_noise(side, name) for side, name in zip((a, b), names, strict=True)],
        "red": red,
        "with_draft_prefill": included[0],
    }


def _noise(side: Result, name: str) -> str:
    """What plain decoding differed from itself by, and what else the machine did: a method that gained only because the
    other side was disturbed has gained nothing."""
    found, load = side["noise"], side["env"].get("load_before")
    told = "plain decoding was not run twice"
    if found is not None:
        low, high = found["ar_vs_ar_ci"]
        told = f"plain decoding against itself {found['ar_vs_ar_mean']:.3f} [{low:.3f}, {high:.3f}]"
    busy = "" if load is None else f", load average {load[0]:.1f} before"
    noisy = found is not None and found["width"] > NOISY
    return f"{name}: {told}{busy}" + ("; NOISY: it was disturbed, and so is what is compared with it" if noisy else "")


def _pairs(
    a: Result, b: Result, methods: Sequence[str], names: Sequence[str]
) -> tuple[list[tuple[str, str]], list[str]]:
    """The pairs of methods, and why others are left out."""
    if not methods:
        pairs = [(label, label) for label in a["methods"] if label in b["methods"]]
    else:
        halves = [text.partition("/") for text in methods]
        pairs = [(AR, AR), *((one, other or one) for one, _, other in halves)]
    for pair in pairs:
        for label, side, name in zip(pair, (a, b), names, strict=True):
            if label not in side["methods"]:
                known = ", ".join(side["methods"])
                raise UsageError(f"has no method {label}", where=name, do=f"--methods of: {known}")
    whys = {name: parity.red(side) for name, side in zip(names, (a, b), strict=True)}
    left: dict[str, None] = {}
    kept = []
    for pair in dict.fromkeys(pairs):
        red = [
            f"{label} in {name}: {whys[name][label]}"
            for label, name in zip(pair, names, strict=True)
            if label in whys[name]
        ]
        left |= dict.fromkeys(red)
        kept += [] if red else [pair]
    return kept, list(left)


def _row(
    task: str, length: int, pair: tuple[str, str], groups: Sequence[tuple[Any, Any]], included: bool
) -> dict[str, Any]:
    one, two = [x[pair[0]] for x, _ in groups], [y[pair[1]] for _, y in groups]
    times = [[_tpot(run, included) for run in side] for side in (one, two)]
    plain = [[_tpot(group[AR], included) for group in side] for side in zip(*groups, strict=True)]
    speedups = metrics.ratios(*times)
    own = [metrics.ratios(base, side) for base, side in zip(plain, times, strict=True)]
    relative = metrics.ratios(own[1], own[0])
    taus = [_tau(y) - _tau(x) for x, y in zip(one, two, strict=True)]
    ends = {name: _ends(values) for name, values in (("speedup", speedups), ("relative", relative), ("tau", taus))}
    return {
        "task": task,
        "length": length,
        "methods": list(pair),
        "n": len(groups),
        "speedup_mean": metrics.mean(speedups),
        "speedup_ci": ends["speedup"],
        "relative_mean": metrics.mean(relative),
        "relative_ci": ends["relative"],
        "verdict": "baseline"
        if pair == (AR, AR)
        else verdict([round(end, 9) for end in ends["relative"]], len(groups)),
        "tau_mean": metrics.mean(taus),
        "tau_ci": ends["tau"],
        "equal": sum(x["output_ids_sha256"] == y["output_ids_sha256"] for x, y in zip(one, two, strict=True)),
    }


def _tpot(run: Mapping[str, Any], included: bool) -> float:
    begin = -run["draft_prefill_ms"] if included else 0.0
    return metrics.tpot(begin, run["decode_ms"], run["n_out"]) or 0.0


def _tau(run: Mapping[str, Any]) -> float:
    return float((run["n_out"] - 1) / run["rounds"])


def _ends(values: Sequence[float]) -> list[float]:
    return [float(end) for end in interval(values, resamples=RESAMPLES)]


def differences(a: Result, b: Result) -> list[str]:
    """What the two results were made with that differs, a line each: machine, versions, settings, methods."""
    lines = []
    for part, names in (
        ("env", ("device", "threads", "torch", "foldspec", "git")),
        ("target", ("name", "revision", "dtype", "weights")),
        ("drafter", ("name", "revision")),
        ("settings", ("max_new", "temperature", "order", "seed", "ignore_eos")),
    ):
        one, two = a[part] or {}, b[part] or {}
        lines += [f"{part} {n}: {one.get(n)} and {two.get(n)}" for n in names if one.get(n) != two.get(n)]
    for label in a["methods"]:
        one, two = a["methods"][label], b["methods"].get(label)
        if two is not None and label != AR_AGAIN:
            lines += [f"{label} {n}: {one[n]} and {two.get(n)}" for n in one if one[n] != two.get(n) and _own(n)]
    return lines


def _own(name: str) -> bool:
    """Whether a setting of a method is its own, and is not told of the whole."""
    return name not in ("target", "drafter", "device", "dtype", "weights")


def render(found: Mapping[str, Any], form: str) -> str:
    """``form`` is ``table``, ``md`` or ``csv`` (the rows alone)."""
    if form == "csv":
        return as_csv([{**row, "methods": " / ".join(dict.fromkeys(row["methods"]))} for row in found["rows"]])
    a, b = found["names"]
    lines = [
        f"A is {a}, B is {b}; each request with itself, means [95% interval]",
        *(["every TPOT counts the drafter's part of prefill"] if found["with_draft_prefill"] else []),
        "B over A: TPOT of A over that of B, of two times of a day; to AR: the same, each side over its own AR first: "
        "+ a gain, - a loss, ~ the interval contains 1, ? too few requests",
        "tau: B's less A's; equal: outputs that are the same",
        *found["noise"],
        *(f"PARITY RED, not compared: {line}" for line in found["red"]),
        *(f"{count} requests are in {name} alone" for name, count in found["only"].items() if count),
        *(f"DIFFERENT {line}" for line in found["differ"]),
    ]
    bullet = "- " if form == "md" else ""
    return "\n\n".join([as_table(COLUMNS, found["rows"], form), "\n".join(bullet + line for line in lines)])


def _interval(name: str, form: str = ".3f") -> Any:
    def show(row: Mapping[str, Any]) -> str:
        low, high = row[f"{name}_ci"]
        return f"{row[f'{name}_mean']:{form}} [{low:{form}}, {high:{form}}]"

    return show


COLUMNS: list[Column] = [
    ("task", lambda row: str(row["task"])),
    ("length", lambda row: str(row["length"])),
    ("method", lambda row: " / ".join(dict.fromkeys(row["methods"]))),
    ("n", lambda row: str(row["n"])),
    ("B over A", _interval("speedup")),
    ("to AR", lambda row: f"{_interval('relative')(row)} {MARKS[row['verdict']]}".rstrip()),
    ("tau", _interval("tau", "+.3f")),
    ("equal", lambda row: str(row["equal"])),
]
