"""The command ``foldspec lm-eval``: lm-eval's own command line, with foldspec as its model."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

from foldspec.cli_shared import ctrl_c_waits
from foldspec.errors import UsageError

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Add it to the subparsers of the command line. All that follows is lm-eval's to parse, ``--help`` too, so that no
    character begins an option here."""
    parser = commands.add_parser(
        "lm-eval", help="score a pair on any task of lm-eval", add_help=False, prefix_chars="\0", allow_abbrev=False
    )
    parser.set_defaults(command=_lm_eval)
    parser.add_argument("rest", nargs=argparse.REMAINDER)


def _lm_eval(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("is not installed", where="lm-eval", do="pip install 'foldspec[eval]'")
    try:
        with ctrl_c_waits():
            from lm_eval.__main__ import cli_evaluate

            import foldspec.lm_eval  # noqa: F401  (registers the model)
    except ImportError as error:  # something that it needs
        what = f"is installed, but cannot be imported ({error!s:.200})"
        raise UsageError(what, where="lm-eval", do="pip install 'foldspec[eval]'") from None

    before = sys.argv
    sys.argv = ["lm-eval", "run", "--model", "foldspec", *options.rest]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
