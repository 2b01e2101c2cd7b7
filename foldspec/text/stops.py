"""Stop strings in text that grows: where the first one ends, and what must wait because it may become one.

Read one character at a time, the text ends at the first character that completes a stop string; if it completes
several, the longest counts, so that nothing of any is left. How the text came in pieces has no say in it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Looks for ``strings`` in the text of one request. ``found`` is the one that ended it."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._held = ""  # the end of the text, which a stop string may begin with
        self._length = 0  # characters of all the text, the held ones included
        self._floor = 0  # a stop string that ends up to here does not count
        self.found: str | None = None

    def __bool__(self) -> bool:
        return bool(self.strings)

    def push(self, text: str, rest: str = "", *, counts: bool = True) -> str:
        """Add text that is settled; what of it (and of what was held) no stop string can begin with any more.

        ``rest`` is what the text would go on with if it ended here: looked at, but not added. Where a stop string is
        ``found``, the answer is all that stands before it, and the text has ended. Not ``counts``: a stop string
        that is complete by now never ends the text.
        """
        begin = self._length - len(self._held)
        text = self._held + text
        self._length = begin + len(text)
        if counts:
            start = self._search(text + rest, self._floor - begin)
            if start is not None:
                self._held = ""
                return (text + rest)[:start]
        else:
            self._floor = self._length + len(rest)
        free = len(text) - self._open(text)
        self._held = text[free:]
        return text[:free]

    def finish(self, rest: str) -> str:
        """What was held, and the rest: the text ends for another reason. Nothing may be pushed afterwards."""
        text, self._held = self._held + rest, ""
        return "" if self.found is not None else text

    def _search(self, text: str, floor: int) -> int | None:
        """Where the stop string begins that is the first to end beyond ``floor``; None without one."""
        best: tuple[int, int, str] | None = None
        for string in self.strings:
            start = text.find(string, max(0, floor - len(string) + 1))
            if start >= 0 and (best is None or (start + len(string), start) < best[:2]):
                best = start + len(string), start, string
        if best is None:
            return None
        self.found = best[2]
        return best[1]

    def _open(self, text: str) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        longest = 0
        for string in self.strings:
            for count in range(min(len(string) - 1, len(text)), longest, -1):
                if text.endswith(string[:count]):
                    longest = count
                    break
        return longest
