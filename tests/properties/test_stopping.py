"""Where a request ends: whatever blocks its tokens come in, ids, text and counters are cut as plainly defined."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tiny
import torch
from deciding import VERIFYING, strict
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stopping import End, defined
from vocabularies import MAKERS, byte_ids, token_id, tokenizer

from foldspec.cache.rows import Rows
from foldspec.drafters.dflash import DFlash
from foldspec.noise import Noise
from foldspec.options import SamplingParams
from foldspec.records import PointMass, Proposal, Round, TokenLogprobs
from foldspec.schedule.prefill import prefill
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Rounds
from foldspec.text.stops import StopStrings
from foldspec.text.stream import TextStream
from foldspec.text.tokenizer import Tokenizer


def check(
    tok: Tokenizer,
    ids: Sequence[int],
    sizes: Sequence[int],
    stop: Sequence[str] = (),
    stop_ids: frozenset[int] = frozenset(),
    first: int = 0,
    limit: int = 10**6,
) -> End:
    """Commit ``ids`` as a round loop would, in blocks of ``sizes`` (round and round), and compare with the definition.
    Output that goes on is cancelled. Returns how it ended."""
    params = SamplingParams(max_tokens=10**6, stop=tuple(stop), min_tokens=first, logprobs=0)
    request = Request(0, (7,), limit, stop_ids, params, TextStream(tok, params.stop))
    free, shown, pieces = TextStream(tok), "", 0  # the same text without stop strings
    at = 0
    while at < len(ids) and not request.done:
        block = ids[at : at + (sizes[pieces % len(sizes)] if at else 1)]
        position = request.anchor_pos
        committed = request.commit(block, [TokenLogprobs(-float(at + i), ()) for i in range(len(block))])
        assert committed == tuple(block[: len(committed)]) and committed
        if at:
            request.rounds.append(Round(position, tuple(block), len(block) - 1, committed))
        at, pieces = at + len(block), pieces + 1
        assert request.text.so_far.startswith(shown), "text that was out was taken back"
        shown = request.text.so_far
        if not request.done:
            for token in block:
                free.push([token])
            held = free.so_far.removeprefix(shown)
            assert shown + held == free.so_far
            assert not held or any(s.startswith(held) and s != held for s in stop), "held back without need"
    wanted = defined(tok, ids, stop, stop_ids, first, limit)
    if wanted is None:
        assert not request.done and request.stopped_by is None
        request.cancel()
        assert request.finish_reason == "cancelled" and request.output == list(ids)
        wanted = End(list(ids), tok.decode(ids), "cancelled", None)
    end = End(request.output, request.text.so_far, request.finish_reason, request.stopped_by)
    assert end == wanted and request.text.so_far.startswith(shown)
    assert [entry.logprob for entry in request.logprobs] == [-float(i) for i in range(len(request.output))]
    assert sum(len(r.committed) for r in request.rounds) == max(0, len(request.output) - 1)
    again = Request(1, (7,), limit, stop_ids, params, TextStream(tok, params.stop), output=list(request.output))
    text = again.text.remade(request.output, first)
    text.finish()
    assert text.so_far == request.text.so_far
    return end


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_tokens_in_any_blocks(name: str, data: st.DataObject) -> None:
    """Few different ids, so that texts repeat; stop strings out of the text, and some that only begin like it."""
    tok = tokenizer(name)
    known = st.integers(0, tok.vocab_size + 1)
    if name in ("byte-level", "llama-2", "gemma"):
        some = byte_ids(tok, data.draw(st.sampled_from(["€", "日本", "é€", "👍", "aé", "\n\n", "<|e|>"])).encode())
    else:
        some = []
    pool = some + data.draw(st.lists(known, min_size=1, max_size=4))
    ids = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=30))
    text = tok.decode(ids)
    cuts = st.tuples(st.integers(0, len(text)), st.integers(1, 6), st.sampled_from(["", "", "a", "€", " "]))
    out = [text[a : a + n] + tail for a, n, tail in data.draw(st.lists(cuts, max_size=3))]
    stop = [string for string in out if string and "\ufffd" not in string]
    end = check(
        tok,
        ids,
        data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)),
        stop,
        data.draw(st.frozensets(st.sampled_from([*pool, 10**5]), max_size=1)),
        data.draw(st.sampled_from([0, 0, 0, 1, 2, 5, 12])),
        data.draw(st.sampled_from([10**6, 1, 3, 8, 20])),
    )
    assert end.reason


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=24),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
)
@example(text="aabaab", stop=["abaab", "ba"], sizes=[1])
@example(text="aab", stop=["b", "ab", "aab"], sizes=[3])
@example(text="aaab", stop=["aab"], sizes=[2])
def test_overlapping_stop_strings(text: str, stop: list[str], sizes: list[int]) -> None:
    """The first to end wins; of those that end on one character the longest. Pieces have no say, nor has the order."""
    found = [(end, -len(s)) for end in range(1, len(text) + 1) for s in stop if text[:end].endswith(s)]
    wanted = text if not found else text[: min(found)[0] + min(found)[1]]
    for strings in (stop, stop[::-1]):
        seen, out, at, turn = StopStrings(strings), "", 0, 0
        while at < len(text) and seen.found is None:
            size = sizes[turn % len(sizes)] or (turn % 7 == 0)
            out += seen.push(text[at : at + size])
            at, turn = at + size, turn + 1
        assert out + seen.finish("") == wanted and (seen.found is not None) == bool(found)
        if found:
            assert seen.found is not None and len(seen.found) == -min(found)[1]


# ------------------------------------------------------------------------------------------------------- named examples


def test_the_stop_string_in_the_middle_of_a_block_and_across_two() -> None:
    """A block of seven that has the stop string at its second token, and every way of cutting it in two."""
    tok = tokenizer("byte-level")
    ids = byte_ids(tok, b"text STOP more text")
    for size in range(1, len(ids) + 1):
        end = check(tok, ids, [size], ["STOP"])
        assert end == End(ids[:9], "text ", "stop", "STOP")
    block = byte_ids(tok, b"xab.....")  # one token of its own, then seven
    assert check(tok, block, [7], ["ab"]) == End(block[:3], "x", "stop", "ab")
    assert check(tok, block, [7], ["never"], frozenset(block[2:3])) == End(block[:3], "xab", "stop", block[2])


@pytest.mark.parametrize("name", ["byte-level", "llama-2", "gemma"])
def test_a_stop_string_of_characters_that_tokens_cut(name: str) -> None:
    """It ends with the token of its last byte, also where a decoder waits for the end of a run of bytes."""
    tok = tokenizer(name)
    before, after = byte_ids(tok, "é".encode()), token_id(tok, "é" if name != "byte-level" else "漢字")
    family = "👩‍👩‍👧"
    ids = [*before, *byte_ids(tok, family.encode()), after]
    for size in (1, 2, 3, 5, 50):
        assert check(tok, ids, [size], [family]) == End(ids[:-1], "é", "stop", family)
        assert check(tok, ids, [size], ["👧"]) == End(ids[:-1], "é" + family[:-1], "stop", "👧")
        newline = [after, *byte_ids(tok, b"\n\n"), after]
        assert check(tok, newline, [size], ["\n\n"]).ids == newline[:3]


def test_bytes_that_go_wrong_after_a_stop_string_was_begun() -> None:
    """What looked like the beginning of one turns into U+FFFD with its run, and is text after all."""
    tok = tokenizer("llama-2")
    bad = [*byte_ids(tok, b"\n\xff"), token_id(tok, "é")]
    assert check(tok, bad, [1], ["\n\n"]).text == "\ufffd\ufffdé"
    assert check(tok, bad, [1], ["\n"]) == End(bad[:1], "", "stop", "\n")
    assert check(tok, bad, [1], ["\n"], first=1).text == "\ufffd\ufffdé"
    euro = byte_ids(tok, "€".encode())  # two bytes look like two U+FFFD, three are one character
    assert check(tok, euro, [1], ["€"], first=2) == End(euro, "", "stop", "€")


def test_what_is_held_back_comes_out_when_the_request_ends_otherwise() -> None:
    tok = tokenizer("byte-level")
    ids = byte_ids(tok, b"one STO")
    assert check(tok, ids, [3], ["STOP"], limit=7) == End(ids, "one STO", "length", None)
    assert check(tok, ids, [3], ["STOP"], frozenset(ids[-1:])) == End(ids, "one STO", "stop", ids[-1])
    assert check(tok, ids, [3], ["STOP"]) == End(ids, "one STO", "cancelled", None)


def test_one_token_that_meets_everything() -> None:
    """A stop id is the reason before a stop string, and that before the limit; the text ends before the string."""
    tok = tokenizer("byte-level")
    ids = byte_ids(tok, b"abc")
    assert check(tok, ids, [3], ["bc"], frozenset(ids[-1:]), limit=3) == End(ids, "a", "stop", ids[-1])
    assert check(tok, ids, [3], ["bc"], limit=3) == End(ids, "a", "stop", "bc")
    assert check(tok, ids, [3], limit=3) == End(ids, "abc", "length", None)


def test_min_tokens_counts_tokens_and_not_rounds() -> None:
    """The first four end nothing, by id or by string, in whatever rounds they come; the fifth may."""
    tok = tokenizer("byte-level")
    ids = byte_ids(tok, b"ababababab")
    for size in (1, 2, 3, 9):
        assert check(tok, ids, [size], ["ab"], first=3).ids == ids[:4]
        assert check(tok, ids, [size], ["ab"], first=4) == End(ids[:6], "abab", "stop", "ab")
        assert check(tok, ids, [size], ["ba"], first=4) == End(ids[:5], "aba", "stop", "ba")
        assert check(tok, ids, [size], [], frozenset(ids[:1]), first=4).ids == ids[:5]
        assert check(tok, ids, [size], ["ab"], frozenset(ids[:1]), first=4, limit=4).reason == "length"


def test_tokens_that_were_never_recorded_are_dropped() -> None:
    """An interrupt between a commit and its round: what is left agrees with itself."""
    tok = tokenizer("byte-level")
    ids = byte_ids(tok, b"abcdef")
    params = SamplingParams(stop=("ef",), logprobs=0)
    request = Request(0, (7,), 99, frozenset(), params, TextStream(tok, params.stop))
    request.commit(ids[:1], [TokenLogprobs(0.0, ())])
    request.commit(ids[1:3], [TokenLogprobs(0.0, ())] * 2)
    request.rounds.append(Round(1, (), 1, tuple(ids[1:3])))
    request.commit(ids[3:], [TokenLogprobs(0.0, ())] * 3)
    assert request.done
    request.settle()
    assert not request.done
    request.cancel()
    assert (request.finish_reason, request.stopped_by, request.output) == ("cancelled", None, ids[:3])
    assert request.text.so_far == "abc" and len(request.logprobs) == 3


@pytest.mark.parametrize("end", ["id", "string", "limit"])
@pytest.mark.parametrize("at", ["push", "finish"])
def test_a_first_token_that_was_cut_short_still_ends_the_request(
    end: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no round that would tell whether its commit came to the end."""
    tok = tokenizer("byte-level")
    (token,) = byte_ids(tok, b"a")
    params = SamplingParams(stop=("a",) if end == "string" else (), logprobs=0)
    stops = frozenset([token] if end == "id" else [])
    request = Request(0, (7,), 1 if end == "limit" else 9, stops, params, TextStream(tok, params.stop))

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TextStream, at, broken)
        with pytest.raises(KeyboardInterrupt):
            request.commit([token], [TokenLogprobs(0.0, ())])
    for _ in range(2):
        request.settle()
        by = {"id": token, "string": "a", "limit": None}[end]
        assert (request.finish_reason, request.stopped_by) == ("length" if end == "limit" else "stop", by)
        assert request.output == [token] and request.logprobs == [TokenLogprobs(0.0, ())]
        assert request.text.so_far == ("" if end == "string" else "a")


