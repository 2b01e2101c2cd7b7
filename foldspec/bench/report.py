"""A bench's result as a table for people: aligned text, Markdown or CSV, and the sentences that belong under it."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from foldspec.bench import model_report, pareto_report, parity
from foldspec.bench.methods import AR
from foldspec.bench.summary import FEW, NOISY
from foldspec.tasks import MADE

__all__ = ["FORMATS", "Column", "as_csv", "as_table", "as_text", "remarks", "render", "tables"]

FORMATS = ("table", "md", "csv", "json")
FIRST = "every task and length"
MARKS = {"gain": "+", "loss": "-", "none": "~", "few": "?", "baseline": ""}
Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def _ci(name: str, digits: int = 2) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        low, high = row[f"{name}_ci"]
        return f"{row[f'{name}_mean']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    return show


def _speedup(row: Row) -> str:
    if row["speedup_mean"] is None:
        return f"parity red: {row['parity_red']}"
    return "1" if row["method"] == AR else f"{_ci('speedup', 3)(row)} {MARKS[row['verdict']]}"


def _method(row: Row) -> str:
    return str(row["method"]) if row["lossless"] or row.get("made_up") else f"{row['method']} (lossy)"


def _share(row: Row) -> str:
    share = "" if row["bandwidth_share"] is None else f" ({row['bandwidth_share']:.0%})"
    return f"{row['gb_s']:.1f}{share}"


def _diff(row: Row) -> str:
    if row["diff_from_ar"] is None:
        return "-"
    gap = "" if row["gap_largest"] is None else f" (gap {row['gap_largest']:.1e})"
    return f"{row['diff_from_ar']}{gap}"


def _number(name: str, digits: int) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:.{digits}f}"


COLUMNS: list[Column] = [
    ("task", lambda row: str(row["task"])),
    ("length", lambda row: str(row["length"])),
    ("method", _method),
    ("n", lambda row: str(row["n"])),
    ("out", lambda row: str(row["excluded"])),
    ("flags", lambda row: str(row.get("flagged", "-"))),
    ("tau", _ci("tau")),
    ("pooled", _number("tau_pooled", 2)),
    ("TPOT ms", _number("tpot_ms_median", 2)),
    ("speedup", _speedup),
    ("break-even tau", _number("break_even_tau", 2)),
    ("TTFT ms", _number("ttft_ms_median", 0)),
    ("diff", _diff),
    ("GB/s", _share),
]
AVERAGES: list[Column] = [
    ("length", lambda row: str(row["length"])),
    ("method", _method),
    ("tasks", lambda row: str(row["tasks"])),
    ("tau", _ci("tau")),
    ("speedup", _speedup),
]
AGAINST: list[Column] = [
    ("task", lambda row: str(row["task"])),
    ("length", lambda row: str(row["length"])),
    ("method", _method),
    ("n", lambda row: str(row["n"])),
    ("speedup", _speedup),
]
PARTS: list[Column] = [
    ("task", lambda row: str(row["task"])),
    ("length", lambda row: str(row["length"])),
    ("method", _method),
    *((part, lambda row, part=part: f"{row['parts_ms'][part]:.2f}") for part in ("draft", "verify", "accept", "host")),
]
SCORES: list[Column] = [
    ("task", lambda row: str(row["task"])),
    ("length", lambda row: str(row["length"])),
    ("method", _method),
    ("n", lambda row: str(row["n"])),
    ("score", _ci("score", 3)),
    ("no answer", lambda row: str(row["no_answer"])),
    ("hit limit", lambda row: str(row["hit_limit"])),
    ("second", lambda row: "-" if row["second_opinion_mean"] is None else f"{row['second_opinion_mean']:.3f}"),
]
LEGEND = (
    "tau: committed tokens a round, the target's own included, mean of requests [95% interval]; pooled: of all at once",
    "TPOT: (last token - first token) / (tokens - 1), prefill excluded, median",
    "speedup: mean of TPOT_ar / TPOT_method, paired by request [95% interval]: + a gain, - a loss, ~ the interval "
    f"contains 1, ? fewer than {FEW} requests decide nothing",
    "break-even tau: what a round costs in steps of AR, which is the tau at which a method breaks even",
    "out: requests left out for all methods; flags: of those that stayed, where the device's clock fell by over 10% or "
    "something slowed it down; diff: outputs that differ from AR's",
    "GB/s: weights, keys and values that a round reads (share of what this machine can read)",
)


LEGEND_WITH_PREFILL = (
    "TPOT incl. draft prefill: (last token - first token + the drafter's part of prefill) / (tokens - 1), median; all "
    "speedups here are of such TPOTs, and smaller than without it; break-even tau and GB/s are of rounds alone"
)


def render(result: Mapping[str, Any], form: str) -> str:
    """``form`` is ``table``, ``md`` or ``csv`` (the rows alone, with the names and numbers of the JSON)."""
    pareto, bullet = result.get("pareto"), "- " if form == "md" else ""
    if form == "csv":
        return as_csv(pareto_report.flat(pareto) if pareto else result["summary"])
    if pareto:
        said = pareto_report.pareto_remarks(pareto, result["settings"]["temperature"])
        table = as_table(pareto_report.columns(pareto), pareto["points"], form)
        return f"{table}\n\n" + "\n".join(bullet + line for line in [*result["notices"], *said, *conditions(result)])
    blocks = []
    for title, columns, rows in tables(result):
        blocks += [] if title == FIRST else [title]
        blocks.append(as_table(columns, rows, form))
    return "\n\n".join([*blocks, "\n".join(bullet + line for line in remarks(result))])


def tables(result: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Column], Sequence[Row]]]:
    """The tables of a result that have rows: title, columns, rows."""
    unreal = {row["method"]: row["made_up"] for row in result["summary"] if row["made_up"]}
    made_up: list[Column] = [("made up", lambda row: unreal.get(row["method"], ""))] if unreal else []
    against = result["against"]
    traced = [row for row in result["summary"] if row["parts_ms"]]
    scored = [row for row in result["summary"] if row.get("score_ci")]  # a result of an earlier version has none
    model = result.get("calibration") or {"profiles": [], "methods": []}
    first, averages, over = (_named(columns, result) for columns in (COLUMNS, AVERAGES, AGAINST))
    found: list[tuple[str, Sequence[Column], Sequence[Row]]] = [
        (FIRST, [*first, *made_up], result["summary"]),
        ("average over tasks", [*averages, *made_up], result["averages"]),
        (f"speedup over {against[0]['against']}" if against else "", [*over, *made_up], against),
        ("ms a round, from a separate traced pass", [*PARTS, *made_up], traced),
        ("score, mean [95% interval]; outputs without an answer count as wrong", [*SCORES, *made_up], scored),
        ("the drafters, at lambda 0", model_report.PROFILES, model["profiles"] if model["methods"] else []),
        ("the throughput model beside what was measured", model_report.METHODS, model["methods"]),
    ]
    return (one for one in found if one[2])


def with_draft_prefill(result: Mapping[str, Any]) -> bool:
    """Whether TPOT and speedups count the drafter's part of prefill."""
    return bool(result["settings"].get("include_draft_prefill"))


