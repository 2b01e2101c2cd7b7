"""Prompt lookup against a scan of the whole text, and its index after every rollback; through the engine, its output
is plain decoding's and its drafts are the scan's."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from foldspec import Engine, SamplingParams
from foldspec.acceptance.base import AcceptanceRule
from foldspec.cache.rows import Rows
from foldspec.drafters.prompt_lookup import PromptLookup
from foldspec.errors import UsageError
from foldspec.noise import Noise
from foldspec.records import Proposal, Verdict
from foldspec.sampling import TargetLaws
from foldspec.schedule.request import Request

PAIR = tiny.PAIRS / "a_llama_zlab"


def scan(ids: Sequence[int], count: int, longest: int) -> tuple[int, ...]:
    """What the rule says, by looking everywhere."""
    for n in range(longest, 0, -1):
        starts = [i for i in range(len(ids) - n) if list(ids[i : i + n]) == list(ids[len(ids) - n :])]
        followed = [ids[i + n : i + n + count] for i in starts]
        if followed:
            whole = [run for run in followed if len(run) == count]
            return tuple(whole[-1] if whole else followed[0])
    return ()


def absorb(drafter: PromptLookup, ids: Sequence[int], start: int = 0, request: int = 0) -> None:
    drafter.absorb(Rows.of([request], [start], [len(ids)]), ids, [])


def proposed(drafter: PromptLookup, n: int, anchor: int, budget: int, request: int = 0) -> tuple[int, ...]:
    return drafter.propose(Rows.of([request], [n], [1]), [anchor], [budget], [Noise(0)])[0].tokens


def state(drafter: PromptLookup, request: int = 0) -> dict[str, object]:
    return copy.deepcopy(vars(drafter._indexes[request]))


tokens = st.lists(st.integers(0, 3), max_size=12)


@given(
    steps=st.lists(st.tuples(st.integers(0, 30), tokens, st.integers(0, 3)), max_size=12),
    longest=st.integers(1, 5),
    budget=st.integers(0, 9),
)
def test_drafts_and_state_are_those_of_a_scan_after_every_rollback(
    steps: list[tuple[int, list[int], int]], longest: int, budget: int
) -> None:
    drafter, ids = PromptLookup(9, longest), list[int]()
    drafter.open(0)
    for length, new, anchor in steps:
        drafter.truncate(0, length)
        ids = ids[:length]
        absorb(drafter, new, len(ids))
        ids += new
        assert proposed(drafter, len(ids), anchor, budget) == (scan([*ids, anchor], budget, longest) if budget else ())
    fresh = PromptLookup(9, longest)
    fresh.open(0)
    absorb(fresh, ids)
    assert state(drafter) == state(fresh)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([5], ()),
        ([5, 6], ()),
        ([5, 5], (5,)),  # the anchor itself is all that followed
        ([1, 2, 3, 9, 8, 3, 7, 1, 2, 3], (9, 8, 3, 7)),  # three tokens, though the one alone came later
        ([1, 2, 9, 9, 1, 2, 8, 8, 1, 2], (8, 8, 1, 2)),  # the most recent of two
        ([1, 2, 9, 1, 2, 8, 1, 2], (9, 1, 2, 8)),  # the most recent is followed by three tokens, too few
        ([7, 5, 6, 5, 6, 5, 6, 5, 6], (5, 6, 5, 6)),  # a short circle is drafted several times over
    ],
)
def test_known_texts(text: list[int], drafts: tuple[int, ...]) -> None:
    drafter = PromptLookup(4)
    drafter.open(0)
    absorb(drafter, text[:-1])
    assert proposed(drafter, len(text) - 1, text[-1], 4) == drafts


def test_requests_know_nothing_of_each_other() -> None:
    drafter = PromptLookup()
    drafter.open(0)
    drafter.fork(0, 1, [1, 2, 3])
    drafter.absorb(Rows.of([0, 1], [0, 3], [2, 1]), [1, 7, 4], [])
    rows = Rows.of([0, 1], [2, 4], [1, 1])
    assert [p.tokens for p in drafter.propose(rows, [1, 1], [7, 7], [Noise(0)] * 2)] == [(7, 1), (2, 3, 4, 1)]
    assert [p.tokens for p in drafter.propose(rows, [1, 1], [0, 1], [Noise(0)] * 2)] == [(), (2,)]
    drafter.close(0)
    assert proposed(drafter, 4, 2, 7, request=1) == (3, 4, 2)


class Counted(int):
    """A token id that counts how often it is compared or hashed, by C code too."""

    touched = 0

    def __eq__(self, other: object) -> bool:
        Counted.touched += 1
        return int(self) == other

    def __hash__(self) -> int:
        Counted.touched += 1
        return hash(int(self))


def work_of_a_round(length: int) -> tuple[int, int]:
    """Lines of Python run, and ids looked at, by one round behind a text of ``length`` ids."""
    drafter = PromptLookup()
    drafter.open(0)
    absorb(drafter, [Counted(token) for token in tiny.prompt(length, vocabulary=50)])
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    Counted.touched = 0
    sys.settrace(trace)
    try:
        proposed(drafter, length, 7, 7)
        absorb(drafter, [Counted(7)], length)
        drafter.truncate(0, length)
    finally:
        sys.settrace(None)
    return lines, Counted.touched


def test_a_round_costs_the_same_whatever_the_length() -> None:
    """Longer matches are there to be found in a longer text, so a few lines more; a scan would look at all of it."""
    lines, touched = work_of_a_round(1_000)
    assert lines > 5 and touched > 5
    longer, more = work_of_a_round(200_000)
    assert longer < 1_000 and more < 1_000, (lines, touched, longer, more)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(
        target=str(PAIR / "target"), drafter=str(PAIR / "drafter"), page_size=16, prefill_chunk=50, max_context=512
    ) as engine:
        yield engine


@pytest.mark.parametrize("file", ["len0023", "len0200", "len0400"])
@pytest.mark.parametrize("restored", [False, True], ids=["fresh", "from a prefix"])
def test_output_is_plain_decodings_and_drafts_are_the_scans(engine: Engine, file: str, restored: bool) -> None:
    """Prefixes are kept through the pair's own drafter, which saw taps and no ids."""
    ids, params = tiny.golden_cases(PAIR.name)[file]["prompts"][0], SamplingParams(max_tokens=48, ignore_eos=True)
    plain = engine.using(draft_tokens=0).generate(ids, params)
    lookup = engine.using(drafter="lookup")
    if restored:
        with engine.prefill(ids) as prefix:
            done = lookup.generate(prefix, params)
    else:
        done = lookup.generate(ids, params)
    assert done.token_ids == plain.token_ids
    text, accepted = [*ids, *done.token_ids], 0
    for r in done.rounds:
        left = len(text) - r.anchor_pos - 1
        assert r.drafted == scan(text[: r.anchor_pos + 1], min(7, left - 1), 3)
        accepted += r.accepted
    assert accepted > 0, "nothing was accepted, so nothing was rolled back or kept"


