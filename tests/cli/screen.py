"""A pseudo-terminal to run a command on, and what a person would see on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import time
from collections.abc import Callable

WIDTH = 80
_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Terminal:
    """``slave`` is the end that a process takes as its stdout or stderr; ``attach`` makes it its controlling terminal,
    so that a written ``\\x03`` is Ctrl-C."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
        self.seen = b""

    def attach(self) -> None:
        """To be called in the child, between fork and exec."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

    def read(self) -> bool:
        """Read some more; whether there was anything left to come. The parent must have closed ``slave``."""
        try:
            new = os.read(self.master, 65536)
        except OSError:  # Linux: the last process that had it open is gone
            return False
        self.seen += new
        return bool(new)

    def wait_for(self, seen: Callable[[bytes], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not seen(self.seen):
            assert time.monotonic() < end and self.read(), self.seen[-2000:]

    def close_slave(self) -> None:
        os.close(self.slave)

    def rest(self) -> str:
        while self.read():
            pass
        os.close(self.master)
        return self.seen.decode("utf-8", "replace")


def shown(output: str) -> list[str]:
    """The lines that stand on a screen of WIDTH columns after this output, as far as foldspec and rich use one."""
    rows: list[list[str]] = [[]]
    y = x = at = 0
    while at < len(output):
        sequence = _SEQUENCE.match(output, at)
        if sequence:
            count, kind = sequence.group(1), sequence.group(2)
            at = sequence.end()
            if kind == "A":
                y -= int(count or 1)
                assert y >= 0, "moved above the screen"
            elif kind == "K" and count == "2":
                rows[y] = []
            else:
                assert kind in "mhl", f"unknown sequence {sequence.group()!r}"
            continue
        character = output[at]
        at += 1
        if character == "\r":
            x = 0
            continue
        if character == "\n" or x == WIDTH:
            y += 1
            x = x if character == "\n" else 0
            if y == len(rows):
                rows.append([])
            if character == "\n":
                continue
        row = rows[y]
        row.extend(" " * (x + 1 - len(row)))
        row[x] = character
        x += 1
    return ["".join(row) for row in rows]
