"""Whether a target uses far context, so that a drafter's far memory can help at all: three checks before training one.

    python scripts/check_target_context.py [PAIR] [--tasks docs,code,kv] [--lengths 512,2048,8064] [--items N]
        [--out FILE]

1. copying: a span of natural text comes again about 1,700 tokens later; the share of the second copy that the argmax
   has right, fed the true text. Holds above 0.8. (The first copy's share stands beside it.)
2. far context: loss of 128 tokens with everything before them, less than with the last 512 tokens only. Holds by more
   than 0.1 nats. (The first of the 128 sees 512 tokens then, the last 639.)
3. loops: distinct tokens among 64 greedy ones (or fewer, where the target stops). Holds above 0.5.

Besides, how often a task's known answers (kv) are in the output. Plain decoding throughout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foldspec import Engine
from foldspec.cache.rows import Rows
from foldspec.errors import FoldspecError
from foldspec.models.base import ForwardPlan
from foldspec.tasks import make_task
from foldspec.tasks.base import Task

COPY, SPAN, WARM = 2048, 256, 8  # tokens: the text with both copies, a copy, and the start of a copy that is not judged
SCORED, NEAR, AFTER = 128, 512, 40  # tokens: those with a loss, those before them, and those after (the question)
GREEDY, CHUNK = 64, 512  # tokens: generated; prefilled at once
BOUNDS = {"copy": 0.8, "far_gain": 0.1, "distinct": 0.5}


class Reading:
    """A text in the target's cache: what was said of its tokens, and what comes next. To be closed."""

    def __init__(self, engine: Engine) -> None:
        self._resources, self._length = engine._resources, 0
        self._request = self._resources.new_id()
        self._resources.cache.open(self._request)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.cache.close(self._request)

    @torch.inference_mode()
    def feed(self, ids: Sequence[int], last: int = 1) -> torch.Tensor:
        """Append ids; logits of the last few of them, [last, vocabulary]. Their rows are one chunk."""
        resources, logits = self._resources, torch.empty(0)
        whole = len(ids) - last
        for start, stop in [*((i, min(i + CHUNK, whole)) for i in range(0, whole, CHUNK)), (whole, len(ids))]:
            fed = torch.tensor(ids[start:stop], device=resources.device)
            rows = Rows.of([self._request], [self._length], [len(fed)])
            heads = None if start == whole else ()
            logits = resources.found.model(fed, ForwardPlan(rows, head_rows=heads), resources.cache).logits
            self._length += len(fed)
        return logits

    def judge(self, ids: Sequence[int], count: int) -> tuple[float, float]:
        """Append ids; mean loss (nats) and argmax accuracy over the last ``count`` of them."""
        logits = self.feed(ids[:-1], count).float()
        true = torch.tensor(ids[-count:], device=logits.device)
        self.feed(ids[-1:])
        loss = torch.nn.functional.cross_entropy(logits, true)
        return loss.item(), (logits.argmax(-1) == true).float().mean().item()

    def continued(self, ids: Sequence[int], count: int) -> list[int]:
        """Append ids; at most ``count`` greedy tokens after them, a stop included."""
        logits, found = self.feed(ids), list[int]()
        while True:
            found.append(int(logits[-1].argmax()))
            if len(found) == count or found[-1] in self._resources.found.stop_ids:
                return found
            logits = self.feed(found[-1:])


def copying(engine: Engine, text: Sequence[int]) -> dict[str, float]:
    """Check 1 on a text of COPY tokens or more."""
    body = list(text[: COPY - SPAN])
    first = len(body) // 16  # beyond the start, where BOS or the head of a chat is
    span = body[first : first + SPAN]
    with Reading(engine) as reading:
        _, once = reading.judge(body[: first + SPAN], SPAN - WARM)
        _, again = reading.judge([*body[first + SPAN :], *span], SPAN - WARM)
    return {"copy": again, "first_time": once}


def examine(engine: Engine, task: Task, length: int, items: int, seed: int) -> list[dict[str, Any]]:
    """All checks on some items of a task at one length."""
    rows = []
    for item in task.items(engine.encode, length, items, seed):
        row: dict[str, Any] = {"task": task.name, "length": length, "id": item.id, "tokens": len(item.prompt)}
        text, rest = item.prompt[:-AFTER], item.prompt[-AFTER:]
        with Reading(engine) as reading:
            if item.answer is None and len(text) > NEAR + SCORED:
                loss, _ = reading.judge(text, SCORED)
                with Reading(engine) as near:
                    near_loss, _ = near.judge(text[-NEAR - SCORED :], SCORED)
                row |= {"loss": loss, "near_loss": near_loss, "far_gain": near_loss - loss}
            else:
                reading.feed(text)
            new = reading.continued(rest, GREEDY)
        row |= {"new": len(new), "distinct": len(set(new)) / len(new)}
        if item.answer is None and len(item.prompt) == COPY:
            row |= copying(engine, item.prompt)
        output = engine.tokenizer.decode(new) if engine.tokenizer else ""
        if item.answer is not None:
            row["right"] = float(item.answer in output)
        rows.append(row | {"output": output})
    return rows


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean of each figure, by task and length."""
    cells: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cells[row["task"], row["length"]].append(row)
    figures = ("copy", "first_time", "loss", "near_loss", "far_gain", "distinct", "new", "right")
    return [
        {"task": task, "length": length, "items": len(cell)}
        | {key: sum(row[key] for row in cell) / len(cell) for key in figures if key in cell[0]}
        for (task, length), cell in cells.items()
    ]


def report(cell: dict[str, Any]) -> str:
    """A line for people."""
    parts = []
    for key, value in cell.items():
        if isinstance(value, float):
            verdict = "" if key not in BOUNDS else " holds" if value > BOUNDS[key] else " FAILS"
            parts.append(f"{key} {value:.2f}{verdict}")
    return f"{cell['task']:5} {cell['length']:6} tokens, {cell['items']} items: {', '.join(parts)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", default="smollm2-135m", help="the pair whose target is looked at")
    parser.add_argument("--target", help="a folder or hub id instead")
    parser.add_argument("--tasks", default="docs,code,kv")
    parser.add_argument("--lengths", default="512,2048,8064", help="tokens; the first check needs 2048 among them")
    parser.add_argument("--items", type=int, default=8, help="requests of each task and length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="write a JSON report")
    options = parser.parse_args()
    started = time.time()
    try:
        tasks = [make_task(name) for name in options.tasks.split(",")]
        how = {} if options.threads is None else {"threads": options.threads}
        names = {"target": options.target, "drafter": "none"} if options.target else {"pair": options.pair}
        engine = Engine.load(**names, draft_tokens=0, **how)
        rows = []
        for length in map(int, options.lengths.split(",")):
            for task in tasks:
                found = examine(engine, task, length, options.items, options.seed)
                rows += found
                print(f"{time.time() - started:5.0f} s  {report(means(found)[0])}", flush=True)
    except FoldspecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.out:
        written = {
            "settings": engine.settings(),
            "env": engine.env(),
            "datasets": {task.name: task.dataset for task in tasks},
            "seed": options.seed,
            "bounds": BOUNDS,
            "means": means(rows),
            "rows": rows,
        }
        options.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
