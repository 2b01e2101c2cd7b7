"""What a person sees while the engine works: bars for what takes long, a live line of speed under streamed text.

All of it goes to stderr, and only if that is a terminal; generated text alone goes to stdout.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from foldspec.records import Completion

__all__ = ["Terminal"]

EVERY = 0.1  # seconds between two drawings of the live line
BYTES = ("download", "load")  # stages that count bytes


class _Amount(ProgressColumn):
    """How far a bar is: bytes and their speed, or a count."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._speed, self._count = DownloadColumn(), TransferSpeedColumn(), MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        if task.description in BYTES:
            return Text(" ").join((self._bytes.render(task), self._speed.render(task)))
        return self._count.render(task)


class Terminal:
    def __init__(self, *, quiet: bool, text: bool = True) -> None:
        """``quiet``: draw nothing. ``text``: write the generated text (with ``--json`` it is part of the object)."""
        self._console = Console(stderr=True)
        # rich would also draw into a file, where the environment says FORCE_COLOR
        able = sys.stderr.isatty() and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = able and not quiet
        # text on the same terminal is held back to whole lines, so that the live line can stand under it
        self._same = self._live and sys.stdout.isatty()
        self._text = text
        self.made_up = ""  # what is not real of the run: told on every line
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._line: Live | None = None
        self._held = ""
        self._taken = 0  # characters of the text that were written or are held
        self._drawn = 0.0

    def progress(self, stage: str, done: int, total: int) -> None:
        """A bar for each stage; the callback that the engine takes."""
        if not self._live:
            return
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), _Amount(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._console, transient=True, redirect_stdout=False)
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def update(self, so_far: Completion) -> None:
        """Write what the text has grown by, and draw the live line."""
        self._end_bars()
        self._take(so_far)
        if not self._same:
            self._write(len(self._held))
        if not self._live:
            return
        if self._line is None:
            # while it draws, rich would take over sys.stdout too, and send the generated text to stderr
            self._line = Live(console=self._console, transient=True, auto_refresh=False, redirect_stdout=False)
            self._line.start()
        lines = self._held.rfind("\n") + 1  # characters in whole lines
        if lines:
            self._line.update(Text(""), refresh=True)
            self._write(lines)
        now = time.monotonic()
        if lines or now - self._drawn > EVERY:
            self._drawn = now
            status = Text(summary(so_far, self.made_up), style="dim")
            tail = self._held[-4 * self._console.width :]
            self._line.update(Group(Text(tail), status) if tail else status, refresh=True)

    def end(self, done: Completion) -> None:
        """Write what is left of the text, and end its last line."""
        self._close()
        self._take(done)
        if self._text and done.text and not done.text.endswith("\n"):
            self._held += "\n"
        self._write(len(self._held))

    def _take(self, done: Completion) -> None:
        if self._text:
            self._held += done.text[self._taken :]
            self._taken = len(done.text)

    def _write(self, count: int) -> None:
        """Write so many of the held characters. They are let go first: what failed is not tried again."""
        text, self._held = self._held[:count], self._held[count:]
        sys.stdout.write(text)
        sys.stdout.flush()

    def _end_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars, self._tasks = None, {}

    def _close(self) -> None:
        self._end_bars()
        if self._line is not None:
            self._line.update(Text(""), refresh=True)
            self._line.stop()
            self._line = None

    def clear(self) -> None:
        """Take bars and line away, so that others can write."""
        self._close()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()


def summary(done: Completion, made_up: str = "") -> str:
    """Tokens, tau and speed so far, in one line, after what is ``made_up`` about them."""
    parts = [*filter(None, [made_up]), f"{len(done.token_ids)} tokens"]
    if done.tau is not None:
        parts.append(f"tau {done.tau:.2f}")
    if done.tpot:
        parts.append(f"{1 / done.tpot:.1f} tokens/s")
    if done.ttft is not None:
        parts.append(f"first token after {done.ttft:.2f} s")
    return ", ".join(parts)
