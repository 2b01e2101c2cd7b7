"""A sweep's points as a table for people, and the sentences under it: which are worth having, and what was derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foldspec.bench.summary import FEW

__all__ = ["columns", "flat", "in_words", "pareto_remarks", "short_names"]

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]
KINDS = {"verifier": "verifier alone", "drafter": "drafter alone"}
QUALITIES = {"score": "score", "logprob": "log-prob", "agreement": "agreement"}
SPEEDS = {"latency_s": "latency", "tokens_s": "throughput"}
LEGEND = (
    "log-prob: mean over the output's tokens of their log-probability under the target (raw logits, nats); agreement: "
    "1 - total variation spent a judged draft; each the mean of requests [95% interval]",
    "latency: prompt to last token, prefill included (the verifier's without the drafter's part), mean of requests; "
    "tokens/s: tokens of output over that time, of all requests together",
    "model: Eq. 6 (1 - lambda d_K) and Eq. 7, the latter for the tokens after the first, behind the time to the first "
    "as measured",
    "front: L on the frontier of latency, T of throughput; l, t: only not dominated by means; score / log-prob / "
    "agreement; a point whose parity is red is on none",
    "drafter alone: nothing was verified, but the target's pass was made all the same, so its times are derived: time "
    "to the first token + rounds x the median time of drafting in its calibrating runs; it is on no frontier",
)


def columns(pareto: Mapping[str, Any]) -> list[Column]:
    marks = _marks(pareto["frontiers"])
    return [
        ("task", lambda row: str(row["task"])),
        ("length", lambda row: str(row["length"])),
        ("drafts", lambda row: _or_dash(row["draft_tokens"])),
        ("effort", lambda row: row["effort"] or "-"),
        ("leniency", _leniency),
        ("n", lambda row: str(row["n"])),
        ("score", _summary("score", 2)),
        ("log-prob", _summary("logprob", 2)),
        ("agreement", _summary("agreement", 3)),
        ("model", _number("agreement_modelled", 3)),
        ("latency s", _summary("latency_s", 2)),
        ("tokens/s", _summary("tokens_s", 1)),
        ("model", _number("tokens_s_modelled", 1)),
        ("front", lambda row: _front(row, marks)),
    ]


def _front(row: Row, marks: Mapping[tuple[Any, ...], str]) -> str:
    return "PARITY RED" if row.get("parity_red") else marks.get((row["task"], row["length"], row["method"]), "")


def _leniency(row: Row) -> str:
    if row["kind"] != "point":
        return KINDS[row["kind"]]
    share = "-" if row["leniency"] is None else f"{row['leniency']:g}"
    return f"{share} (lossless)" if row["lossless"] else share


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _number(name: str, digits: int) -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else f"{row[name]:.{digits}f}"


def _summary(name: str, digits: int) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        if row[name] is None:
            return "-"
        low, high = row[name]["ci"]
        return f"{row[name]['mean']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    return show


def _marks(frontiers: Sequence[Row]) -> dict[tuple[Any, ...], str]:
    """(task, length, method) -> ``LT / t / -``: a place a quality, a letter a speed."""
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for front in frontiers:
        letter = SPEEDS[front["speed"]][0]
        for method in front["non_dominated"]:
            own = found.setdefault((front["task"], front["length"], method), {})
            mark = letter.upper() if method in front["frontier"] else letter
            own[front["quality"]] = own.get(front["quality"], "") + mark
    return {key: " / ".join(own.get(quality, "-") for quality in QUALITIES) for key, own in found.items()}


def flat(pareto: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points for a file of commas: of a mean and its interval ``NAME_mean`` and ``NAME_ci``; ``front`` in words."""
    marks = _marks(pareto["frontiers"])
    rows = []
    for point in pareto["points"]:
        row: dict[str, Any] = {}
        for name, value in point.items():
            if isinstance(value, Mapping):
                row |= {f"{name}_mean": value["mean"], f"{name}_ci": value["ci"]}
            else:
                row[name] = value
        rows.append(row | {"front": _front(point, marks)})
    return rows