def test_which_drafter_runs(engine: Engine) -> None:
    """By name over a loaded pair; alone with a target; back to the pair's own; and what settings say."""
    own = {"name": str(PAIR / "drafter"), "revision": None}
    lookup = {"name": "lookup", "revision": None}
    assert engine.settings()["drafter"] == own
    assert engine.using(drafter="lookup").settings()["drafter"] == lookup
    assert engine.using(drafter="lookup").using(drafter=None).settings()["drafter"] == own
    assert engine.using(drafter="lookup", draft_tokens=0).settings()["drafter"] is None
    ids, params = tiny.golden_cases(PAIR.name)["len0072"]["prompts"][0], SamplingParams(max_tokens=24, ignore_eos=True)
    with Engine.load(target=str(PAIR / "target"), drafter="lookup") as alone:
        assert alone.settings()["drafter"] == lookup
        done, wanted = alone.generate(ids, params), engine.using(drafter="lookup").generate(ids, params)
        assert (done.token_ids, done.rounds) == (wanted.token_ids, wanted.rounds)
        assert alone.using(drafter=None).generate(ids, params).tau == 1
        with alone.prefill(ids) as prefix:
            assert alone.generate(prefix, params).token_ids == done.token_ids


class Scripted(AcceptanceRule):
    """Accepts as many drafts of each of two requests as the script says, and goes on with an id that is new to both."""

    lossless = False

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        token = 10 + 6 * len(self.counts)
        return Verdict(self.counts.pop(0), token)

    def law(self) -> str:
        return "the script"


