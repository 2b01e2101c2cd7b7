"""The command line: parse, call the Engine, print. Text goes to stdout, everything else to stderr.

Exit codes: 0 fine, 2 usage, 3 checkpoint or pair, 4 resources, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from foldspec import __version__, cli_bench, cli_models, cli_pareto, cli_prompts, cli_results
from foldspec.cli_shared import (
    INTERRUPTED,
    add_dummy,
    add_engine,
    add_pair,
    add_sampling,
    ctrl_c_waits,
    engine_options,
    notices,
    sampling_options,
)
from foldspec.effort import ORDERS
from foldspec.errors import FoldspecError, ResourceError, UsageError
from foldspec.options import (
    AT_ZERO,
    CONTEXT_FIELDS,
    COVERAGES,
    DIVERGENCES,
    DRAFT_NOISES,
    FAR_BOUNDARIES,
    LAYOUTS,
    PREFIX_CACHES,
    RESIDUALS,
    MethodOptions,
    SamplingParams,
)
from foldspec.values import leniency

if TYPE_CHECKING:
    from foldspec.engine import Engine
    from foldspec.records import Completion

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _mend_streams()
    try:
        options = _parser().parse_args(arguments)
        code: int = options.command(options)
        sys.stdout.flush()  # a disk that is full is better noticed here than while Python shuts down
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except FoldspecError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader of our output went away, which is its right
        return 0
    except OSError as error:  # files have their own errors: what is left is our output
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}", ResourceError.exit_code)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "out of memory" not in str(error) and "can't allocate" not in str(error):
            raise
        problem = ResourceError("out of memory", do="lower --max-context or --prefill-chunk, or use --dtype bfloat16")
        return _fail(str(problem), problem.exit_code)
    finally:
        _drop_broken_streams()
    return code


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody reads it
        print(f"foldspec: {' '.join(message.split())}", file=sys.stderr)
    return code


def _mend_streams() -> None:
    """Make the three streams usable whatever the caller did: closed them (``>&-``), or chose a narrow encoding."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (to the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_broken_streams() -> None:
    """Point a stream that takes no more output at nothing: what it still holds would fail once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, do=f"see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="foldspec", description="Speculative decoding over long contexts.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"foldspec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    generate = commands.add_parser("generate", help="generate text with a pair", allow_abbrev=False)
    generate.set_defaults(command=_generate)
    add_pair(generate)
    prompt = generate.add_argument_group("prompt (one of the first four)")
    prompt.add_argument("-p", "--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a text file, or - for stdin")
    prompt.add_argument("--prompt-ids", metavar="IDS", help="1,2,3 or a file of ids; needs no tokenizer")
    prompt.add_argument("--prompts", metavar="FILE", help="JSONL: many requests, answered as they complete")
    prompt.add_argument("--chat", action=argparse.BooleanOptionalAction, help="use the chat template (default: if any)")
    prompt.add_argument("--system", metavar="TEXT", help="system message")
    prompt.add_argument("--thinking", choices=("on", "off"), help="the template's thinking switch")
    ends = generate.add_argument_group("where it ends")
    ends.add_argument("--max-tokens", type=int, default=256, metavar="N")
    ends.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no stop among the first N tokens")
    ends.add_argument("--stop", action="append", default=[], metavar="STR", help="end before this text; repeatable")
    ends.add_argument("--stop-ids", metavar="IDS", help="more ids that end the request")
    ends.add_argument("--ignore-eos", action="store_true", help="go on past the checkpoint's own stop ids")
    add_sampling(generate)
    method = generate.add_argument_group("method")
    method.add_argument(
        "--context",
        metavar="NAME",
        help="default: fold; `foldspec models` lists them",
    )
    method.add_argument("--window", type=int, metavar="N", help="W, in context entries")
    method.add_argument("--alpha", type=float, metavar="X", help="sharpness of the far read, at least 1")
    values = {"coverage": COVERAGES, "far_boundary": FAR_BOUNDARIES, "layout": LAYOUTS}
    keys = ", ".join(f"{key}={'|'.join(values[key])}" if key in values else key for key in CONTEXT_FIELDS)
    method.add_argument("--context-opt", action="append", default=[], metavar="KEY=VALUE", help=keys)
    method.add_argument("--accept", metavar="NAME", help="default: exact; `foldspec models` lists them")
    method.add_argument(
        "--leniency",
        type=leniency,
        metavar="X",
        help="lambda of linear (X/Y/..: one a draft), l of lenience, delta of cactus",
    )
    keys = f"divergence={'|'.join(DIVERGENCES)}, residual={'|'.join(RESIDUALS)}, at_zero={'|'.join(AT_ZERO)}"
    keys += ", epsilon and factor of typical"
    method.add_argument("--accept-opt", action="append", default=[], metavar="KEY=VALUE", help=keys)
    method.add_argument("--draft-tokens", type=int, metavar="N", help="drafts verified a round at most; 0: none")
    method.add_argument("--block-length", type=int, metavar="N", help="of a block diffusion drafter's grid")
    method.add_argument("--prefix-cache", choices=PREFIX_CACHES, help="of Dream: exact, or once a round")
    method.add_argument("--confidence-stop", type=float, metavar="X", help="verify no draft less likely to stand")
    method.add_argument("--draft-temperature", type=float, metavar="X", help="draw drafts; default: 0, argmax")
    method.add_argument("--draft-top-k", type=int, metavar="N", help="of drafts that are drawn")
    method.add_argument("--draft-top-p", type=float, metavar="X", help="of drafts that are drawn")
    method.add_argument("--draft-noise", choices=DRAFT_NOISES, help="shared: the target's, with --accept match")
    method.add_argument("--steps", type=int, metavar="K", help="denoising steps of a diffusion drafter; default: 1")
    method.add_argument(
        "--confidence",
        type=float,
        metavar="X",
        help="reveal all places that are surer; order: dynamic_top1, or dynamic",
    )
    method.add_argument(
        "--entropy-bound", type=float, metavar="X", help="reveal places within so many nats; default order: entropy"
    )
    method.add_argument("--order", metavar="NAME", help=", ".join(ORDERS))
    method.add_argument("--q-mode", metavar="NAME", help="law of a draft: exact (default), reveal_step, point_mass")
    add_engine(generate)
    add_dummy(generate)
    output = generate.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object, last, in place of the text")
    output.add_argument("--trace", action="store_true", help="with --json: every round")
    output.add_argument("--logprobs", type=int, metavar="N", help="with --json: of each token and the N likeliest ids")
    output.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")

    cli_bench.add(commands.add_parser("bench", help="measure methods against plain decoding", allow_abbrev=False))
    cli_pareto.add(
        commands.add_parser("pareto", help="sweep effort and leniency: speed and quality", allow_abbrev=False)
    )
    cli_models.add_commands(commands)
    cli_results.add_commands(commands)
    return parser


def _method(options: argparse.Namespace) -> dict[str, Any]:
    context, rule = (_pairs(getattr(options, f"{name}_opt"), f"--{name}-opt") for name in ("context", "accept"))
    flags = ["context", "window", "alpha", "accept", "leniency", "draft_tokens", "confidence_stop"]
    flags += ["block_length", "prefix_cache"]
    flags += ["draft_temperature", "draft_top_k", "draft_top_p", "draft_noise", "force_accept"]
    flags += ["steps", "confidence", "entropy_bound", "order", "q_mode"]
    method = MethodOptions.from_pairs(context, rule, **{name: getattr(options, name) for name in flags})
    return {name: value for name, value in vars(method).items() if name != "drafter"}  # --drafter belongs to the pair


def _pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in words:
        key, equals, value = text.partition("=")
        if not equals or key in pairs:
            raise UsageError("must be KEY=VALUE, each key once", where=f"{flag} {text}")
        pairs[key] = value
    return pairs


def _generate(options: argparse.Namespace) -> int:
    # everything that can be wrong without a model is said before one is loaded
    for name in ("trace", "logprobs"):
        value = getattr(options, name)
        if value is not None and value is not False and not options.json:
            raise UsageError("needs --json", where=f"--{name}")
    params = SamplingParams(
        max_tokens=options.max_tokens,
        stop_ids=_ids(options.stop_ids, "--stop-ids") if options.stop_ids is not None else (),
        ignore_eos=options.ignore_eos,
        **sampling_options(options),
        stop=tuple(options.stop),
        min_tokens=options.min_tokens,
        logprobs=options.logprobs,
    )
    method = _method(options)
    asked = None if options.prompts is None else _asked(options, params)
    prompt = _prompt(options) if asked is None else ""
    with ctrl_c_waits():
        from foldspec.engine import Engine
        from foldspec.terminal import Terminal, summary

    plan = cli_prompts.show_plan if asked is not None and not options.quiet else None
    with Terminal(quiet=options.quiet, text=not options.json) as terminal:

        def progress(stage: str, done: int, total: int) -> None:
            if asked is None or stage != "prefill":  # of many requests, one prefills or another all the time
                terminal.progress(stage, done, total)

        engine = Engine.load(
            options.pair,
            target=options.target,
            drafter=options.drafter,
            progress=progress,
            planned=plan,
            **method,
            **engine_options(options),
        )
        terminal.made_up = engine.made_up
        if not options.quiet:
            notices(engine.notices)
            if asked is not None and not (engine.lossless or engine.made_up):
                notices([_lossy(engine)])
        if asked is not None:
            terminal.clear()
            return cli_prompts.answer(
                engine,
                asked,
                encode=lambda prompt: _encode(engine, prompt, options),
                report=lambda done: _report(engine, done, trace=options.trace),
                used={"system": options.system, "thinking": options.thinking},
                as_json=options.json,
                quiet=options.quiet,
            )
        ids, chat = _encode(engine, prompt, options)
        generation = engine.stream(ids, params)
        code = 0
        try:
            for _ in generation:
                with ctrl_c_waits():
                    terminal.update(generation.completion)
        except KeyboardInterrupt:
            code = INTERRUPTED
        with ctrl_c_waits():  # who presses twice still gets the results
            if code:
                generation.close()
            terminal.end(generation.completion)
            if not options.quiet:
                seed = "" if generation.completion.seed is None else f", seed {generation.completion.seed}"
                reason = generation.completion.finish_reason
                print(f"{summary(generation.completion, engine.made_up)}, {reason}{seed}", file=sys.stderr)
                if not (engine.lossless or engine.made_up):
                    print(_lossy(engine, generation.completion.outside), file=sys.stderr)
            if options.json:
                report = _report(engine, generation.completion, trace=options.trace)
                used = {"chat": chat, "system": options.system, "thinking": options.thinking}
                used["seed"] = generation.completion.seed
                settings = report["settings"] | vars(params) | used
                print(json.dumps(report | {"settings": settings}), flush=True)
            elif engine.tokenizer is None and not engine.made_up and not options.quiet:
                what = "the target has no tokenizer.json, so there is no text; --json gives ids"
                print(f"foldspec: {what}", file=sys.stderr)
    return code


def _asked(options: argparse.Namespace, params: SamplingParams) -> list[cli_prompts.Asked]:
    if any(x is not None for x in (options.prompt, options.prompt_file, options.prompt_ids)):
        raise UsageError("give exactly one of -p, --prompt-file, --prompt-ids and --prompts")
    return cli_prompts.parse(_read(options.prompts, "--prompts"), params)


def _prompt(options: argparse.Namespace) -> str | tuple[int, ...]:
    given = [name for name in ("prompt", "prompt_file", "prompt_ids") if getattr(options, name) is not None]
    if len(given) != 1:
        raise UsageError("give exactly one of -p, --prompt-file, --prompt-ids and --prompts")
    if options.prompt_ids is not None:
        if options.chat or options.system is not None or options.thinking is not None:
            raise UsageError("ids go in as they are, without a chat template", where="--prompt-ids")
        return _ids(options.prompt_ids, "--prompt-ids")
    if options.prompt is not None:
        return str(options.prompt)
    return _read(options.prompt_file, "--prompt-file")


def _read(path: str, option: str) -> str:
    """The text of a file, or of stdin for ``-``."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8-sig")  # the mark that some editors put first is no part of the text
    except OSError as error:
        raise UsageError(f"cannot read {path:.200} ({error.strerror})", where=option) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text", where=option) from None