# ------------------------------------------------------------------------------------------- a stop id among the drafts


class Forced(DFlash):
    """The network runs; what it drafts is replaced by seven tokens for each anchor's position."""

    max_drafts = 7
    script: dict[int, tuple[int, ...]]

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        super().propose(anchors, tokens, [min(budget, 5) for budget in budgets], noises)
        pairs = zip(anchors.starts, budgets, strict=True)
        return [PointMass(self.script.get(start, ())[:budget]) for start, budget in pairs]


class Forcing:
    """The trained pair of the goldens, with caches of its own; its drafts are given."""

    GOLDEN = tiny.golden_cases("a_llama_zlab")["len0072"]
    PROMPT, ANSWER = GOLDEN["prompts"][0], GOLDEN["ar_output_ids"][0]

    def __init__(self, rule: str) -> None:
        self.model = tiny.load_target(tiny.PAIRS / "a_llama_zlab" / "target")
        network = tiny.load_drafter(tiny.PAIRS / "a_llama_zlab" / "drafter")
        self.cache, self.drafts = tiny.paged_cache(self.model), tiny.draft_cache(network)
        plain = tiny.bind(network, self.model, self.drafts, context="full")
        self.drafter = Forced(network, self.model, plain._reader)
        self.drafter.max_drafts = Forced.max_drafts
        self.loop = Rounds(self.model, self.cache, self.drafter, strict(rule), device=tiny.CPU)

    def prefilled(self, number: int, ids: Sequence[int]) -> torch.Tensor:
        self.cache.open(number)
        self.drafter.open(number)
        return prefill(number, ids, model=self.model, cache=self.cache, drafter=self.drafter, chunk=50, device=tiny.CPU)

    def start(self, number: int, stop_ids: Sequence[int]) -> Request:
        request = Request(number, tuple(self.PROMPT), 20, frozenset(stop_ids), SamplingParams(logprobs=0))
        self.loop.first(request, self.prefilled(number, self.PROMPT))
        return request

    def same_entries(self, found: int, wanted: int, drafter: int) -> None:
        """Two requests hold the same: of the target all, of the drafter the first ``drafter`` entries."""
        assert self.cache.tables.length(found) == self.cache.tables.length(wanted)
        mine, other = (
            [
                *(tiny.dense(each) for i in range(self.model.layer_count) for each in self.cache.entries(i, number)),
                *(tiny.dense(self.drafts.values(i, number, 0, drafter)) for i in range(2)),
                *(tiny.dense(self.drafts.keys(i, number, 0, drafter, rotated=True)) for i in range(2)),
            ]
            for number in (found, wanted)
        )
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("rule", VERIFYING)
def test_a_stop_id_is_the_third_of_seven_drafts(rule: str) -> None:
    """All seven are what the target says. The request ends with the third: the rest is dropped, the caches hold what
    was committed, and another request that drafts the same but may not stop there goes on."""
    it = Forcing(rule)
    n, answer = len(it.PROMPT), it.ANSWER
    it.drafter.script = {n: tuple(answer[1:8]), n + 8: tuple(answer[9:16])}
    stops, goes_on = it.start(0, [answer[3]]), it.start(1, [])
    first, other = it.loop.round([stops, goes_on])
    assert (first.drafted, first.accepted, first.committed) == (tuple(answer[1:8]), 7, tuple(answer[1:4]))
    assert (stops.finish_reason, stops.stopped_by, stops.output) == ("stop", answer[3], answer[:4])
    assert len(stops.logprobs) == 4 and stops.anchor_pos == n + 3
    assert other.committed == tuple(answer[1:9]) and not goes_on.done
    it.prefilled(2, [*it.PROMPT, *answer[:3]])
    assert it.drafts.length(0) == n  # what a request ends with is not absorbed any more
    it.same_entries(0, 2, n)
    it.loop.round([goes_on])
    assert goes_on.output == answer[:17]


@pytest.mark.parametrize("rule", VERIFYING)
def test_a_stop_id_that_was_drafted_and_refused_ends_nothing(rule: str) -> None:
    it = Forcing(rule)
    n, answer = len(it.PROMPT), it.ANSWER
    eos = 2
    assert eos not in answer
    it.drafter.script = {n: (*answer[1:3], eos, *answer[4:8])}
    request = it.start(0, [eos])
    (round_,) = it.loop.round([request])
    assert (round_.drafted[2], round_.accepted, round_.committed) == (eos, 2, tuple(answer[1:4]))
    assert not request.done
    it.prefilled(1, [*it.PROMPT, *answer[:3]])
    assert it.drafts.length(0) == n + 3
    it.same_entries(0, 1, n + 3)
    while not request.done:
        it.loop.round([request])
    assert request.output == answer[:20] and request.finish_reason == "length"