def test_after_every_accepted_count_the_state_is_that_of_a_fresh_absorb(engine: Engine) -> None:
    """In the round loop, two requests at once, one of them from a prefix; this prompt has seven drafts for any id."""
    first, second = [0, 7, 1, 6, 2, 5, 3, 4, 7, 7, 0, 0, 3], [7, 0, 0, 1, 4, 7, 6, 2, 2, 5, 3, 3, 7]
    lookup, resources = engine.using(drafter="lookup"), engine._resources
    lookup._rounds.rule = Scripted([count for pair in zip(first, second, strict=True) for count in pair])
    drafter, ids = lookup._drafter, (*range(4, 204), *range(4, 204))
    assert isinstance(drafter, PromptLookup)
    requests = [Request(resources.new_id(), ids[start:], 100) for start in (0, 170)]
    with (
        engine.prefill(ids) as prefix,
        resources.opened(requests[0].id, drafter, prefix),
        resources.opened(requests[1].id, drafter, None),
    ):
        resources.run_prompt(requests[1].id, requests[1].prompt, drafter)
        for request in requests:
            request.commit([190])
        for counts in zip(first, second, strict=True):
            rounds = lookup._rounds.round(requests)
            for request, round_, count in zip(requests, rounds, counts, strict=True):
                assert (len(round_.drafted), round_.accepted, len(round_.committed)) == (7, count, count + 1)
                fresh = PromptLookup()
                fresh.open(0)
                absorb(fresh, [*request.prompt, *request.output[:-1]])
                assert state(drafter, request.id) == state(fresh)
    assert drafter._indexes == {}


def test_on_a_text_that_repeats_every_draft_is_accepted() -> None:
    """This target goes round in circles of 96 tokens: once it has begun again, each round commits a whole block."""
    target = tiny.PAIRS / "g_llama_oracle" / "target"
    with Engine.load(target=str(target), drafter="lookup") as engine:
        ids, period = tiny.prompt(20, 500, seed=1), 96
        plain = engine.using(draft_tokens=0).generate(ids, SamplingParams(max_tokens=160, ignore_eos=True)).token_ids
        assert plain[period:] == plain[:-period]
        done = engine.generate([*ids, *plain[:100]], SamplingParams(max_tokens=57, ignore_eos=True))
    assert done.token_ids == plain[100:157]
    assert done.tau == 8 and [r.accepted for r in done.rounds] == [7] * 7


@pytest.mark.parametrize(("draft_tokens", "drafts"), [(1, 1), (3, 3), (12, 7), (None, 7)])
def test_draft_tokens_can_only_lower_the_seven(engine: Engine, draft_tokens: int | None, drafts: int) -> None:
    ids = tiny.golden_cases(PAIR.name)["len0200"]["prompts"][0]
    done = engine.using(drafter="lookup", draft_tokens=draft_tokens).generate(ids, SamplingParams(max_tokens=64))
    assert max(len(r.drafted) for r in done.rounds) == drafts


def test_a_name_that_is_none(engine: Engine) -> None:
    with pytest.raises(UsageError, match="no drafter without weights is called 'look'; known: lookup"):
        engine.using(drafter="look")
