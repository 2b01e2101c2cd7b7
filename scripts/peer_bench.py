"""Plain decoding beside other engines: the same target, prompt and thread in transformers' generate and llama.cpp.

    pip install 'foldspec[peer]'
    python scripts/peer_bench.py [--lengths 512] [--repeat 5] [--tokens 32] [--out FILE.json]

Every arm runs in a process of its own, in turn and with rotated order, ``--repeat`` times. A process prefills once and
decodes three stretches of ``--tokens`` tokens; the time per output token of each is (last - first) / tokens, in
milliseconds, by the wall clock and by the process's CPU time. Nothing ends early: end-of-text ids are not generated, or
not minded. "again" is foldspec a second time: the width of "no difference". The llama.cpp files are written once into
the cache folder; an engine that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _peers import ARMS, NEEDS, gguf_files

from foldspec.checkpoints.embedded import embedded_path
from foldspec.engine import cache_folder

STRETCHES = 3
BASE = "foldspec fp32"
TARGET = "smollm2-135m-instruct"


def prompt(folder: Path, length: int) -> list[int]:
    """Text of this repository, cut to ``length`` tokens."""
    from foldspec.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    root = Path(__file__).parents[1]
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    return list(tokenizer.encode_prompt(text * (1 + length // 4000)))[:length]


def child(folder: Path, arm: str, length: int, tokens: int) -> None:
    stamps, text = ARMS[arm](folder, prompt(folder, length), STRETCHES * tokens + 1)
    assert len(stamps) == STRETCHES * tokens + 1, f"{len(stamps)} tokens came out"
    cuts = stamps[::tokens]
    taken = [[(b[i] - a[i]) / tokens * 1e3 for i in (0, 1)] for a, b in itertools.pairwise(cuts)]
    print("RESULT " + json.dumps({"ms": taken, "text": text}))


def missing(arm: str) -> str | None:
    """The package that an arm needs and does not find."""
    needs = NEEDS.get(arm.replace(",", " ").split()[0], ())
    return next((name for name in needs if find_spec(name) is None), None)


def run(arm: str, length: int, tokens: int) -> dict[str, Any]:
    """One child process. Raises :class:`RuntimeError` with what it said last."""
    command = [sys.executable, __file__, "--child", arm, "--lengths", str(length), "--tokens", str(tokens)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{arm}: " + (done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def row(length: int, arm: str, samples: dict[str, list[list[float]]], texts: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"entries": length, "arm": arm, "samples": len(samples[arm])}
    for i, clock in enumerate(("wall", "cpu")):
        own, base = [s[i] for s in samples[arm]], [s[i] for s in samples[BASE]]
        found[f"{clock} ms"] = min(own), statistics.median(own)
        found[f"{clock}: {BASE} / this"] = min(base) / min(own), statistics.median(base) / statistics.median(own)
    pairs = zip(texts[arm], texts[BASE], strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    found["text agrees"] = True if texts[arm] == texts[BASE] else f"for {same} characters"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="write a JSON report")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = embedded_path(TARGET, cache_dir=cache_folder(), offline=False)
    if options.child:
        child(folder, options.child, options.lengths[0], options.tokens)
        return
    arms = []
    for arm in ARMS:
        absent = missing(arm)
        if absent:
            print(f"left out: {arm} ({absent} is not installed; pip install 'foldspec[peer]')")
        else:
            arms.append(arm)
    if any(arm.startswith("llama.cpp") for arm in arms):
        gguf_files(folder)  # before the clock runs
    load, table = [os.getloadavg()[0]], []
    for length in options.lengths:
        samples: dict[str, list[list[float]]] = {}
        texts: dict[str, str] = {}
        for repeat in range(options.repeat):
            turn = repeat % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                result = run(arm, length, options.tokens)
                samples.setdefault(arm, []).extend(result["ms"])
                texts[arm] = result["text"]
        for arm in arms:
            table.append(row(length, arm, samples, texts))
            wall, cpu = table[-1]["wall ms"], table[-1]["cpu ms"]
            ratio, of_cpu = table[-1][f"wall: {BASE} / this"], table[-1][f"cpu: {BASE} / this"]
            print(
                f"{length:5} tokens  {arm:28} wall {wall[0]:6.1f} / {wall[1]:6.1f}  cpu {cpu[0]:6.1f} / {cpu[1]:6.1f}"
                f"   {BASE} / this: wall {ratio[0]:.2f} / {ratio[1]:.2f}  cpu {of_cpu[0]:.2f} / {of_cpu[1]:.2f}"
                f"   text agrees: {table[-1]['text agrees']}"
            )
    load.append(os.getloadavg()[0])
    print(
        f"minimum / median of {STRETCHES * options.repeat}, ms a token; 1 thread; load {load[0]:.1f} to {load[1]:.1f}"
    )
    if options.out:
        import torch

        from foldspec.kernels.dispatch import Kernels
        from foldspec.report import environment

        packages = [name for names in NEEDS.values() for name in names if find_spec(name)]
        env = environment(torch.device("cpu"), Kernels()) | {name: version(name) for name in packages}
        env.pop("kernels")
        env["threads"] = 1
        report = {"env": env, "tokens": options.tokens, "load": load, "rows": table}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
