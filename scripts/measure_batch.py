"""What a batch gains and what waiting costs, on the embedded target.

1. Tokens a second of plain decoding at several batch sizes, short context; batches interleaved, best and median.
2. While a long prompt is prefilled beside running requests: how long each of them waits for a token, by the trace
   (``Completion.times``), beside the longest step and the median wait before and during.

    scripts/measure_batch.py --threads 1 --out FILE.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from foldspec import Engine, SamplingParams
from foldspec.schedule.scheduler import Step


def prompts(engine: Engine, count: int, length: int) -> list[tuple[int, ...]]:
    """Stretches of this repository's text."""
    assert engine.tokenizer is not None
    root = Path(__file__).parents[1]
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(root.glob("foldspec/**/*.py")))
    ids = engine.tokenizer.encode_prompt(text[: 40 * (length + 200) * count])
    draw = random.Random(0)
    begins = [draw.randrange(len(ids) - length) for _ in range(count)]
    return [tuple(ids[begin : begin + length]) for begin in begins]


def decoding(engine: Engine, batch: int, tokens: int, length: int) -> float:
    """Tokens a second of the steps in which ``batch`` requests decode and nothing else happens."""
    steps: list[Step] = []
    engine.scheduler.watch = steps.append
    engine.generate(list(prompts(engine, batch, length)), SamplingParams(max_tokens=tokens, ignore_eos=True))
    engine.scheduler.watch = None
    pure = [step.seconds for step in steps if step.decoded == batch and not step.prefilled]
    return batch / statistics.median(pure)


def gains(engine: Engine, batches: list[int], repeat: int, tokens: int, length: int) -> dict[int, list[float]]:
    taken: dict[int, list[float]] = {batch: [] for batch in batches}
    for turn in range(repeat):
        for batch in batches[turn % len(batches) :] + batches[: turn % len(batches)]:
            taken[batch].append(decoding(engine, batch, tokens, length))
    return taken


def waits(engine: Engine, running: int, long: int) -> dict[str, Any]:
    """``running`` requests decode; a prompt of ``long`` tokens joins them."""
    steps: list[Step] = []
    engine.scheduler.watch = steps.append
    short = [
        engine.stream(ids, SamplingParams(max_tokens=2000, ignore_eos=True)) for ids in prompts(engine, running, 100)
    ]
    for stream in short:
        stream.submit()
    while not all(stream.ready for stream in short):
        engine.scheduler.step()
    for _ in range(20):
        engine.scheduler.step()
    begin, first = engine.scheduler.busy, len(steps)
    joining = engine.stream(prompts(engine, 1, long)[0], SamplingParams(max_tokens=2))
    joining.submit()
    while not joining.ready:
        engine.scheduler.step()
    end, last = engine.scheduler.busy, len(steps)
    for stream in (*short, joining):
        stream.close()
    engine.scheduler.watch = None
    # each request's clock begins when it was submitted, and all were at once: times are the scheduler's own
    start = sum(step.seconds for step in steps[:first])
    gaps = [
        [b - a for stream in short for a, b in pairwise(stream.completion.times) if (b > start) == late]
        for late in (False, True)
    ]
    chunked = [step for step in steps[first:last] if step.prefilled]
    return {
        "budget": engine.scheduler.budget,
        "running": running,
        "prompt": long,
        "prefill_s": end - begin,
        "alone_ms": 1e3 * statistics.median(gaps[0]),
        "during_ms": 1e3 * statistics.median(gaps[1]),
        "longest_wait_ms": 1e3 * max(gaps[1]),
        "longest_step_ms": 1e3 * max(step.seconds for step in chunked),
        "growth": statistics.median(gaps[1]) / statistics.median(gaps[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--batches", default="1,2,4,8", help="numbers between commas")
    parser.add_argument("--budgets", default="", help="prefill budgets to compare; empty: the default alone")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="decoded by each request")
    parser.add_argument("--length", type=int, default=64, help="tokens of a short prompt")
    parser.add_argument("--long", type=int, default=4000, help="tokens of the prompt that joins; 0: none")
    parser.add_argument("--running", type=int, default=4, help="requests that run meanwhile")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write a JSON report")
    options = parser.parse_args()
    batches = [int(word) for word in options.batches.split(",")]
    load = [os.getloadavg()[0]]
    room = max(2200, options.long + 64)
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
    with Engine.load(
        options.pair,
        device="cpu",
        threads=options.threads,
        max_context=room,
        max_batch=max(*batches, 8),
        draft_tokens=0,
    ) as engine:
        report["env"], report["settings"] = engine.env(), engine.settings()
        taken = gains(engine, batches, options.repeat, options.tokens, options.length)
        base = statistics.median(taken[batches[0]])
        for batch, rates in taken.items():
            middle = statistics.median(rates)
            gain = f"{middle / base:.2f} x batch {batches[0]}"
            print(f"batch {batch:3}: {middle:7.1f} tokens/s (best {max(rates):.1f}), {gain}")
        report["tokens_per_s"] = taken
        report["waits"] = []
        default = engine.scheduler.budget
        for budget in [int(word) for word in options.budgets.split(",") if word] or [default] if options.long else []:
            engine.scheduler.budget = budget
            found = waits(engine, options.running, options.long)
            report["waits"].append(found)
            print(", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()))
    load.append(os.getloadavg()[0])
    report["load"] = load
    print(f"load {load[0]:.1f} to {load[1]:.1f}")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