def _ids(text: str, option: str) -> tuple[int, ...]:
    """``1,2,3``, or a file of such; spaces and JSON's brackets may stand between the ids too."""
    if not set(text) <= set("0123456789-, []"):
        text = _read(text, option)
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        return tuple(int(word) for word in words)
    except ValueError:
        raise UsageError("must be whole numbers between commas, or a file of them", where=option) from None


def _encode(engine: Engine, prompt: cli_prompts.Prompt, options: argparse.Namespace) -> tuple[tuple[int, ...], bool]:
    """The prompt's ids, and whether they went through the chat template."""
    if isinstance(prompt, tuple):
        return engine.encode(prompt), False
    chat = not isinstance(prompt, str) or (engine.chats if options.chat is None else options.chat)
    if not chat:
        if options.system is not None or options.thinking is not None:
            raise UsageError("belongs to a chat template, which is not in use", where="--system or --thinking")
        return engine.encode(prompt), False
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if options.system is not None and messages[0]["role"] != "system":  # messages may have one of their own
        messages.insert(0, {"role": "system", "content": options.system})
    if options.thinking is None:
        return engine.encode(messages), True
    on, off = (engine.encode(messages, enable_thinking=switch) for switch in (True, False))
    if on == off:
        raise UsageError("this chat template has no thinking switch", where="--thinking", do="leave it out")
    return (on if options.thinking == "on" else off), True


