"""Whether methods say what plain decoding says: without that, no speedup of theirs is shown.

Judged are methods whose rule is lossless, greedy, in float32: before anything is measured each decodes a few tokens of
a short prompt (:func:`probe`), and later everything that was measured counts. A difference is excused only at a near
tie, where plain decoding's own two best logits are less than 1e-4 apart, and at most once in 500 tokens (once in all
where there are fewer). In half precision the shape of a pass decides how it rounds: differences are listed there, and
not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from foldspec.bench.methods import AR, AR_AGAIN
from foldspec.errors import ResourceError
from foldspec.options import SamplingParams

__all__ = ["NEAR_TIE", "RED", "difference", "logits_of", "notes", "probe", "red", "shown", "verdicts", "withhold"]

NEAR_TIE = 1e-4
ONE_IN = 500  # tokens
PROMPT, TOKENS = 48, 12  # of the probe
LISTED = 5  # differences that are told of a method; bench.json has all
GREEN, RED, NOT_JUDGED = "green", "red", "not judged"
# what is a speedup in a row, or says by how much
SPEEDUPS = ("speedup_mean", "speedup_ci", "speedup_ratio_of_means", "speedup_mean_equal_output")


def difference(plain: Sequence[int], other: Sequence[int], best: Callable[[int], Sequence[float]]) -> dict[str, Any]:
    """``first_diff``: where an output first differs from plain decoding's; ``gap``: how far plain decoding's two best
    logits are apart there, of all that ``best`` gives; None where plain decoding had ended."""
    if plain == other:
        return {"first_diff": None, "gap": None}
    pairs = enumerate(zip(other, plain, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(other), len(plain)))
    if at == len(plain):
        return {"first_diff": at, "gap": None}
    logits = sorted(best(at))
    return {"first_diff": at, "gap": logits[-1] - logits[-2]}


def logits_of(engine: Any, prompt: Sequence[int], output: Sequence[int]) -> Callable[[int], Sequence[float]]:
    """What gives the target's logits [vocabulary] for the output's token at a place."""

    def best(at: int) -> Sequence[float]:
        with engine.prefill((*prompt, *output[:at])) as prefix:
            logits: Sequence[float] = prefix.logits[0].tolist()
            return logits

    return best


def probe(
    arms: Iterable[Any], ids: Sequence[int], progress: Callable[[str, int, int], None]
) -> dict[str, dict[str, Any]]:
    """Method -> ``n_out`` tokens after the head of ``ids``, and their :func:`difference` from plain decoding's, the
    first of ``arms``; ``error`` for one that did not run. Methods that lose something are not asked, and none where
    something is made up."""
    first, *others = arms
    asked = [arm for arm in others if arm.lossless and not arm.made_up]
    if first.made_up or not asked:
        return {}
    params, prompt = SamplingParams(max_tokens=TOKENS, ignore_eos=True), tuple(ids[:PROMPT])
    found: dict[str, dict[str, Any]] = {}
    try:
        with first.engine.prefill(prompt) as prefix:
            plain = _output(first.engine, prefix, params)
            best = logits_of(first.engine, prompt, plain)
            for count, arm in enumerate(asked, 1):
                progress(f"comparing with plain decoding: {arm.label}", count, len(asked))
                try:
                    output = _output(arm.engine, prefix, params)
                    found[arm.label] = {"n_out": len(output), **difference(plain, output, best)}
                except ResourceError as error:
                    found[arm.label] = {"n_out": 0, "error": str(error)}
    except ResourceError as error:
        return {arm.label: {"n_out": 0, "error": str(error)} for arm in asked}
    return found


def _output(engine: Any, prefix: Any, params: SamplingParams) -> tuple[int, ...]:
    generation = engine.stream(prefix, params)
    for _ in generation:
        pass
    ids: tuple[int, ...] = generation.completion.token_ids
    return ids


def verdicts(
    methods: Mapping[str, Mapping[str, Any]],
    lines: Iterable[Mapping[str, Any]],
    probed: Mapping[str, Mapping[str, Any]],
    *,
    drawn: bool,
) -> dict[str, dict[str, Any]]:
    """Of each method but plain decoding: ``state`` (``green``, ``red``, ``not judged``) and ``why``; the ``probe``; the
    tokens and requests ``compared``, and all ``differing`` ones. ``methods``: label -> how it ran; ``lines``: of all
    runs, those that cannot be paired too; ``drawn``: at a temperature, where nothing measured is compared."""
    ran = [line for line in lines if line["finish"] != "failed"]
    found = {}
    for label, how in methods.items():
        if label in (AR, AR_AGAIN):
            continue
        mine = [line for line in ran if line["method"] == label] if not drawn and not how["made_up"] else []
        differing = [line for line in mine if line["first_diff"] is not None]
        compared = sum(line["n_out"] if line["first_diff"] is None else line["first_diff"] + 1 for line in mine)
        state, why = _state(how, differing, compared, probed.get(label))
        found[label] = {
            "state": state,
            "why": why,
            "probe": dict(probed[label]) if label in probed else None,
            "compared": {"requests": len(mine), "tokens": compared},
            "differing": [
                {name: line[name] for name in ("task", "length", "id", "first_diff", "gap")} for line in differing
            ],
        }
    return found


def _state(
    how: Mapping[str, Any], differing: Sequence[Mapping[str, Any]], compared: int, probed: Mapping[str, Any] | None
) -> tuple[str, str]:
    if how["made_up"]:
        return NOT_JUDGED, how["made_up"]
    if not how["lossless"]:
        return NOT_JUDGED, "its rule is lossy"
    if how["dtype"] != "float32":
        return NOT_JUDGED, f"{how['dtype']}: the shape of a pass decides how it rounds"
    if probed is not None and "error" not in probed and not _excused(probed):
        return RED, f"the probe differs from AR at {_at(probed)}"
    for line in differing:
        if not _excused(line):
            return RED, f"{line['task']} {line['length']} {line['id']} differs from AR at {_at(line)}"
    if len(differing) > max(1, compared // ONE_IN):
        return RED, f"{len(differing)} near ties in {compared} tokens, 1 in {ONE_IN} is excused"
    if probed is None or "error" in probed:
        why = "nothing was probed" if probed is None else f"the probe failed: {probed['error']}"
        return (GREEN, "") if compared else (NOT_JUDGED, why)
    return GREEN, ""


def _excused(found: Mapping[str, Any]) -> bool:
    return found["first_diff"] is None or (found["gap"] is not None and found["gap"] < NEAR_TIE)


def _at(found: Mapping[str, Any]) -> str:
    gap = "AR had ended" if found["gap"] is None else f"gap {found['gap']:.1e}"
    return f"token {found['first_diff']} ({gap})"


def withhold(rows: Iterable[dict[str, Any]], verdicts: Mapping[str, Mapping[str, Any]]) -> None:
    """Take speedups out of the rows of methods that are red, and of those that are set against one."""
    for row in rows:
        known = [verdicts[name] for name in (str(row["method"]), str(row.get("against"))) if name in verdicts]
        row["parity_red"] = next((one["why"] for one in known if one["state"] == RED), None)
        if row["parity_red"]:
            row |= {name: None for name in SPEEDUPS if name in row} | {"verdict": "red"}


def shown(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows whose speedup may be looked at."""
    return [row for row in rows if row["speedup_mean"] is not None]


