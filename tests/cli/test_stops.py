"""``foldspec generate``: stop strings, ``--min-tokens`` and ``--logprobs``, as they are asked for and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli.command import BOS, EOS, PAIR, Result, copied, generate, swap_ids, with_text, word
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stopping import defined

from foldspec import Engine, SamplingParams
from foldspec.errors import UsageError

GOLDEN = tiny.golden_cases("a_llama_zlab")["len0072"]
PROMPT, ANSWER = GOLDEN["prompts"][0], GOLDEN["ar_output_ids"][0]  # plain decoding, 32 ids
SMALL = ["--window", 24, "--max-tokens", 32, "--prompt-ids", ",".join(map(str, PROMPT))]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair with a tokenizer of one word an id."""
    return with_text(copied(tmp_path_factory.mktemp("words")))


def report(pair: Path, *arguments: object) -> dict[str, Any]:
    """A report whose counters agree with one another."""
    done = generate(*SMALL, "--json", "--trace", "--quiet", *arguments, pair=pair)
    assert done.code == 0, done
    ids = done.json["token_ids"]
    assert done.json["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": len(ids)}
    assert [token for r in done.json["rounds"] for token in r["committed"]] == ids[1:]
    if done.json["rounds"]:
        assert done.json["tau"] == pytest.approx((len(ids) - 1) / len(done.json["rounds"]))
    if "logprobs" in done.json:
        assert len(done.json["logprobs"]["tokens"]) == len(ids)
    return done.json


def text_of(count: int) -> str:
    return " ".join(word(i) for i in ANSWER[:count])


def test_a_stop_string_at_every_token_and_across_every_two(words: Path) -> None:
    """In the middle of blocks, at their ends, across two: text, ids, rounds, usage and logprobs are cut alike."""
    whole = report(words, "--ignore-eos")
    inside = across = 0
    for at in range(1, 32):
        for string in (word(ANSWER[at]), f"{word(ANSWER[at - 1])} {word(ANSWER[at])}"[1:]):
            count = next(n for n in range(1, 33) if string in text_of(n))
            done = report(words, "--ignore-eos", "--stop", string, "--logprobs", 1)
            assert done["token_ids"] == ANSWER[:count] and done["text"] == text_of(count).partition(string)[0]
            assert (done["finish_reason"], done["stopped_by"]) == ("stop", string)
            if count < 2:
                continue
            last = done["rounds"][-1]
            same = next(r for r in whole["rounds"] if r["anchor_pos"] == last["anchor_pos"])
            assert (last["drafted"], last["accepted"]) == (same["drafted"], same["accepted"])
            inside += len(last["committed"]) < len(same["committed"])
            across += len(last["committed"]) == 1 and " " in string
    assert inside > 10 and across > 5


def test_the_streamed_pieces_join_to_the_text(words: Path) -> None:
    """None holds a character that the stop string takes back, and the text on stdout is the one in the report."""
    string = f"{word(ANSWER[9])} {word(ANSWER[10])[:2]}"
    out = generate(*SMALL, "--ignore-eos", "--quiet", "--stop", string, pair=words)
    wanted = text_of(32).partition(string)[0]
    assert out == Result(0, wanted + ("" if wanted.endswith("\n") else "\n"), "")
    with Engine.load(target=str(words / "target"), drafter=str(words / "drafter"), window=24) as engine:
        stream, texts = engine.stream(PROMPT, SamplingParams(max_tokens=32, ignore_eos=True, stop=(string,))), []
        for piece in stream:
            texts.append(piece.text)
            assert wanted.startswith("".join(texts)) and stream.completion.text == "".join(texts)
        assert "".join(texts) == wanted and stream.completion.stopped_by == string


def test_several_stop_strings_and_ids(words: Path) -> None:
    """The first to end wins; where they end on one character the longest; on one token, an id is the reason."""
    late, early = word(ANSWER[20]), word(ANSWER[6])
    done = report(words, "--ignore-eos", "--stop", late, "--stop", early, "--stop", early[1:])
    assert done["stopped_by"] == early and early not in done["text"]
    count = len(done["token_ids"])
    both = report(words, "--ignore-eos", "--stop", early, "--stop-ids", done["token_ids"][-1])
    assert both["finish_reason"] == "stop" and both["stopped_by"] == both["token_ids"][-1]
    assert len(both["token_ids"]) <= count
    on_limit = report(words, "--ignore-eos", "--stop", early, "--max-tokens", count)
    assert (on_limit["finish_reason"], on_limit["text"]) == ("stop", done["text"])
    never = report(words, "--ignore-eos", "--stop", "never \u00e9")
    assert (never["finish_reason"], never["stopped_by"], never["text"]) == ("length", None, text_of(32))


