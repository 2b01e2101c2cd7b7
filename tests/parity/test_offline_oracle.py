"""Offline acceptance against what is known of it: the oracle pair, a planted token, a plain scan; and its failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import tiny
from parity.test_oracle import BLOCK, oracle

from foldspec import Engine, SamplingParams
from foldspec.bench.offline import leading_drafts, tau_fs
from foldspec.drafters.dflash import DFlash

PAIR = "a_llama_zlab"
WINDOW, NEW = 24, 60
METHODS = (
    {"context": "full"},
    {"context": "window"},
    {"context": "fold", "alpha": 1.0},
    {"context": "fold", "alpha": 4.0},
    {"drafter": "lookup"},
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    folder = tiny.PAIRS / PAIR
    with Engine.load(
        target=str(folder / "target"), drafter=str(folder / "drafter"), page_size=16, prefill_chunk=50, window=WINDOW
    ) as engine:
        yield engine


def golden_prompt(file: str) -> list[int]:
    prompt: list[int] = tiny.golden_cases(PAIR)[file]["prompts"][0]
    return prompt


def free(engine: Engine) -> list[int]:
    resources = engine.resources
    caches = [resources.cache, resources._draft_cache]
    return [cache.tables.allocator.free_pages for cache in caches if cache is not None]


def test_the_oracle_gives_whole_blocks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By every way of reading; and a token that the target never said ends the count exactly where it stands."""
    folder = tmp_path_factory.mktemp("oracle")
    oracle.build(folder)
    prompt = [(7 * i + 3) % (oracle.P - 1) + 1 for i in range(90)]
    text = oracle.continuation(prompt, 40)
    wrong = [*text[:20], (text[20] + 1) % oracle.P, *text[21:]]
    with Engine.load(target=str(folder / "target"), drafter=str(folder / "drafter"), window=WINDOW) as engine:
        options = [engine.using(**method).method for method in METHODS[:4]]
        with engine.prefill(prompt) as prefix:
            assert engine.generate(prefix, SamplingParams(max_tokens=40, ignore_eos=True)).token_ids == tuple(text)
            for found in leading_drafts(engine, prefix, text, options):
                assert found == [BLOCK - 1] * (40 - (BLOCK - 1)) and tau_fs(found) == BLOCK
            for found in leading_drafts(engine, prefix, wrong, options):
                assert found[:20] == [min(BLOCK - 1, 19 - i) for i in range(20)]
                assert max(found[20:22]) < BLOCK - 1  # the anchor, then the row before it, is the wrong token
                assert found[23:] == [BLOCK - 1] * len(found[23:])


def test_lookup_against_a_scan(engine: Engine) -> None:
    """The rule of prompt lookup and the count, both by looking everywhere."""

    def drafts(ids: Sequence[int]) -> Sequence[int]:
        for n in (3, 2, 1):
            for start in range(len(ids) - n - 1, -1, -1):
                if ids[start : start + n] == ids[-n:]:
                    return ids[start + n : start + n + 7]
        return ()

    prompt = golden_prompt("len0200")
    with engine.prefill(prompt) as prefix:
        text = engine.using(draft_tokens=0).generate(prefix, SamplingParams(max_tokens=NEW, ignore_eos=True)).token_ids
        (found,) = leading_drafts(engine, prefix, text, [engine.using(drafter="lookup").method])
    wanted = []
    for i in range(NEW - 7):
        drafted = drafts([*prompt, *text[: i + 1]])
        agreed = [a == b for a, b in zip(drafted, text[i + 1 :], strict=False)]
        wanted.append(([*agreed, False]).index(False))
    assert found == wanted and sum(found) > 0 and tau_fs(found) == 1 + sum(wanted) / len(wanted)


def test_draft_tokens_cap_the_count_and_anchors_are_common(engine: Engine) -> None:
    prompt = golden_prompt("len0072")
    with engine.prefill(prompt) as prefix:
        text = engine.using(draft_tokens=0).generate(prefix, SamplingParams(max_tokens=NEW, ignore_eos=True)).token_ids
        options = [engine.using(context="full", draft_tokens=count).method for count in (0, 2, 5)]
        none, two, five = leading_drafts(engine, prefix, text, options)
        assert none == [0] * (NEW - 5) and two == [min(2, count) for count in five] and max(five) > 2
        for short in (text[:5], text[:1]):
            assert leading_drafts(engine, prefix, short, options) == [[], [], []]


def test_pages_come_back_when_it_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    before = free(engine)
    with engine.prefill(golden_prompt("len0072")) as prefix:
        for name in ("propose", "absorb", "fork"):
            held = free(engine)
            with monkeypatch.context() as patch:
                patch.setattr(DFlash, name, broken)
                with pytest.raises(RuntimeError, match="planted"):
                    leading_drafts(engine, prefix, range(20), [engine.using(context="fold").method])
            assert free(engine) == held
    assert free(engine) == before
