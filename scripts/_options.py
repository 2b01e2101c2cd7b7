"""What the command lines of the scripts share: errors that are raised, and numbers with bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from foldspec.errors import UsageError

__all__ = ["Parser", "real", "whole"]

MOST = 1 << 20  # of anything that is counted: no sensible value is beyond, and memory and patience end before


class Parser(argparse.ArgumentParser):
    """Raises :class:`UsageError` in place of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, do=f"see {self.prog} --help")


def whole(low: int, high: int = MOST) -> Callable[[str], int]:
    """A reader of whole numbers in ``low .. high``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number in {low} .. {high}, not {text:.30}")
        return value

    return read


def real(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """A reader of numbers in ``low .. high``; ``above``: ``low`` itself is not one of them."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):
            raise argparse.ArgumentTypeError(
                f"must be a number {'above' if above else 'from'} {low:g} to {high:g}, not {text:.30}"
            )
        return value

    return read