def test_min_tokens(words: Path) -> None:
    """Neither an id nor a string ends the request among the first, in whatever rounds they come."""
    string = word(ANSWER[3])[:1]  # one letter, which comes again
    for minimum in (0, 1, 2, 5, 9, 31):
        for drafts in (0, 5):
            done = report(words, "--ignore-eos", "--stop", string, "--min-tokens", minimum, "--draft-tokens", drafts)
            assert len(done["token_ids"]) > minimum
            wanted = next((n for n in range(minimum + 1, 33) if string in text_of(n)[len(text_of(minimum)) :]), 32)
            assert done["token_ids"] == ANSWER[:wanted]
    assert report(words, "--ignore-eos", "--min-tokens", 32)["token_ids"] == ANSWER
    assert report(words, "--min-tokens", 0, "--max-tokens", 0)["token_ids"] == []


def test_an_end_that_the_checkpoint_declares_is_named(words: Path, tmp_path: Path) -> None:
    pair = swap_ids(with_text(copied(tmp_path / "pair")), ANSWER[3], EOS)
    done = report(pair)
    assert (done["finish_reason"], done["stopped_by"]) == ("stop", EOS)
    assert report(pair, "--ignore-eos", "--stop", word(ANSWER[2]))["stopped_by"] == word(ANSWER[2])


def test_logprobs_are_reported_as_raw(words: Path) -> None:
    done = report(words, "--ignore-eos", "--logprobs", 3)
    assert list(done["logprobs"]) == ["of", "tokens"] and done["logprobs"]["of"] == "raw"
    for token, each in zip(done["token_ids"], done["logprobs"]["tokens"], strict=True):
        assert list(each) == ["logprob", "top"] and len(each["top"]) == 3
        assert each["top"][0] == [token, each["logprob"]]  # greedy: the most likely id is the one that was taken
        values = [value for _, value in each["top"]]
        assert values == sorted(values, reverse=True) and values[0] <= 0
    assert done["settings"]["logprobs"] == 3 and done["settings"]["stop"] == []
    assert "logprobs" not in report(words, "--ignore-eos")
    bare = report(words, "--ignore-eos", "--logprobs", 0)["logprobs"]["tokens"]
    assert [each["top"] for each in bare] == [[]] * 32
    assert [each["logprob"] for each in bare] == [each["logprob"] for each in done["logprobs"]["tokens"]]
    every = generate(*SMALL[:2], "--max-tokens", 1, *SMALL[4:], "--json", "--logprobs", 512, pair=PAIR)
    assert len(json.loads(every.out)["logprobs"]["tokens"][0]["top"]) == 512


@pytest.fixture(scope="module")
def engine(words: Path) -> Any:
    with Engine.load(target=str(words / "target"), drafter=str(words / "drafter"), window=24) as engine:
        yield engine


def test_what_is_refused_leaves_the_engine_as_it_was(engine: Engine) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    pages = engine.resources.cache.tables.allocator.free_pages
    for prompt, wrong in (
        ("", params),
        ([5] * 2049, params),
        ([512], params),
        ("w5", SamplingParams(stop_ids=(512,))),
        ("w5", SamplingParams(logprobs=513)),
    ):
        with pytest.raises(UsageError):
            engine.generate(prompt, wrong)
        assert engine.generate(PROMPT, params).token_ids == tuple(ANSWER[:8])
    assert engine.resources.cache.tables.allocator.free_pages == pages


def test_an_empty_prompt_where_there_is_a_bos(tmp_path: Path) -> None:
    """BOS alone, and then a normal request on the same engine, as ever."""
    pair = with_text(copied(tmp_path / "pair"), bos=True)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with Engine.load(target=str(pair / "target"), drafter=str(pair / "drafter"), window=24) as engine:
        empty = engine.generate("", params)
        assert empty.prompt_ids == (BOS,) and len(empty.token_ids) == 8
        assert engine.generate(PROMPT, params).token_ids == tuple(ANSWER[:8])
        assert engine.generate("", params).token_ids == empty.token_ids


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_engine_ends_as_defined(engine: Engine, data: st.DataObject) -> None:
    """Any drafts a round, limits, ids and strings: what the definition says of plain decoding's output."""
    text = text_of(32)
    cuts = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 9))
    stop = tuple(text[a : a + n] for a, n in data.draw(st.lists(cuts, max_size=3)))
    limit = data.draw(st.integers(1, 32))
    first = data.draw(st.integers(0, limit))
    later = sorted(set(ANSWER[first:]) - set(ANSWER[:first]))  # ids whose ban among the first changes nothing
    stop_ids = tuple(data.draw(st.lists(st.sampled_from(later), max_size=2))) if later else ()
    params = SamplingParams(
        max_tokens=limit, ignore_eos=True, stop=stop, stop_ids=stop_ids, min_tokens=first, logprobs=0
    )
    done = engine.using(draft_tokens=data.draw(st.integers(0, 5))).generate(PROMPT, params)
    assert engine.tokenizer is not None and done.logprobs is not None
    wanted = defined(engine.tokenizer, ANSWER, stop, frozenset(stop_ids), first, limit)
    assert wanted is not None
    assert (list(done.token_ids), done.text, done.finish_reason, done.stopped_by) == wanted
    assert sum(len(r.committed) for r in done.rounds) == len(done.token_ids) - 1 == len(done.logprobs) - 1