def _lossy(engine: Engine, outside: int | None = None) -> str:
    counted = "" if outside is None else f"; tokens that the target's own law rules out: {outside}"
    return f"lossy ({engine.method.accept}): {engine.law}{counted}"


def _report(engine: Engine, done: Completion, *, trace: bool) -> dict[str, Any]:
    report: dict[str, Any] = {
        "schema": "foldspec.generate/1",
        "prompt_ids": done.prompt_ids,
        "token_ids": done.token_ids,
        "text": done.text,
        "finish_reason": done.finish_reason,
        "stopped_by": done.stopped_by,
        "usage": {"prompt_tokens": len(done.prompt_ids), "completion_tokens": len(done.token_ids)},
        "tau": done.tau,
        "by_position": [{"accepted": stood, "drafted": drafted} for stood, drafted in done.by_position],
        "tpot_ms": None if done.tpot is None else done.tpot * 1e3,
        "ttft_ms": None if done.ttft is None else done.ttft * 1e3,
        "lossless": engine.lossless,
        "law": engine.law,
        "outside": done.outside,
        "made_up": engine.made_up,
        "settings": engine.settings(),
        "env": engine.env(),
    }
    if done.logprobs is not None:  # "raw": of the target's logits, before temperature, filters, penalties and bias
        report["logprobs"] = {"of": "raw", "tokens": [vars(each) for each in done.logprobs]}
    if trace:
        report["rounds"] = [vars(r) for r in done.rounds]
        report["times_ms"] = [1e3 * seconds for seconds in done.times]
    return report


if __name__ == "__main__":
    sys.exit(main())
