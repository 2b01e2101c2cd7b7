"""Seeds mean something: ``match`` gives seeded plain decoding's ids, whatever drafts, methods and chunks there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny

from foldspec import Engine, SamplingParams

WINDOW = 24
FILES = ("len0023", "len0024", "len0025", "len0072", "len0200")  # W-1, W, W+1, 3W and more
PROMPTS = [tiny.golden_cases("a_llama_zlab")[file]["prompts"][0] for file in FILES]
LOOSE: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True, "max_tokens": 40}
WILD = LOOSE | {"temperature": 3.0, "top_p": 1.0}  # texts of two seeds do not meet by chance
WAYS: dict[str, dict[str, Any]] = {
    "argmax drafts": {},
    "drawn drafts": {"draft_temperature": 0.8},
    "shared noise": {"draft_temperature": 0.8, "draft_noise": "shared"},
    "filters": {"draft_temperature": 1.0, "draft_top_k": 5, "draft_top_p": 0.9},
    "window": {"context": "window", "draft_tokens": 3},
    "full": {"context": "full", "draft_temperature": 0.5},
    "lookup": {"drafter": "lookup"},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny.load_pair("a_llama_zlab") as engine:
        yield engine.using(context="fold", window=WINDOW)


@pytest.mark.parametrize("way", WAYS)
def test_match_is_seeded_plain_decoding(engine: Engine, way: str) -> None:
    plain, match = engine.using(draft_tokens=0), engine.using(accept="match", **WAYS[way])
    accepted = 0
    for i, prompt in enumerate(PROMPTS):
        more = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_p": 0.02} if i % 2 else {}
        params = SamplingParams(**LOOSE, seed=i, **more)
        wanted, done = plain.generate(prompt, params), match.generate(prompt, params)
        assert done.token_ids == wanted.token_ids
        accepted += sum(r.accepted for r in done.rounds)
    assert accepted > 0  # drafts that stood are part of it


@pytest.mark.parametrize("rule", ["exact", "match"])
@pytest.mark.parametrize("drafts", [{}, {"draft_temperature": 0.8}])
def test_a_seed_gives_one_text_and_another_seed_another(engine: Engine, rule: str, drafts: dict[str, Any]) -> None:
    """Again, streamed, from a stored prefix, and among other requests: nothing of them is in the key."""
    each = engine.using(accept=rule, **drafts)
    params = SamplingParams(**LOOSE, seed=5)
    wanted = each.generate(PROMPTS[3], params).token_ids
    each.generate(PROMPTS[0], SamplingParams(**LOOSE))
    assert each.stream(PROMPTS[3], params).finish().token_ids == wanted
    with engine.prefill(PROMPTS[3]) as prefix:
        assert each.generate(prefix, params).token_ids == wanted
    others = {each.generate(PROMPTS[3], SamplingParams(**LOOSE, seed=seed)).token_ids for seed in range(5)}
    assert len(others) == 5 and wanted not in others


def test_no_seed_is_a_fresh_one_that_is_reported(engine: Engine) -> None:
    done = [engine.generate(PROMPTS[3], SamplingParams(**WILD)) for _ in range(3)]
    assert len({each.seed for each in done}) == len({each.token_ids for each in done}) == 3
    again = engine.generate(PROMPTS[3], SamplingParams(**WILD, seed=done[1].seed))
    assert again.token_ids == done[1].token_ids
    together = engine.generate([PROMPTS[1]] * 3, SamplingParams(**WILD))  # in a batch too each has its own
    assert len({each.seed for each in together}) == len({each.token_ids for each in together}) == 3
    for each in together:
        alone = engine.generate(PROMPTS[1], SamplingParams(**WILD, seed=each.seed))
        assert alone.token_ids == each.token_ids


def test_a_lossy_rule_tosses_its_coins_at_temperature_0_too(engine: Engine) -> None:
    lossy, params = engine.using(accept="linear", leniency=0.5), SamplingParams(max_tokens=40, ignore_eos=True)
    together = lossy.generate([PROMPTS[3]] * 3, params)
    assert len({each.seed for each in together} - {None}) == 3 and len({each.token_ids for each in together}) > 1
    for each in together:
        again = SamplingParams(max_tokens=40, ignore_eos=True, seed=each.seed)
        assert lossy.generate(PROMPTS[3], again).token_ids == each.token_ids
    assert engine.generate(PROMPTS[3], params).seed is None  # a lossless one has no coins there


def test_temperature_0_is_greedy_whatever_the_rule_the_seed_and_the_drafts(engine: Engine) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    wanted = engine.using(draft_tokens=0).generate(PROMPTS[4], params).token_ids
    for rule in ("exact", "match"):
        for way in ({}, {"draft_temperature": 1.0}):
            seeded = SamplingParams(max_tokens=40, ignore_eos=True, seed=3, top_k=4, top_p=0.3)
            assert engine.using(accept=rule, **way).generate(PROMPTS[4], seeded).token_ids == wanted
    assert (
        engine.generate(PROMPTS[4], SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0)).token_ids != wanted
    )


@pytest.mark.slow
def test_match_is_seeded_plain_decoding_on_the_embedded_pair() -> None:
    """40 prompts at temperature 0.8, top-p 0.9, under the row-invariant kernels: without excuse."""
    nouns = ("a lighthouse", "compilers", "tea", "the moon", "a lost key", "rivers", "chess", "glass", "bees", "maps")
    asks = ("Write two sentences about {}.", "Why do people like {}?", "List five words about {}.", "def {}():")
    prompts = [ask.format(noun) for noun in nouns for ask in asks]
    ways = [{}, {"draft_temperature": 0.8}, {"draft_temperature": 0.8, "draft_noise": "shared"}]
    accepted = [0] * len(ways)
    with Engine.load("smollm2-135m", max_context=512, threads=1) as engine:
        plain = engine.using(draft_tokens=0)
        engines = [engine.using(accept="match", **way) for way in ways]
        for i, text in enumerate(prompts):
            params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=1000 + i)
            with engine.prefill([{"role": "user", "content": text}]) as prefix:
                wanted = plain.generate(prefix, params).token_ids
                done = engines[i % 3].generate(prefix, params)
                assert done.token_ids == wanted, (text, ways[i % 3])
                accepted[i % 3] += sum(r.accepted for r in done.rounds)
    assert min(accepted) > 0


@pytest.mark.parametrize("way", ["argmax drafts", "drawn drafts", "filters", "lookup"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_both_ends_of_the_linear_rule(engine: Engine, way: str, temperature: float) -> None:
    """At lambda 0 ids and rounds are those of ``exact`` with the same seed (at temperature 0 of plain decoding); at
    lambda 1 every draft stands, and the request says how many of them the target's law rules out."""
    drafts = WAYS[way]
    exact, strict = engine.using(**drafts), engine.using(accept="linear", leniency=0.0, **drafts)
    loose = strict.using(leniency=1.0)
    assert strict.lossless and not loose.lossless and loose.law != strict.law
    ruled_out = 0
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(**LOOSE | {"temperature": temperature}, seed=i)
        wanted, done, all_stand = (each.generate(prompt, params) for each in (exact, strict, loose))
        assert (done.token_ids, done.rounds) == (wanted.token_ids, wanted.rounds) and done.outside == 0
        assert all(r.accepted == len(r.drafted) for r in all_stand.rounds)
        ruled_out += all_stand.outside
        if temperature == 0:
            assert done.token_ids == engine.using(draft_tokens=0).generate(prompt, params).token_ids
    assert ruled_out > 0
    assert loose.using(draft_tokens=0).lossless  # nothing is drafted
    assert loose.using(accept="exact").lossless and loose.using(accept="cactus", leniency=0.3).method.at_zero is None
