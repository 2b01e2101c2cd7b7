"""Offline acceptance is what live decoding finds at the same anchors, and a whole block where the drafter is right."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny

from foldspec import Engine, SamplingParams
from foldspec.bench.offline import leading_drafts, tau_fs
from foldspec.options import MethodOptions

METHODS: tuple[dict[str, Any], ...] = (
    {"context": "full"},
    {"context": "window", "window": 24},
    {"context": "fold", "window": 24, "alpha": 2.0},
    {"context": "fold_auto", "window": 24, "auto_alphas": (2.0,)},
    {"context": "shared_window", "draft_window": 24},
    {"context": "streaming", "sinks": 4, "recents": 20},
    {"context": "yarn", "yarn_ref": 128},
    {"context": "rerope", "window": 24, "rerope_len": 60},
    # what depends on earlier rounds does not offline: means of whole blocks, and a selection of every round
    {"context": "infllm", "window": 24, "infllm_block": 4, "infllm_init": 4, "infllm_topk": 4, "infllm_repr": 0},
    {"context": "cmr", "cmr_chunk": 8, "cmr_topk": 100, "cmr_period": 1},
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The tiny pair whose drafter was trained: it is right now and then."""
    return tiny.load_pair("a_llama_zlab")


@pytest.mark.parametrize("length", [20, 23, 24, 25, 31, 32, 33, 72, 90])
def test_an_anchor_that_was_reached_live_accepts_as_much_offline(engine: Engine, length: int) -> None:
    prompt = tiny.prompt(length, vocabulary=engine.vocabulary)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    compared = 0
    with engine.prefill(prompt) as prefix:
        text = engine.using(draft_tokens=0).generate(prefix, params).token_ids
        engines = [engine.using(**method) for method in METHODS]
        found = leading_drafts(engine, prefix, text, [one.method for one in engines])
        for one, leading in zip(engines, found, strict=True):
            for r in one.generate(prefix, params).rounds:
                anchor = r.anchor_pos - length
                if anchor < len(leading):
                    assert min(leading[anchor], len(r.drafted)) == r.accepted  # a last block may be cut
                    compared += 1
    assert compared > 20


def test_a_selection_is_made_anew_at_every_position(engine: Engine) -> None:
    """A round that commits one token has, live, the selection that offline has at that anchor."""
    prompt = tiny.prompt(90, vocabulary=engine.vocabulary)
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    cmr = engine.using(context="cmr", cmr_chunk=8, cmr_topk=3, cmr_period=1)
    with engine.prefill(prompt) as prefix:
        text = engine.using(draft_tokens=0).generate(prefix, params).token_ids
        (found,) = leading_drafts(engine, prefix, text, [engine.using(context="cmr", cmr_chunk=8, cmr_topk=3).method])
        rounds = cmr.using(draft_tokens=1).generate(prefix, params).rounds
    alone = [(a, b) for a, b in pairwise(rounds) if len(a.committed) == 1]
    compared = [(min(1, found[b.anchor_pos - 90]), b.accepted) for _, b in alone if b.anchor_pos - 90 < len(found)]
    assert len(compared) > 8 and all(offline == live for offline, live in compared)


def test_lookup_drafts_offline_too(engine: Engine) -> None:
    prompt = tiny.prompt(12, vocabulary=engine.vocabulary) * 6
    with engine.prefill(prompt) as prefix:
        text = (prompt[:12] * 4)[:40]
        (found,) = leading_drafts(engine, prefix, text, [MethodOptions(drafter="lookup")])
    assert found == [7] * 33 and tau_fs(found) == 8.0  # the text repeats for ever


def test_fewer_drafts_are_judged_where_fewer_are_verified(engine: Engine) -> None:
    prompt = tiny.prompt(40, vocabulary=engine.vocabulary)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with engine.prefill(prompt) as prefix:
        text = engine.using(draft_tokens=0).generate(prefix, params).token_ids
        all_, two = leading_drafts(
            engine, prefix, text, [MethodOptions(context="full"), MethodOptions(context="full", draft_tokens=2)]
        )
    assert [min(count, 2) for count in all_] == two and len(two) == 25  # after an anchor come five, for both


def test_tau_is_the_mean_over_anchors() -> None:
    assert tau_fs([0, 3, 1, 0]) == 2.0


def test_the_work_of_a_measurement_is_freed(engine: Engine) -> None:
    free = engine.resources.cache.tables.allocator.free_pages
    with engine.prefill(tiny.prompt(40, vocabulary=engine.vocabulary)) as prefix:
        leading_drafts(engine, prefix, list(range(10)), [engine.using(context="fold").method])
    assert engine.resources.cache.tables.allocator.free_pages == free


def test_no_text_is_no_anchor(engine: Engine, tmp_path: Path) -> None:
    with engine.prefill([1, 2, 3]) as prefix:
        assert leading_drafts(engine, prefix, [5, 6], [MethodOptions(context="full")]) == [[]]
