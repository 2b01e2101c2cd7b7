"""The part of scripts/demo that runs inside the environment: foldspec as a library user sees it.

One document, one question, one prefill; then the same answer decoded plainly, with the drafter as it was trained, with
its context cut to a window, and with FOLD.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foldspec import Completion, Engine
    from foldspec.text.tokenizer import Tokenizer

PAIR = "smollm2-135m"
METHODS: dict[str, dict[str, object]] = {  # row of the table -> what tells its engine from the others
    "AR": {"draft_tokens": 0},
    "full": {"context": "full"},
    "window": {"context": "window"},
    "fold": {"context": "fold"},
}

# The default document: chapters of Python's own help on statements. The last one is cut to the passage asked about.
TOPICS = ["pass", "break", "continue", "return", "del", "assert", "while", "for", "if", "global", "nonlocal"]
TOPICS += ["raise", "with", "try"]
LAST_TOPIC, LAST_TOKENS = "import", 250
QUESTION = 'What does the "import" statement do?'


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Ask a small model about a long document: plain decoding, full, window and FOLD side by side. "
        "The first run downloads torch (about 200 MB; a CUDA build about 3 GB), other packages (about 40 MB) and the "
        "model (93 MB), and keeps 270 MB in the user's cache folder.",
    )
    parser.add_argument("--document", type=Path, metavar="FILE", help="text to ask about (default: Python's own help)")
    parser.add_argument("--question", metavar="TEXT", help="what to ask about it")
    parser.add_argument("--tokens", type=int, default=6400, metavar="N", help="longest document (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="longest answer (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.document and not options.document.is_file():
        parser.error(f"--document: {options.document} is not a file")
    if options.tokens < 1 or options.max_tokens < 1:
        parser.error("--tokens and --max-tokens must be at least 1")
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    from foldspec import Engine, FoldspecError

    try:
        run(Engine, options)
    except FoldspecError as error:
        print(f"foldspec: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(engine_class: type[Engine], options: argparse.Namespace) -> None:
    from foldspec import SamplingParams

    say(f"Loading the pair {PAIR}; the first time, the model is downloaded and prepared.")
    engine = engine_class.load(PAIR, progress=progress)
    assert engine.tokenizer is not None
    text = document(engine.tokenizer, options)
    question = options.question or ("What is this text about?" if options.document else QUESTION)
    prompt = [{"role": "user", "content": f"Here is a document.\n\n{text}\n\n{question}"}]

    say("Reading the document, once for all methods (prefill).")
    prefix = engine.prefill(prompt)
    params = SamplingParams(max_tokens=options.max_tokens)

    done: dict[str, Completion] = {}
    for name, settings in METHODS.items():
        say(f"Decoding: {name}.")
        done[name] = engine.using(**settings).generate(prefix, params)
    print(f"\nQuestion: {question}\nAnswer:   {done['fold'].text.strip()}\n")
    print(table(done))


def document(tokenizer: Tokenizer, options: argparse.Namespace) -> str:
    """The text to ask about, cut to ``options.tokens`` tokens."""
    if options.document:
        ids = tokenizer.encode(options.document.read_text(encoding="utf-8", errors="replace"), special=False)
        kept = ids[: options.tokens]
        say(f"Document: {options.document}, {len(kept)} of its {len(ids)} tokens.")
        return tokenizer.decode(kept)
    topics = importlib.import_module("pydoc_data.topics").topics
    first = tokenizer.encode("\n\n".join(topics[name].strip() for name in TOPICS) + "\n\n", special=False)
    last = tokenizer.encode(topics[LAST_TOPIC].strip(), special=False)[:LAST_TOKENS]
    kept = (first[: max(0, options.tokens - len(last))] + last)[-options.tokens :]
    say(f"Document: chapters of Python's own help on statements, {len(kept)} tokens.")
    return tokenizer.decode(kept)


def table(done: dict[str, Completion]) -> str:
    plain = done["AR"]
    lines = ["method      tau   tokens/s   against AR   output"]
    for name, completion in done.items():
        tau, speed, own = completion.tau, speed_of(completion), speed_of(plain)
        ratio = f"{speed / own:.2f} x" if speed and own else "-"
        lines.append(
            f"{name:8} {f'{tau:.2f}' if tau else '-':>6} {f'{speed:.1f}' if speed else '-':>10} {ratio:>12} "
            f"{'as AR' if completion.token_ids == plain.token_ids else 'DIFFERENT':>8}"
        )
    lines += [
        "",
        f"Protocol: plain. One prompt of {len(plain.prompt_ids)} tokens, one prefill for all, one greedy run each,",
        "no warm-up, whatever else this machine does. tau: tokens a round; tokens/s: after the first token.",
    ]
    return "\n".join(lines)


def speed_of(completion: Completion) -> float | None:
    return 1 / completion.tpot if completion.tpot else None


def progress(stage: str, done: int, total: int) -> None:
    """One line that is written over and over; for a terminal only."""
    if sys.stderr.isatty():
        share = f": {done / total:.0%}" if total else ""
        print(f"\r    {stage}{share}\033[K", end="\r", file=sys.stderr, flush=True)


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
