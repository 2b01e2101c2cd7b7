"""What the commands share: options of the pair, of sampling and of the engine, notices, and how Ctrl-C is held back."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from foldspec.errors import UsageError
from foldspec.options import DTYPES, GRAPHS, LOAD_FORMATS, WEIGHTS
from foldspec.values import token_count

__all__ = [
    "INTERRUPTED",
    "add_dummy",
    "add_engine",
    "add_pair",
    "add_sampling",
    "ctrl_c_waits",
    "engine_options",
    "notices",
    "sampling_options",
]

INTERRUPTED = 130  # exit code


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Hold Ctrl-C back while torch is imported, where it may get lost, and while output is written, which may else be
    torn or come twice. A second press does not wait."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


def add_pair(parser: argparse.ArgumentParser) -> None:
    pair = parser.add_argument_group("pair")
    pair.add_argument("pair", nargs="?", metavar="PAIR", help="a name of `foldspec models`")
    pair.add_argument("--target", metavar="T", help="a folder, a hub id, or an embedded one's name")
    pair.add_argument(
        "--drafter",
        metavar="D",
        help="the same; lookup, repeat or unigram, which have no weights; none: plain decoding",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling (default: greedy)")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: greedy")
    sampling.add_argument("--top-k", type=int, default=0, metavar="N", help="the N likeliest ids; 0: all")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="X", help="the fewest ids of this mass")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="X", help="ids of this share of the likeliest")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="of prompt and output")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="of output")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="of output, each time")
    sampling.add_argument("--logit-bias", action="append", default=[], metavar="ID=X", help="repeatable")
    sampling.add_argument("--seed", type=int, metavar="N", help="default: a fresh one, which --json tells")


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that :func:`add_sampling` reads."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    biases: dict[int, float] = {}
    for text in options.logit_bias:
        token, _, bias = text.partition("=")
        try:
            if int(token) in biases:
                raise UsageError("is given twice", where=f"--logit-bias {token}")
            biases[int(token)] = float(bias)
        except ValueError:
            raise UsageError("must be ID=X, two numbers", where=f"--logit-bias {text}") from None
    return {name: getattr(options, name) for name in names} | {"logit_bias": biases, "seed": options.seed}


def add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N")
    engine.add_argument("--dtype", default="auto", choices=DTYPES)
    engine.add_argument("--weights", default="auto", choices=WEIGHTS, help="how weights are held in memory")
    engine.add_argument("--threads", type=int, metavar="N")
    engine.add_argument("--kernels", default="auto", metavar="NAME", help="force one implementation")
    engine.add_argument(
        "--graphs", default="auto", choices=GRAPHS, help="record rounds in CUDA graphs; on: run them so on a CPU, too"
    )
    engine.add_argument(
        "--max-context", type=token_count, metavar="N", help="tokens of prompt and output at most, as 8192 or 8k"
    )
    engine.add_argument("--prefill-chunk", type=int, metavar="N", help="prompt tokens a forward")
    engine.add_argument("--prefill-budget", type=int, metavar="N", help="and while other requests decode")
    engine.add_argument("--max-batch", type=int, default=8, metavar="N", help="requests that run at once")
    engine.add_argument(
        "--cache-tokens", type=token_count, metavar="N", help="tokens that the caches hold, of all requests"
    )
    engine.add_argument("--page-size", type=int, default=256, metavar="N", help="cache entries a page")
    engine.add_argument("--offline", action="store_true", help="open no socket")


def add_dummy(parser: argparse.ArgumentParser) -> None:
    dummy = parser.add_argument_group("for timing without weights (outputs mean nothing)")
    dummy.add_argument(
        "--load-format",
        default="auto",
        choices=LOAD_FORMATS,
        help="dummy: random weights of the true shapes, nothing downloaded; contexts are made up, not prefilled",
    )
    dummy.add_argument("--dummy-layers", type=int, metavar="N", help="cut dummies to their last N layers")
    dummy.add_argument(
        "--force-accept",
        metavar="SPEC",
        help="drafts that stand in a round: 3, tau=3.4, probabilities as 0.9,0.8,0.5, or paper",
    )


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    names = ["device", "dtype", "weights", "threads", "kernels", "max_context", "prefill_chunk", "page_size", "offline"]
    names += ["graphs", "prefill_budget", "max_batch", "cache_tokens", "load_format", "dummy_layers"]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def notices(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"foldspec: {' '.join(line.split())}", file=sys.stderr)
