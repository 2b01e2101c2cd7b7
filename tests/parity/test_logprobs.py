"""Log-probabilities of committed tokens: transformers' for a tiny checkpoint, plain decoding's whatever is drafted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
import transformers
from scipy.special import log_softmax

from foldspec import Engine, SamplingParams
from foldspec.logprobs import logprobs_of
from foldspec.records import Completion, TokenLogprobs

TOLERANCE, TOP, NEW = 1e-4, 5, 48
PAIR = tiny.PAIRS / "a_llama_zlab"
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=TOP)
WAYS: dict[str, dict[str, Any]] = {
    "full": {"context": "full"},
    "window": {"context": "window", "window": 24},
    "fold": {"context": "fold", "window": 24, "alpha": 2.0},
    "one draft": {"draft_tokens": 1},
    "lookup": {"drafter": "lookup"},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(target=str(PAIR / "target"), drafter=str(PAIR / "drafter"), page_size=16, prefill_chunk=50) as it:
        yield it


def prompts() -> list[list[int]]:
    return [case["prompts"][0] for name, case in tiny.golden_cases(PAIR.name).items() if name != "len0400"]


def entries(done: Completion) -> list[TokenLogprobs]:
    assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
    return done.logprobs


def near(mine: TokenLogprobs, other: TokenLogprobs) -> None:
    """Equal within the tolerance; ids whose order hangs on less than that may change places."""
    assert mine.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
    assert [value for _, value in mine.top] == pytest.approx([value for _, value in other.top], abs=TOLERANCE)
    known = dict(other.top)
    for token, value in mine.top:
        assert known.get(token, other.top[-1][1]) == pytest.approx(value, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["llama31", "smollm2"])
def test_transformers(name: str) -> None:
    """Every token, the first one that prefill gives included, from one forward of the whole text by transformers."""
    folder = tiny.GOLDEN / "tiny" / name
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tiny.prompt(40, 200, seed=3)
    with Engine.load(target=str(folder), drafter="none") as engine:
        looked_up = engine.using(drafter="lookup")
        for done in (engine.generate(ids, PARAMS), looked_up.generate(ids, PARAMS)):
            with torch.inference_mode():
                logits = oracle(torch.tensor([[*ids, *done.token_ids]])).logits[0, len(ids) - 1 : -1]
            wanted = log_softmax(logits.double().numpy(), axis=-1)
            for row, token, entry in zip(wanted, done.token_ids, entries(done), strict=True):
                best = sorted(((int(i), float(row[i])) for i in range(len(row))), key=lambda pair: -pair[1])[:TOP]
                near(entry, TokenLogprobs(float(row[token]), tuple(best)))
    assert min(entry.logprob for entry in entries(done)) < -100 * TOLERANCE, "all but certain: nothing was compared"


@pytest.mark.parametrize("way", WAYS)
def test_plain_decoding(engine: Engine, way: str) -> None:
    drafted = 0
    for ids in prompts():
        plain = engine.using(draft_tokens=0).generate(ids, PARAMS)
        done = engine.using(**WAYS[way]).generate(ids, PARAMS)
        assert done.token_ids == plain.token_ids
        for mine, other in zip(entries(done), entries(plain), strict=True):
            near(mine, other)
        drafted += sum(r.accepted for r in done.rounds)
        with engine.prefill(ids) as prefix:  # the first token's come with the prefix
            again = engine.using(**WAYS[way]).generate(prefix, PARAMS)
        near(entries(again)[0], entries(plain)[0])
    assert drafted > 20, "hardly a draft was accepted"


def test_requests_together_have_their_own(engine: Engine) -> None:
    lengths_differ = prompts()[:4]
    fold = engine.using(**WAYS["fold"])
    together = fold.generate([*lengths_differ], PARAMS)
    for ids, done in zip(lengths_differ, together, strict=True):
        for mine, other in zip(entries(done), entries(fold.generate(ids, PARAMS)), strict=True):
            near(mine, other)


def test_they_are_cut_with_the_ids(engine: Engine) -> None:
    """A stop id and a limit in the middle of accepted runs; a cancelled request; none where none were asked for."""
    ids = prompts()[3]
    fold = engine.using(**WAYS["fold"])
    whole = fold.generate(ids, PARAMS)
    for at in range(1, NEW):
        token = whole.token_ids[at]
        count = whole.token_ids.index(token) + 1
        done = fold.generate(ids, SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=TOP, stop_ids=(token,)))
        assert entries(done) == entries(whole)[:count] and done.stopped_by == token
        short = fold.generate(ids, SamplingParams(max_tokens=at, ignore_eos=True, logprobs=TOP))
        for mine, other in zip(entries(short), entries(whole)[:at], strict=True):
            near(mine, other)  # the last block is shorter, which may change a sum's last bits
    stream = fold.stream(ids, PARAMS)
    next(stream), next(stream)
    stream.close()
    assert entries(stream.completion) == entries(whole)[: len(stream.completion.token_ids)]


def test_they_cost_nothing_where_they_are_not_asked_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "log_softmax", None)
    assert engine.generate(prompts()[0], SamplingParams(max_tokens=8, ignore_eos=True)).logprobs is None
    with pytest.raises(TypeError):
        engine.generate(prompts()[0], PARAMS)


def test_ties_go_to_the_lowest_id_and_impossible_ids_are_left_out() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -torch.inf], [5.0] * 7])
    first, second = logprobs_of(logits, [5, 6], 4)
    assert [token for token, _ in first.top] == [1, 3, 2, 4] and [token for token, _ in second.top] == [0, 1, 2, 3]
    wanted = log_softmax(logits[0].double().numpy())
    assert first.logprob == pytest.approx(wanted[5], abs=1e-6)
    assert [value for _, value in first.top] == pytest.approx([wanted[i] for i in (1, 3, 2, 4)], abs=1e-6)
    (every,) = logprobs_of(logits, [0], 7)
    assert [token for token, _ in every.top] == [1, 3, 2, 4, 5, 0], "an id of probability nought has no place"
    assert logprobs_of(logits, [5, 6], None) == [] and logprobs_of(logits, [5], 0)[0].top == ()


def test_half_precision_is_summed_in_float32() -> None:
    logits = 8 * torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    wanted = log_softmax(logits.bfloat16().double().numpy(), axis=-1)
    found = logprobs_of(logits.bfloat16(), [1, 2, 3], 0)
    assert [each.logprob for each in found] == pytest.approx([wanted[i, i + 1] for i in range(3)], abs=1e-5)


@pytest.mark.parametrize("name", ["llama31", "qwen3_5_text"])
def test_a_given_text(name: str) -> None:
    """The log-probabilities of a text that somebody else wrote, across pieces and pages, from one forward of prompt and
    text by transformers; and what was prefilled is left as it was."""
    folder = tiny.GOLDEN / "tiny" / name
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt, text = tiny.prompt(40, 200, seed=3), tiny.prompt(300, 200, seed=4)
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1].double()
    expected = log_softmax(logits.numpy(), axis=-1)[range(len(text)), text]
    with Engine.load(target=str(folder), drafter="none", page_size=16) as engine, engine.prefill(prompt) as prefix:
        for count in (len(text), 1, 2, 127, 128, 129, 256, 257):
            found = prefix.score(text[:count])
            assert found.logprobs == pytest.approx(expected[:count], abs=TOLERANCE)
            assert found.greedy == tuple((logits.argmax(-1)[:count] == torch.tensor(text[:count])).tolist())
        best = engine.generate(prefix, SamplingParams(max_tokens=20, ignore_eos=True)).token_ids
        assert prefix.held == (len(prompt), 0)
        assert all(prefix.score(best).greedy) and prefix.score([]).logprobs == ()
