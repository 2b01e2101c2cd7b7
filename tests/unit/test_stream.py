"""Streamed text: its pieces join to the decode of all ids, whatever the blocks and wherever they cut a character."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import MAKERS, RULES, TEXTS, byte_ids, token_id, tokenizer

from foldspec.text.stream import CONTEXT, TextStream, _rule
from foldspec.text.tokenizer import Tokenizer


def stream(tok: Tokenizer | None, ids: list[int], sizes: list[int]) -> list[str]:
    """Push ``ids`` in blocks of ``sizes`` (used round and round) and finish."""
    text, out, at, turn = TextStream(tok), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        out.append(text.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*out, text.finish()]


@pytest.mark.parametrize("name", MAKERS)
def test_rule(name: str) -> None:
    assert _rule(tokenizer(name).decoder) == RULES.get(name, "end")


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_blocks(name: str, data: st.DataObject) -> None:
    """Random ids: broken characters, specials between bytes, ids beyond the vocabulary."""
    tok = tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size + 2), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    pushed = stream(tok, ids, sizes)
    assert "".join(pushed) == tok.decode(ids)


BYTES = st.sampled_from(
    [0x20, 0x41, 0x80, 0xA0, 0xAD, 0xBF, 0xC0, 0xC3, 0xE2, 0x82, 0xAC, 0xED, 0xEF, 0xF0, 0x9F, 0x98, 0xF5, 0xFF]
)


@pytest.mark.parametrize("name", ["byte-level", "llama-2", "gemma"])
@settings(max_examples=300, deadline=None)
@given(
    data=st.lists(BYTES, max_size=24),
    extra=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 400))),
    size=st.integers(1, 6),
)
def test_bytes_that_are_and_are_not_characters(
    name: str, data: list[int], extra: list[tuple[int, int]], size: int
) -> None:
    tok = tokenizer(name)
    ids = byte_ids(tok, bytes(data))
    for at, token in extra:
        ids.insert(at, token)
    assert "".join(stream(tok, ids, [size])) == tok.decode(ids)


@pytest.mark.parametrize("name", ["byte-level", "llama-2", "gemma"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_texts(name: str, text: str, size: int) -> None:
    tok = tokenizer(name)
    for ids in (tok.encode(text, special=False), byte_ids(tok, text.encode())):
        assert "".join(stream(tok, ids, [size])) == tok.decode(ids)
    assert tok.decode(byte_ids(tok, text.encode())).strip() == text.strip()


@pytest.mark.parametrize("name", ["byte-level", "llama-2", "gemma"])
@pytest.mark.parametrize("text", ["👍é", "👩‍👩‍👧", "🇫🇷", "नि क्ष", "日本"])
def test_texts_that_end_inside_a_character(name: str, text: str) -> None:
    """Emoji, joined emoji, Devanagari, each token a byte, ended after every byte: no piece but the last has U+FFFD."""
    tok, data = tokenizer(name), text.encode()
    for end in range(1, len(data) + 1):
        ids = byte_ids(tok, data[:end])
        for size in (1, 2, 5):
            *pieces, last = stream(tok, ids, [size])
            assert "\ufffd" not in "".join(pieces) and "".join(pieces) + last == tok.decode(ids)
            assert ("\ufffd" in last) == (data[:end].decode(errors="ignore").encode() != data[:end])


def test_a_character_appears_whole_and_only_once() -> None:
    tok = tokenizer("byte-level")
    assert stream(tok, byte_ids(tok, "a€b".encode()), [1]) == ["a", "", "", "€", "b", ""]
    assert stream(tok, byte_ids(tok, "👍".encode()), [1]) == ["", "", "", "👍", ""]
    assert stream(tok, byte_ids(tok, "a€".encode()[:-1]), [1]) == ["a", "", "", "\ufffd"], "ends inside a character"


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    tok = tokenizer("llama-2")
    euro, other = byte_ids(tok, "€".encode()), token_id(tok, "é")
    assert stream(tok, [*euro, other], [1]) == ["", "", "", "€é", ""]
    assert stream(tok, [*euro, *byte_ids(tok, b"\xff"), other], [1]) == ["", "", "", "", "\ufffd" * 4 + "é", ""]
    assert stream(tok, euro, [2]) == ["", "", "€"]


def test_the_first_space_is_stripped_once() -> None:
    tok = tokenizer("llama-2")
    space, hello = token_id(tok, "▁"), token_id(tok, "▁hello")
    assert stream(tok, [1, hello, hello], [1]) == ["", "hello", " hello", ""]
    assert stream(tok, [space, space, hello], [1]) == ["", " ", " hello", ""]


def test_special_tokens_give_no_text_even_inside_a_character() -> None:
    tok = tokenizer("byte-level")
    euro = byte_ids(tok, "€".encode())
    assert tok.eos_id is not None
    assert "".join(stream(tok, [euro[0], tok.eos_id, *euro[1:], tok.eos_id], [1])) == "€"


def test_no_tokenizer_no_text() -> None:
    assert stream(None, [1, 2, 3], [2]) == ["", "", ""]


def test_nothing_pushed() -> None:
    for name in MAKERS:
        text = TextStream(tokenizer(name))
        assert [text.push([]), text.finish(), text.finish()] == ["", "", ""]


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tok: Tokenizer) -> None:
        self._tok, self.decoded = tok, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tok, name)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        self.decoded += len(ids)
        return self._tok.decode(ids, skip_special)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", ["mixed", "one byte token for ever"])
def test_cost_does_not_grow_with_the_text(name: str, kind: str) -> None:
    tok = tokenizer(name)
    ids = [random.Random(0).randrange(tok.vocab_size) for _ in range(3000)]
    if kind != "mixed" and name in ("byte-level", "llama-2", "gemma"):
        ids = byte_ids(tok, b"\xe2") * 3000
    counting = Counting(tok)
    text = TextStream(counting)  # type: ignore[arg-type]
    out = []
    for i in range(0, len(ids), 3):
        before = counting.decoded
        out.append(text.push(ids[i : i + 3]))
        if RULES[name] != "runs":
            assert counting.decoded - before <= 2 * CONTEXT + 3
    out.append(text.finish())
    assert "".join(out) == tok.decode(ids)
    assert counting.decoded <= len(ids) + 2 * CONTEXT * len(out), "an id beyond the context is decoded once"