def pareto_remarks(pareto: Mapping[str, Any], temperature: float) -> list[str]:
    """What must stand under the table: frontiers and exclusions in words, what is lossless, how times are derived."""
    points = pareto["points"]
    if not points:
        return []
    names = short_names(pareto)
    counts = {(point["task"], point["length"]): point["n"] for point in points}
    lines = _frontiers(pareto["frontiers"], names)
    lines += [_excluded(row, names, counts[row["task"], row["length"]]) for row in pareto["exclusions"]]
    lines += LEGEND
    lossless = dict.fromkeys(names[point["method"]] for point in points if point["lossless"])
    lines.append(f"lossless: {'; '.join(lossless)}; the others are LOSSY, each one's law is in the JSON (methods)")
    if temperature == 0:
        lines.append(
            "temperature 0: the target's laws are point masses, so what is spent at a draft is how likely another "
            "token than the target's argmax is to come; Eq. 6's d_K is the share of drafts that miss it"
        )
    return lines


def short_names(pareto: Mapping[str, Any]) -> dict[str, str]:
    """Of every method of a sweep, in words."""
    return {point["method"]: _name(point, pareto["axes"]) for point in pareto["points"]}


def in_words(text: str, names: Mapping[str, str]) -> str:
    """A text with the names of points in it, which have no blanks, by their short names."""
    return " ".join(names.get(word, word) for word in text.split())


def _name(point: Row, axes: Mapping[str, Any]) -> str:
    """A point in words; the number of drafts only where there are several."""
    if point["kind"] == "verifier":
        return KINDS["verifier"]
    words = [point["effort"]]
    if len(axes["draft_tokens"]) > 1:
        words.insert(0, f"{point['draft_tokens']} drafts")
    if point["leniency"] is not None:
        words.append(f"leniency {point['leniency']:g}")
    text = ", ".join(words)
    return f"{KINDS['drafter']} ({text})" if point["kind"] == "drafter" else text


def _frontiers(frontiers: Sequence[Row], names: Mapping[str, str]) -> list[str]:
    """What comes of several qualities and speeds alike is said once."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for front in frontiers:
        if front["frontier"]:
            said = f"frontier, fastest first: {'; '.join(names[label] for label in front['frontier'])}"
        else:
            said = f"no frontier: {in_words(front['why_not'], names)}"
        alike.setdefault((front["task"], front["length"], said), []).append(front)
    lines = []
    for (task, length, said), fronts in alike.items():
        speeds: dict[str, list[str]] = {}
        for front in fronts:
            speeds.setdefault(QUALITIES[front["quality"]], []).append(SPEEDS[front["speed"]])
        where = ", ".join(f"{quality} by {' and '.join(each)}" for quality, each in speeds.items())
        lines.append(f"{task} {length}, {where}: {said}")
    return lines


def _excluded(row: Row, names: Mapping[str, str], n: int) -> str:
    """The second paper's two criteria (4.1) for one task: what speaks against sweeping it at all."""
    low, high = row["difference"]["ci"]
    chance = "not known" if row["chance"] is None else f"{row['chance']:g}"
    found = []
    if row["no_benefit"]:
        found.append("NO BENEFIT (the verifier alone is not better beyond chance)")
    if row["below_chance"]:
        found.append("BELOW CHANCE (the drafter is worse than guessing)")
    neither = f"fewer than {FEW} requests exclude nothing" if n < FEW else "not excluded"
    return (
        f"{row['task']} {row['length']}, the paper's exclusions: verifier {row['verifier_score']:.2f}, best "
        f"{names[row['drafter']]} {row['drafter_score']:.2f}, difference {row['difference']['mean']:.2f} [{low:.2f}, "
        f"{high:.2f}], chance {chance}: {' and '.join(found) or neither}"
    )
