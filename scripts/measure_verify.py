"""What a pass over 8 rows costs beside a pass over one: the price of verifying 7 drafts, on this CPU.

    python scripts/measure_verify.py [--threads 1] [--repeat 15] [--out FILE.json]

The embedded target on torch, and compiled with weights held in fp32 and in bf16; one arm stands twice, so that the
width of "no difference" shows. Arms are interleaved with rotated order, each from the same stored context; two rounds
of warm-up are dropped. Milliseconds, minimum and median, by the wall clock and by this thread's CPU time (which with
more than one thread is only a part of the work).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from foldspec.cache.paged import PagedCache
from foldspec.cache.rows import Rows
from foldspec.checkpoints.embedded import embedded_path
from foldspec.checkpoints.weights import load_into, read_headers
from foldspec.engine import cache_folder
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.models.base import ForwardPlan, LanguageModel, model_class
from foldspec.models.config import ModelConfig
from foldspec.models.layers import join, layouts, matrices
from foldspec.report import environment

LENGTHS = (512, 8064)
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
ARMS = {  # name -> (compiled, dtype in which weights are held)
    "torch fp32": (False, torch.float32),
    "compiled fp32": (True, torch.float32),
    "compiled fp32 again": (True, torch.float32),
    "compiled bf16 weights": (True, torch.bfloat16),
}


def prepare(folder: Path, compiled: bool, held: torch.dtype) -> tuple[LanguageModel, PagedCache]:
    config, weights = ModelConfig.read(folder), read_headers(folder)
    kernels = Kernels("auto", Library(cache_folder() / "kernels") if compiled else None)
    model = model_class(config).from_config(config, tuple(weights.entries), kernels)
    join(model, held, torch.float32, "cpu")
    load_into(
        model,
        weights,
        dtype=torch.float32,
        device="cpu",
        held=held,
        matrices=matrices(model),
        layouts=layouts(model, held, torch.float32, "cpu", kernels),
    )
    pages = sum(-(-(length + 64) // 256) for length in LENGTHS)
    cache = PagedCache(model.cache_spec(torch.float32), pages=pages, page_size=256, device="cpu")
    for request, length in enumerate(LENGTHS):
        cache.open(request)
        for start in range(0, length, 512):
            run(model, cache, request, start, min(512, length - start))
    return model, cache


def run(model: LanguageModel, cache: PagedCache, request: int, start: int, count: int) -> None:
    ids = torch.arange(start, start + count) * 7919 % model.vocabulary
    model(ids, ForwardPlan(Rows.of([request], [start], [count])), cache)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write a JSON report")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = embedded_path("smollm2-135m-instruct", cache_dir=cache_folder(), offline=False)
    load = [os.getloadavg()[0]]
    arms = {name: prepare(folder, *what) for name, what in ARMS.items()}
    taken: dict[tuple[str, int, str, int], list[float]] = {}
    names = list(arms)
    for repeat in range(options.repeat + 2):
        turned = names[repeat % len(names) :] + names[: repeat % len(names)]
        for request, length in enumerate(LENGTHS):
            for name in turned:
                for rows in (1, 8):
                    model, cache = arms[name]
                    cache.truncate(request, length)
                    began = {clock: read() for clock, read in CLOCKS.items()}
                    run(model, cache, request, length, rows)
                    took = {clock: (read() - began[clock]) * 1e3 for clock, read in CLOCKS.items()}
                    if repeat >= 2:
                        for clock, ms in took.items():
                            taken.setdefault((clock, length, name, rows), []).append(ms)
    load.append(os.getloadavg()[0])
    table = []
    for length in LENGTHS:
        for name in names:
            row: dict[str, object] = {"entries": length, "arm": name}
            for clock in CLOCKS:
                one, eight = ((min(t), statistics.median(t)) for t in (taken[clock, length, name, n] for n in (1, 8)))
                ratio = [e / o for o, e in zip(one, eight, strict=True)]
                row |= {f"one row {clock} ms": one, f"8 rows {clock} ms": eight, f"{clock}: 8 rows / one row": ratio}
                print(
                    f"{length:5} entries  {name:22} {clock:4}  one row {one[0]:6.1f} / {one[1]:6.1f}   "
                    f"8 rows {eight[0]:6.1f} / {eight[1]:6.1f}   ratio {ratio[0]:.2f} / {ratio[1]:.2f}"
                )
            table.append(row)
    print(f"minimum / median of {options.repeat}, ms; {options.threads} threads; load {load[0]:.1f} to {load[1]:.1f}")
    if options.out:
        env = environment(torch.device("cpu"), arms["compiled fp32"][0].kernels)  # type: ignore[arg-type]
        report = {"env": env, "threads": options.threads, "repeat": options.repeat, "load": load, "rows": table}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
