"""The table says what it must: no gain that is none, a loss as a loss, and everything that spoils a measurement."""

from __future__ import annotations

from typing import Any

from foldspec.bench.report import render

DOCS = {"name": "docs", "dataset": "pydoc", "revision": None, "prompt": "own", "scoring": None, "length": 512}


def row(method: str, **changes: Any) -> dict[str, Any]:
    known = {
        "task": "docs",
        "length": 512,
        "method": method,
        "lossless": True,
        "made_up": "",
        "n": 20,
        "excluded": 0,
        "tau_mean": 1.5,
        "tau_ci": [1.4, 1.6],
        "tau_pooled": 1.5,
        "tpot_ms_median": 20.0,
        "speedup_mean": 1.1,
        "speedup_ci": [1.05, 1.15],
        "verdict": "gain",
        "break_even_tau": 1.4,
        "ttft_ms_median": 900.0,
        "diff_from_ar": 0,
        "gap_largest": None,
        "score_mean": None,
        "gb_s": 12.0,
        "bandwidth_share": 0.5,
        "parts_ms": None,
    }
    return {**known, **changes}


def result(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "summary": [row("ar", verdict="baseline"), *rows],
        "averages": [],
        "against": [],
        "noise": {
            "n": 20,
            "ar_vs_ar_mean": 1.001,
            "ar_vs_ar_ci": [0.99, 1.01],
            "width": 0.02,
            "contains_1": True,
            "spread": 0.01,
        },
        "env": {"device_type": "cpu", "threads": 1, "load_before": [0.5, 0, 0], "load_after": [0.7, 0, 0]},
        "tasks": [{**DOCS, "excluded": {"too_long": 0, "short_output": 0}}],
        "warmup": [],
        "settings": {"tasks": ["docs"]},
        "methods": {"ar": {"lossless": True, "law": "the target's own"}},
        "complete": True,
        "notices": [],
    }
    return {**known, **changes}


def line_of(text: str, method: str) -> str:
    (line,) = [line for line in text.splitlines() if f" {method} " in line and "docs" in line]
    return line


def test_marks() -> None:
    text = render(
        result(
            row("full", verdict="loss", speedup_mean=0.8, speedup_ci=[0.7, 0.9]),
            row("window", verdict="none", speedup_mean=1.2, speedup_ci=[0.9, 1.5]),
            row("fold"),
        ),
        "table",
    )
    assert "0.800 [0.700, 0.900] -" in line_of(text, "full")
    assert "1.200 [0.900, 1.500] ~" in line_of(text, "window")
    assert "1.100 [1.050, 1.150] +" in line_of(text, "fold")
    assert "CPU: ratios on this machine, not a GPU's" in text and "the noise floor" in text
    assert "INCOMPLETE" not in text and "DIFFER" not in text and "left out:" not in text and "scatters" not in text


def test_what_spoils_it_is_said() -> None:
    floor = {
        "n": 20,
        "ar_vs_ar_mean": 1.1,
        "ar_vs_ar_ci": [1.05, 1.2],
        "width": 0.15,
        "contains_1": False,
        "spread": 0.2,
    }
    text = render(
        result(
            row("fold", diff_from_ar=2, gap_largest=3e-6, excluded=3),
            noise=floor,
            complete=False,
            notices=["something to know"],
            tasks=[
                {
                    **DOCS,
                    "excluded": {"too_long": 1, "short_output": 2, "clock": 0},
                }
            ],
            warmup=[{"method": "fold", "length": 512, "settled": False}],
            env={"device_type": "cuda", "threads": 1, "load_before": None, "load_after": None},
            settings={"tasks": ["random"]},
        ),
        "table",
    )
    for words in (
        "DOES NOT CONTAIN 1",
        "scatters by 20%: means of ratios are about 4.0% too high",
        "docs 512: left out: 1 too long, 2 short output",
        "warm-up had not settled to 5%: fold at 512",
        "OUTPUTS DIFFER",
        "2 (gap 3.0e-06)",
        "INCOMPLETE",
        "something to know",
        "its tau means nothing",
    ):
        assert words in text, words
    assert "CPU" not in text
    assert "too few requests to say more" in render(result(row("fold"), noise={**floor, "n": 4}), "table")


def test_forms() -> None:
    markdown = render(result(row("fold")), "md").splitlines()
    assert markdown[0].startswith("| task") and set(markdown[1]) <= set("|- ") and len(markdown[0]) == len(markdown[2])
    comma = render(result(row("fold", parts_ms={"draft": 1.5})), "csv").splitlines()
    assert "speedup_ci_low,speedup_ci_high" in comma[0] and "parts_ms_draft" in comma[0] and len(comma) == 3
    assert render(result(summary=[], noise=None, complete=False), "table").startswith("CPU")  # nothing was measured yet


def test_a_lossy_method_is_called_so_and_its_output_may_differ() -> None:
    methods = {"ar": {"lossless": True, "law": "p"}, "lin": {"lossless": False, "law": "not the target's: a mixture"}}
    lossy = row("lin", lossless=False, diff_from_ar=7)
    bare = {name: value for name, value in lossy.items() if name != "made_up"}  # as averages were once written
    averages, against = [bare | {"tasks": 2}], [bare | {"against": "full"}]
    for form in ("table", "md"):
        text = render(result(lossy, methods=methods, averages=averages, against=against), form)
        assert text.count("lin (lossy)") == 3 and "ar (lossy)" not in text
        assert "lin is LOSSY: its output's law is not the target's: a mixture" in text
        assert "OUTPUTS DIFFER" not in text
    assert "OUTPUTS DIFFER" in render(result(lossy, row("full", diff_from_ar=1), methods=methods), "table")
    assert "lossless" in render(result(lossy, methods=methods), "csv").splitlines()[0]


def test_scores_stand_apart_with_their_rule_and_whose_words_were_used() -> None:
    scored = {"score_mean": 0.25, "score_ci": [0.1, 0.4], "no_answer": 3, "hit_limit": 2, "second_opinion_mean": 0.5}
    gsm8k = {"name": "gsm8k", "dataset": "openai/gsm8k", "revision": "740312add88f", "scoring": "the last box"}
    cells = [{**gsm8k, "prompt": "own", "length": 512, "excluded": {"too_long": 1, "repeated": 2}}]
    text = render(result(row("full", task="gsm8k", **scored), tasks=cells), "table")
    assert "score, mean [95% interval]" in text and "0.250 [0.100, 0.400]" in text
    assert "gsm8k: openai/gsm8k at 740312add88f; prompt: own" in text and "score of gsm8k: the last box" in text
    assert "gsm8k 512: left out: 1 too long, 2 repeated" in text
    none = render(result(row("full", task="gsm8k"), tasks=cells), "table")
    assert "interval]; outputs" not in none and "score of" not in none
