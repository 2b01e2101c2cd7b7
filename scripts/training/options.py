"""The command line of ``scripts/train_drafter.py``: every value that can be checked without a model is checked here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from _options import Parser, real, whole

from foldspec.errors import UsageError
from foldspec.options import DTYPES
from training.prompts import Source

__all__ = ["fill", "parser"]

# what each kind of drafter takes, and its default
DEFAULTS: dict[str, dict[str, Any]] = {
    "dflash": {
        "layout": "deepspec",
        "layers": 2,
        "block": 7,
        "begin_as": None,
        "draft_vocab": 16_384,
        "markov_rank": 0,
        "batch": 4,
        "anchors": 48,
        "first_part": 0.25,
        "first_anchors": 224,
        "decay": 4.0,
        "rate": 1e-3,
    },
    "masked": {
        "layers": 4,
        "block": 4,
        "begin_as": None,
        "batch": 2,
        "labels": 384,
        "decay": 3.0,
        "rate": 1e-3,
    },
}


def source(text: str) -> Source:
    kind, _, rest = text.partition(":")
    name, _, folder = rest.partition("=")
    if kind not in ("code", "prose") or not name or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not code:NAME=FOLDER or prose:NAME=FOLDER with a folder that is there"
        )
    return Source(name, Path(folder), kind)


def share(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and len(text) < 12 and int(first) < int(second)):
        raise argparse.ArgumentTypeError(f"must be I/N with I in 0 .. N - 1, not {text:.30}")
    return int(first), int(second)


def layers(text: str) -> tuple[int, ...]:
    """Which layers there are is not known yet."""
    return tuple(map(whole(0), text.split(",")))


def parser(about: str) -> argparse.ArgumentParser:
    """Errors are raised as :class:`UsageError`."""
    top = Parser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser)
    common = Parser(add_help=False)
    common.add_argument("pair", nargs="?", help="a pair of checkpoints.yaml; its target counts")
    common.add_argument("--target", help="a folder or hub id instead")
    common.add_argument("--data", type=Path, required=True, metavar="DIR", help="where the texts and taps are kept")
    common.add_argument("--seed", type=whole(0, (1 << 63) - 1), default=0)
    common.add_argument("--device", default="auto")
    common.add_argument("--dtype", default="auto", choices=DTYPES, help="of the target's arithmetic")
    common.add_argument("--threads", type=int, default=1)

    data = commands.add_parser("data", parents=[common], help="let the target write", allow_abbrev=False)
    data.add_argument(
        "--source",
        type=source,
        action="append",
        default=[],
        metavar="KIND:NAME=FOLDER",
        help="code or prose to draw prompts from, beside Python's own library",
    )
    data.add_argument(
        "--sequences",
        type=whole(1, 1 << 30),
        default=4096,
        help="texts in all, rounded up to shards of 384; some 200 tokens each",
    )
    data.add_argument(
        "--worker",
        type=share,
        default=(0, 1),
        metavar="I/N",
        help="write each N-th shard from the I-th on: for N processes at once",
    )
    data.add_argument("--length", type=whole(64), default=512, help="tokens of a sequence at most, prompt and text")
    data.add_argument("--taps", type=layers, help="tapped layers, comma-separated")
    data.add_argument("--batch", type=whole(1, 4096), default=128, help="sequences at once")
    data.add_argument("--exact-products", action="store_true", help="fp32 products on a CPU; slower")

    learn = commands.add_parser("train", parents=[common], help="learn from the texts", allow_abbrev=False)
    learn.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoints, the curve, the drafter")
    learn.add_argument("--kind", choices=[*DEFAULTS], default="dflash")
    learn.add_argument("--mask-id", type=whole(0, 1 << 26), required=True, help="an id of the target no text holds")
    learn.add_argument("--steps", type=whole(1, 1 << 30), default=4000)
    own = learn.add_argument_group("of the kind", "Defaults differ; those of one kind alone say so.")
    own.add_argument("--layers", type=whole(1), help="2; 4 for masked")
    own.add_argument("--block", type=whole(1, 64), help="rows of a block, 7; masked: places of one, 4")
    own.add_argument(
        "--begin-as",
        type=layers,
        help="layers of the target to begin as; default: its last; masked: its first and its last",
    )
    own.add_argument("--batch", type=whole(1, 4096), help="sequences a step and worker: 4; 2 for masked")
    own.add_argument(
        "--decay", type=real(0, 1e6, above=True), help="gamma of the weights of later rows: 4; 3 for masked"
    )
    own.add_argument("--rate", type=real(0, 1, above=True), help="1e-3")
    own.add_argument("--layout", choices=["deepspec", "zlab"], help="dflash: the published format; deepspec")
    own.add_argument("--draft-vocab", type=whole(0, 1 << 26), help="dflash: ids that can be drafted, 0 for all; 16384")
    own.add_argument("--markov-rank", type=whole(0, 4096), help="dflash: of a deepspec drafter; 0")
    own.add_argument("--anchors", type=whole(1), help="dflash: blocks a sequence; 48")
    own.add_argument(
        "--first-part", type=real(0, 1), help="dflash: share of steps that train the first row alone; 0.25"
    )
    own.add_argument("--first-anchors", type=whole(1), help="dflash: blocks a sequence in them; 224")
    own.add_argument("--labels", type=whole(1), help="masked: places predicted a step and worker; 384")
    learn.add_argument("--full-precision", action="store_true", help="fp32 products")
    learn.add_argument("--save-every", type=whole(1, 1 << 30), default=200)
    learn.add_argument("--stop-after", type=whole(1, 1 << 30), help="end at this step, as if stopped")
    return top


def fill(options: argparse.Namespace) -> argparse.Namespace:
    """The options of ``train`` with the defaults of their kind. Raises :class:`UsageError` for one that it lacks."""
    own = DEFAULTS[options.kind]
    for name in sorted({name for defaults in DEFAULTS.values() for name in defaults}):
        given = getattr(options, name)
        if given is None:
            setattr(options, name, own.get(name))
        elif name not in own:
            raise UsageError(f"is nothing that {options.kind} has", where="--" + name.replace("_", "-"))
    return options