def red(result: Mapping[str, Any]) -> dict[str, str]:
    """Method -> why no speedup of it is shown."""
    found: Mapping[str, Any] = result.get("parity") or {}
    return {label: one["why"] for label, one in found.items() if one["state"] == RED}


def notes(result: Mapping[str, Any]) -> list[str]:
    """What must stand under the table, a line each. A result of an earlier foldspec has no verdicts."""
    found: Mapping[str, Any] = result.get("parity") or {}
    lines = [f"PARITY RED, no speedup of {label} is shown: {why}" for label, why in red(result).items()]
    for label, one in found.items():
        if one["differing"]:
            told = "; ".join(f"{d['task']} {d['length']} {d['id']} at {_at(d)}" for d in one["differing"][:LISTED])
            more = len(one["differing"]) - LISTED
            told += f"; and {more} more" if more > 0 else ""
            many = f"{len(one['differing'])} of {one['compared']['requests']} requests"
            lines.append(f"{label} differs from AR in {many}: {told}{_without(result, label)}")
    unjudged: dict[str, list[str]] = {}
    for label, one in found.items():
        how = result["methods"][label]
        if one["state"] == NOT_JUDGED and how["lossless"] and not how["made_up"]:  # of others more is said elsewhere
            unjudged.setdefault(one["why"], []).append(label)
    return lines + [f"equality with AR not judged ({why}): {', '.join(names)}" for why, names in unjudged.items()]


def _without(result: Mapping[str, Any], label: str) -> str:
    """The method's speedups over the requests that do not differ."""
    rows = [row for row in result["summary"] if row["method"] == label and row["diff_from_ar"]]
    told = [
        f"{row['task']} {row['length']} {row['speedup_mean_equal_output']:.3f}"
        for row in rows
        if row["speedup_mean_equal_output"] is not None
    ]
    return f"; speedup without them: {', '.join(told)}" if told else ""