def _named(columns: Sequence[Column], result: Mapping[str, Any]) -> list[Column]:
    """The columns, with what their TPOT and speedup count in their names."""
    if not with_draft_prefill(result):
        return list(columns)
    return [(f"{name} incl. draft prefill" if name in ("TPOT ms", "speedup") else name, show) for name, show in columns]


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What must stand under the table."""
    legend = list(LEGEND)
    if with_draft_prefill(result):
        legend[1] = LEGEND_WITH_PREFILL
    lines = legend if result["summary"] else []
    unreal = sorted({method["made_up"] for method in result["methods"].values() if method.get("made_up")})
    if unreal:
        said = "outputs and tau say nothing of a model and are compared with nothing"
        lines.insert(0, f"MADE UP ({'; '.join(unreal)}): {said}; nor does TTFT where contexts are made up")
    model = result.get("calibration")
    if model and model["methods"]:
        lines += model_report.model_remarks(result["settings"]["temperature"])
    return [*result["notices"], *lines, *conditions(result)]


def conditions(result: Mapping[str, Any]) -> list[str]:
    """How it was measured, and what speaks against it."""
    lines: list[str] = []
    floor = result["noise"]
    if floor is not None:
        low, high = floor["ar_vs_ar_ci"]
        head = (
            f"A/A, AR against itself: {floor['ar_vs_ar_mean']:.3f} [{low:.3f}, {high:.3f}], width {floor['width']:.3f}"
        )
        if floor["n"] < FEW:
            lines.append(f"{head}: too few requests to say more")
        elif floor["contains_1"]:
            lines.append(f"{head}: the noise floor")
        else:
            lines.append(f"{head}: DOES NOT CONTAIN 1: believe no difference of that size (chance: 1 in 20)")
        if floor["spread"] is not None and floor["spread"] > NOISY:
            bias = floor["spread"] ** 2
            lines.append(
                f"one run scatters by {floor['spread']:.0%}: means of ratios are about {bias:.1%} too high, "
                "intervals miss that; use a quieter machine or more tokens"
            )
    if result["env"]["device_type"] == "cpu":
        lines.append("CPU: ratios on this machine, not a GPU's")
    devices = result["env"].get("devices") or []
    if devices:
        machines = len({device["machine"] for device in devices})
        said = ", ".join(f"{count} {name}" for name, count in Counter(device["name"] for device in devices).items())
        lines.append(f"spread by Ray over {said} (machines: {machines}), each request on one of them")
        if result["env"]["device_type"] == "cpu" and machines < len(devices):
            lines.append("actors on one machine disturb one another's times: for these, believe a run without them")
    for cell in result["tasks"]:
        counts = {why: count for why, count in cell["excluded"].items() if count}
        if counts:
            said = ", ".join(f"{count} {why.replace('_', ' ')}" for why, count in counts.items())
            lines.append(f"{cell['name']} {cell['length']}: left out: {said}")
    unsettled = [w for w in result["warmup"] if not w["settled"]]
    if unsettled:
        said = ", ".join(dict.fromkeys(f"{w['method']} at {w['length']}" for w in unsettled))
        if result.get("pareto"):  # of very many
            said = f"{len(unsettled)} of {len(result['warmup'])} methods and lengths"
        lines.append(f"warm-up had not settled to 5%: {said}")
    disturbed = [row for row in result["summary"] if row["diff_from_ar"] and row["lossless"]]
    if disturbed:
        lines.append("OUTPUTS DIFFER FROM PLAIN DECODING: only near ties (a tiny gap) are no fault")
    lines += [*parity.notes(result), *_machine(result)]
    for label, method in result["methods"].items():
        if not method["lossless"] and not method.get("made_up") and not result.get("pareto"):  # whose table says so
            lines.append(f"{label} is LOSSY: its output's law is {method['law']}")
    loads = [f"{load[0]:.1f}" for load in (result["env"]["load_before"], result["env"]["load_after"]) if load]
    if loads:
        lines.append(f"load average {' before, '.join(loads)} after; threads: {result['env']['threads']}")
    lines += list(dict.fromkeys(_made_from(cell) for cell in result["tasks"] if cell["name"] != "random"))
    rules = {cell["name"]: cell["scoring"] for cell in result["tasks"] if cell.get("scoring")}
    judged = {row["task"] for row in result["summary"] if row.get("score_ci")}
    lines += [f"score of {name}: {rule}" for name, rule in rules.items() if name in judged]
    if "random" in result["settings"]["tasks"]:
        lines.append("random: ids drawn evenly; its tau means nothing")
    if not result["complete"]:
        lines.append("INCOMPLETE: not every request was measured; go on with --resume")
    return lines


def _machine(result: Mapping[str, Any]) -> list[str]:
    """What a speedup may owe to how things ran: graphs for one side alone, runs that failed, a clock that was not read
    or not held. Results of an earlier foldspec say less."""
    lines = []
    graphs = {label: method["graphs"] for label, method in result["methods"].items() if method.get("graphs")}
    plain = graphs.get(AR, {"runs": False})
    for label, own in graphs.items():
        if own["runs"] != plain["runs"]:
            which, why = ("AR's", own["why_not"]) if plain["runs"] else (f"{label}'s", plain["why_not"])
            lines.append(f"NOT ONE PATH for AR and {label}: only {which} rounds run on fixed buffers ({why})")
    for one in result.get("failed") or ():
        lines.append(f"FAILED: {one['method']} at {one['task']} {one['length']} {one['id']}: {one['error']}")
    clocks = result["env"].get("clocks")
    if clocks is not None and clocks["by"] is None:
        lines.append(f"no device clock was read: {clocks['why_not']}")
    elif clocks is not None:
        locked = {True: "held by a setting", False: "not held by a setting"}.get(result["env"]["clocks_locked"])
        said = [f"device clock read by {clocks['by']}", locked, clocks["why_not"]]
        lines.append("; ".join(filter(None, said)))
    return lines


def _made_from(cell: Mapping[str, Any]) -> str:
    """Which data, which version, whose words."""
    if cell["name"] in MADE:
        return f"{cell['name']}: {cell['dataset']}; nobody's published set"
    version = f" at {cell['revision'][:12]}" if cell["revision"] else ", from a local file"
    return f"{cell['name']}: {cell['dataset']}{version}; prompt: {cell['prompt']}"


def as_table(columns: Sequence[Column], rows: Sequence[Row], form: str) -> str:
    """``form``: ``table`` or ``md``."""
    return as_text([name for name, _ in columns], [[show(row) for _, show in columns] for row in rows], form)


def as_text(head: Sequence[str], body: Sequence[Sequence[str]], form: str) -> str:
    """Cells in columns. ``form``: ``table`` or ``md``."""
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    if form == "md":
        lines = [head, ["-" * width for width in widths], *body]
        return "\n".join(
            "| " + " | ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)) + " |" for line in lines
        )
    lines = [head, *body]
    return "\n".join("  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def as_csv(rows: Sequence[Row]) -> str:
    """Names and numbers of the JSON; an interval is two columns."""
    text = io.StringIO()
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name.endswith("_ci") and value is None:
            flat |= {f"{name}_low": None, f"{name}_high": None}
        elif name == "commit_counts":
            flat[name] = " ".join(map(str, value))
        elif isinstance(value, list):
            flat |= {f"{name}_low": value[0], f"{name}_high": value[1]}
        elif isinstance(value, dict):
            flat |= {f"{name}_{part}": number for part, number in value.items()}
        else:
            flat[name] = value
    return flat
