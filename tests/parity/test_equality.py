"""Greedy output with speculation equals plain decoding, id for id.

Everyday: 60 prompts of random ids on a tiny pair, where nothing is excused. Slow: a part of the 63 fixed texts on the
embedded pair; ``scripts/check_equality.py`` runs them all.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from equality import METHODS, Difference, Prompt, compare, judge, prompts

from foldspec import Engine

PAIR = Path(__file__).parent.parent / "golden" / "pairs" / "a_llama_zlab"
WINDOW, BLOCK, PAGE, CHUNK = 24, 6, 16, 64
LOOKUP: dict[str, object] = {"drafter": "lookup"}
EDGES = (WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + BLOCK, 3 * WINDOW, PAGE - 1, PAGE, PAGE + 1, CHUNK, CHUNK + 1)
# chat and code, and each side of page, chunk and window
PART = ("chat 0", "chat 13", "code heapq 10", "code argparse 255", "code ast 256", "code cmd 257", "code csv 263",
        "document slicings 511", "code functools 512", "document strings 768")  # fmt: skip


def tiny_prompts() -> list[Prompt]:
    draw = random.Random(0)
    lengths = [*EDGES, *(draw.randint(1, 400) for _ in range(60 - len(EDGES)))]
    return [Prompt(f"random {n}", tuple(draw.randrange(4, 500) for _ in range(n))) for n in lengths]


@pytest.mark.slow
def test_every_method_equals_plain_decoding_on_60_tiny_prompts() -> None:
    engine = Engine.load(
        target=str(PAIR / "target"), drafter=str(PAIR / "drafter"), window=WINDOW, page_size=PAGE, prefill_chunk=CHUNK
    )
    differences: list[Difference] = []
    runs_that_draft = {"lookup": 0, "network": 0}
    for prompt in tiny_prompts():
        for method, _, tau, difference in compare(engine, prompt, 24, (*METHODS, LOOKUP)):
            runs_that_draft["lookup" if method == LOOKUP else "network"] += bool(tau and tau > 1)
            if difference is not None:
                differences.append(difference)
    assert differences == []
    # speculation must have been at work for the equality to mean anything
    assert runs_that_draft["network"] > 200 and runs_that_draft["lookup"] > 5, runs_that_draft


def test_only_few_near_ties_are_excused() -> None:
    """The gate of torch's own kernels; that of the compiled ones above is that nothing differs."""
    tie, choice = (Difference("a prompt", {"context": "full"}, 7, gap) for gap in (0.0, 1e-3))
    quiet: list[object] = []
    assert judge([], 1, quiet.append) and judge([tie], 500, quiet.append) and judge([tie] * 2, 1000, quiet.append)
    assert not judge([tie], 499, quiet.append)
    assert not judge([choice], 10**6, quiet.append) and not judge([tie, choice], 10**6, quiet.append)
    assert "token 7, top-2 gap 0.00e+00" in str(quiet[0])


@pytest.mark.slow
def test_every_method_equals_plain_decoding_on_real_text() -> None:
    engine = Engine.load("smollm2-135m", device="cpu", dtype="float32")
    chosen = [p for p in prompts(engine) if p.name in PART]
    assert len(chosen) == len(PART)
    differences, compared = list[Difference](), 0
    for prompt in chosen:
        for _, count, _, difference in compare(engine, prompt, 10, (*METHODS, LOOKUP)):
            compared += count
            if difference is not None:
                differences.append(difference)
    assert compared > 400 and differences == []  # with compiled kernels nothing is excused
