"""Greedy output against plain decoding, id for id: 63 fixed prompts x full, window and fold (alpha 1, 2, 4).

    python scripts/check_equality.py [--tokens 24] [--every N] [--out FILE.json]

fp32 on a CPU with the embedded pair; some 40 minutes on two cores. A difference is excused only where plain decoding's
own top-2 gap is below 1e-4; each is listed, and at most 1 token in 500 may differ. Exit code 1 if that does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from equality import METHODS, Difference, compare, judge, prompts

from foldspec import Engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24, help="new tokens a prompt")
    parser.add_argument("--every", type=int, default=1, help="take each N-th prompt")
    parser.add_argument("--out", type=Path, help="write a JSON report")
    options = parser.parse_args()
    engine = Engine.load("smollm2-135m", device="cpu", dtype="float32")
    started, differences, compared = time.time(), list[Difference](), 0
    rows = []
    for prompt in prompts(engine)[:: options.every]:
        for method, count, tau, difference in compare(engine, prompt, options.tokens):
            compared += count
            rows.append({"prompt": prompt.name, "tokens": len(prompt.ids), **method, "compared": count, "tau": tau})
            if difference is not None:
                differences.append(difference)
        print(
            f"{time.time() - started:6.0f} s  {prompt.name}: {len(prompt.ids)} tokens, {len(differences)} differences"
        )
    holds = judge(differences, compared)
    print(f"{len(rows) // len(METHODS)} prompts x {len(METHODS)} methods, {compared} tokens compared, "
          f"{len(differences)} differ: {'holds' if holds else 'DOES NOT HOLD'}")  # fmt: skip
    if options.out:
        report = {
            "env": engine.env(),
            "new_tokens": options.tokens,
            "compared": compared,
            "differences": [dataclasses.asdict(d) for d in differences],
            "holds": holds,
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
