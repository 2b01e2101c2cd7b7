"""What is delivered is what is counted: 500 requests with limits, stops, broken characters and cancellations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import tokenizers
import torch
from cli.command import PAIR, copied
from stopping import defined

from foldspec import Completion, Engine, SamplingParams
from foldspec.errors import CheckpointError
from foldspec.models.llama import Llama

LONGEST = 40
PIECES = ["a", "b", " ", "ab", "<|", "|>", "\n", *"é€👍नि日本", "👩‍👩‍👧"]


def byte_text(pair: Path) -> Path:
    """Give a pair's target a byte-level tokenizer of 512 ids, most of which are parts of characters."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.decoder = tokenizers.decoders.ByteLevel()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {b: chr(b) for b in printable} | {
        b: chr(256 + i) for i, b in enumerate(sorted(set(range(256)) - set(printable)))
    }
    draw, vocab = random.Random(0), dict[str, int]()
    parts = [data[a : a + n] for data in map(str.encode, PIECES) for a in range(len(data)) for n in range(1, 5)]
    draw.shuffle(parts)
    for data in [*parts, *(bytes(draw.choices(range(256), k=3)) for _ in range(600))]:
        vocab.setdefault("".join(names[b] for b in data), len(vocab))
    core.model = tokenizers.models.BPE(vocab={k: i for k, i in vocab.items() if i < 512}, merges=[])
    core.save(str(pair / "target" / "tokenizer.json"))
    return pair


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pair = byte_text(copied(tmp_path_factory.mktemp("bytes")))
    target, drafter = str(pair / "target"), str(pair / "drafter")
    with Engine.load(target=target, drafter=drafter, window=24, page_size=16, max_context=256) as engine:
        yield engine


def wish(draw: random.Random, text: str, ids: tuple[int, ...]) -> SamplingParams:
    """Parameters of one request whose plain output is known."""
    limit = draw.randint(1, LONGEST)
    first = draw.choice([0, 0, draw.randint(0, limit)])
    cuts = [text[a : a + draw.randint(1, 4)] for a in draw.choices(range(len(text)), k=draw.randint(0, 3))]
    later = sorted(set(ids[first:]) - set(ids[:first]))  # ids whose ban among the first changes nothing
    return SamplingParams(
        max_tokens=limit,
        ignore_eos=True,
        stop=tuple(string for string in [*cuts, draw.choice(PIECES)] if "\ufffd" not in string),
        stop_ids=tuple(draw.sample(later, min(len(later), draw.choice([0, 0, 1])))),
        min_tokens=first,
        logprobs=draw.choice([None, 2]),
    )


def test_five_hundred_requests(engine: Engine) -> None:
    draw, tok = random.Random(1), engine.tokenizer
    assert tok is not None
    plain = engine.using(draft_tokens=0)
    prompts = [tiny.prompt(n, 512, seed=9) for n in (3, 17, 40, 60, 90)]
    prompts += [case["prompts"][0][-80:] for case in tiny.golden_cases(PAIR.name).values()]
    whole = [plain.generate(ids, SamplingParams(max_tokens=LONGEST, ignore_eos=True, logprobs=2)) for ids in prompts]
    free = engine.resources.cache.tables.allocator.free_pages
    seen: dict[str, int] = {}
    broken = 0
    for number in range(500):
        which = draw.randrange(len(prompts))
        wanted_ids = whole[which].token_ids
        params = wish(draw, whole[which].text, wanted_ids)
        method = engine.using(draft_tokens=draw.randint(0, 5), context=draw.choice(["fold", "full", "window"]))
        stream, pieces = method.stream(prompts[which], params), []
        cancelled_after = draw.choice([None, None, None, draw.randint(0, 5)])
        for piece in stream:
            pieces.append(piece)
            if len(pieces) == cancelled_after:
                break
        stream.close()
        done = stream.completion
        counted(done, params)
        assert all(piece.token_ids for piece in pieces)
        assert [token for piece in pieces for token in piece.token_ids] == list(done.token_ids)
        text = "".join(piece.text for piece in pieces)
        wanted = defined(tok, wanted_ids, params.stop, frozenset(params.stop_ids), params.min_tokens, params.max_tokens)
        assert wanted is not None
        if done.finish_reason == "cancelled":
            assert done.text.startswith(text) and done.text == tok.decode(done.token_ids)
            assert wanted.text.startswith(text) and list(done.token_ids) == wanted.ids[: len(done.token_ids)]
        else:
            assert text == done.text
            assert (list(done.token_ids), done.text, done.finish_reason, done.stopped_by) == wanted, number
        if done.logprobs is not None:
            for mine, other in zip(done.logprobs, whole[which].logprobs or [], strict=False):
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        kind = f"{done.finish_reason} by {type(done.stopped_by).__name__}"
        seen[kind] = seen.get(kind, 0) + 1
        broken += "\ufffd" in done.text
    assert set(seen) == {"stop by int", "stop by str", "length by NoneType", "cancelled by NoneType"}
    assert min(seen.values()) > 20 and broken > 50, (seen, broken)
    assert engine.resources.cache.tables.allocator.free_pages == free


def test_a_request_that_fails_while_text_is_held_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text comes out; times are those of tokens all the same."""
    ids, tok = tiny.prompt(40, 512, seed=9), engine.tokenizer
    assert tok is not None
    plain = engine.using(draft_tokens=0)
    whole = plain.generate(ids, SamplingParams(max_tokens=LONGEST, ignore_eos=True))
    at = next(i for i in range(1, LONGEST) if whole.token_ids[i] not in (*ids, *whole.token_ids[:i]))
    token, so_far = whole.token_ids[at], tok.decode(whole.token_ids[: at + 1])
    embed = Llama.embed

    def broken(self: Llama, ids: torch.Tensor) -> torch.Tensor:
        return embed(self, ids).masked_fill((ids == token)[:, None], torch.nan)

    monkeypatch.setattr(Llama, "embed", broken)
    held = so_far.rstrip("\ufffd")[-2:]
    stream = plain.stream(ids, SamplingParams(max_tokens=LONGEST, ignore_eos=True, stop=(held + "never",)))
    with pytest.raises(CheckpointError, match="not finite"):
        stream.finish()
    done = stream.completion
    assert done.finish_reason == "error" and done.text == so_far and done.token_ids == whole.token_ids[: at + 1]
    assert len(done.times) == len(done.rounds) + 1 == at + 1 and done.last_time == done.times[-1]
    unread = plain.stream(ids, SamplingParams(max_tokens=LONGEST, ignore_eos=True))
    next(unread)
    while not unread.over:
        plain.scheduler.step()
    unread.close()  # before it could be raised
    assert unread.completion.finish_reason == "error" and isinstance(unread.completion.error, CheckpointError)


def counted(done: Completion, params: SamplingParams) -> None:
    """tau, usage and logprobs count exactly the delivered tokens."""
    commits = sum(len(r.committed) for r in done.rounds)
    assert commits == max(0, len(done.token_ids) - 1) and len(done.token_ids) <= params.max_tokens
    assert [token for r in done.rounds for token in r.committed] == list(done.token_ids[1:])
    assert done.tau is None or done.tau == commits / len(done.rounds)
    assert (done.logprobs is None) == (params.logprobs is None)
    assert done.logprobs is None or len(done.logprobs) == len(done.token_ids)
