"""Text that grows with its tokens and is never taken back.

Decoding ids one by one is wrong (characters span tokens, the first token loses its space), decoding all of them at
every commit is slow. A stream decodes its new ids behind the last few old ones, and holds back what a later id could
still change. What that is depends on the decoder:

``token``   nothing: each token has its own text, whatever follows
``bytes``   (ByteLevel) an unfinished character, which decodes to one U+FFFD at the end
``runs``    (ByteFallback) the last run of ``<0xNN>`` tokens: one bad byte turns every character of its run to U+FFFD
``end``     everything: a decoder whose habits are unknown here is decoded once, in ``finish``

A stop string is looked for in the text that the output would have if it ended with this id (what is held back
included, but for bytes that are no character yet), so the id that completes it is the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foldspec.text.stops import StopStrings
from foldspec.text.tokenizer import Tokenizer

__all__ = ["TextStream"]

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f+][0-9A-Fa-f]>")
UNFINISHED = "\ufffd"
# Old ids that new ones are decoded behind. One shields them from what a decoder does to a first token; four hold the
# whole of a character that ends with them, since no character has more than four bytes and no token fewer than one.
CONTEXT = 4


class TextStream:
    """The text of one request up to the first of its ``stop`` strings: ``so_far`` only ever grows.

    The pieces of :meth:`push` and :meth:`finish`, joined, equal ``decode`` of all the ids; where ``stopped_by`` names
    a stop string, they end before it. A push costs as much as its own ids, however long the text is (an id is held back
    at most once), unless it has stop strings to look for in what is held back. Without a tokenizer the text is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._rule = "end" if tokenizer is None else _rule(tokenizer.decoder)
        self._context: list[int] = []  # the last ids whose text is out, but for an unfinished character
        self._held: list[int] = []  # ids not decoded yet
        self._stops = StopStrings(stop)
        self.so_far = ""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def push(self, ids: Sequence[int], stops: bool = True) -> str:
        """Add ids; the text that they settle and that no stop string can begin with (may be empty).

        With stop strings push one id at a time, and none after the text was stopped. Not ``stops``: a stop string that
        is complete with these ids does not count.
        """
        text = self._settle(ids)
        if self._stops:
            text = self._stops.push(text, self._tail(), counts=stops)
        self.so_far += text
        return text

    def finish(self) -> str:
        """The rest of the text; nothing may be pushed afterwards."""
        text = self._stops.finish(self._rest())
        self._context, self._held = [], []
        self.so_far += text
        return text

    def remade(self, ids: Iterable[int], first: int = 0) -> TextStream:
        """The same text made anew from all its ids. The first ``first`` complete no stop string."""
        new = TextStream(self._tokenizer, self._stops.strings)
        for at, token in enumerate(ids):
            new.push((token,), at >= first)
        return new

    def _settle(self, ids: Iterable[int]) -> str:
        if self._tokenizer is None:
            return ""
        new = self._tokenizer.visible(ids)
        cut = self._settled(new)
        if not cut:
            self._held += new
            return ""
        ready, self._held = self._held + new[:cut], new[cut:]
        return self._decode(ready)

    def _rest(self) -> str:
        """What the text would go on with if it ended here."""
        if self._tokenizer is None:
            return ""
        shown = len(self._finished(self._tokenizer.decode(self._context)))
        return self._tokenizer.decode(self._context + self._held)[shown:]

    def _tail(self) -> str:
        """The rest, without bytes at its end that are no character."""
        return self._rest().rstrip(UNFINISHED) if self._held else ""

    def _settled(self, ids: list[int]) -> int:
        """How many of the new ids can be decoded now, together with all that is held."""
        if self._rule in ("token", "bytes"):
            return len(ids)
        if self._rule == "end":
            return 0
        cut = len(ids)
        while cut and self._is_byte(ids[cut - 1]):
            cut -= 1
        return cut

    def _is_byte(self, token_id: int) -> bool:
        assert self._tokenizer is not None
        return BYTE_TOKEN.fullmatch(self._tokenizer.token(token_id) or "") is not None

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        shown = len(self._finished(self._tokenizer.decode(self._context)))
        span = self._context + ids
        self._context = span[-CONTEXT:]
        return self._finished(self._tokenizer.decode(span))[shown:]

    def _finished(self, text: str) -> str:
        return text.removesuffix(UNFINISHED) if self._rule == "bytes" else text


def _rule(decoder: Mapping[str, Any] | None) -> str:
    """What text of this decoder a later token can change (see the module's head)."""
    if decoder is None:
        return "token"
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [part["type"] for part in parts]
    if names == ["ByteLevel"]:
        return "bytes"
    if names in (["Metaspace"], ["WordPiece"]):
        return "token"
    # SentencePiece as Llama 2, Gemma and Mistral spell it; a part with other arguments has other habits
    spaces = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    known = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    if parts and all(part in known for part in parts):
        order = [known.index(part) for part in parts]
        if order == sorted(set(order)):
            return "runs"
    return "end"
