"""The floors: drafts that look at no model."""

from __future__ import annotations

import pytest
import tiny

from foldspec import Engine, SamplingParams
from foldspec.cache.rows import Rows
from foldspec.drafters import MODEL_FREE, make_model_free
from foldspec.drafters.base import Drafter
from foldspec.noise import Noise
from foldspec.options import WITHOUT_WEIGHTS
from foldspec.records import PointMass


def absorb(drafter: Drafter, request: int, start: int, ids: list[int]) -> None:
    drafter.absorb(Rows.of([request], [start], [len(ids)]), ids, ())


def proposed(drafter: Drafter, request: int, anchor: int, budget: int) -> tuple[int, ...]:
    anchors = Rows.of([request], [drafter.held(request)], [1])
    (proposal,) = drafter.propose(anchors, [anchor], [budget], [Noise(0)])
    assert isinstance(proposal, PointMass)
    return proposal.tokens


def test_the_names_known_without_torch_are_those_that_are_made() -> None:
    assert tuple(MODEL_FREE) == WITHOUT_WEIGHTS


def test_the_last_token_again() -> None:
    drafter = make_model_free("repeat")
    drafter.open(0)
    absorb(drafter, 0, 0, [5, 6])
    assert proposed(drafter, 0, 9, 3) == (9, 9, 9) and proposed(drafter, 0, 9, 99) == (9,) * drafter.max_drafts
    assert proposed(drafter, 0, 9, 0) == ()


def test_the_commonest_token_of_what_is_committed() -> None:
    drafter = make_model_free("unigram")
    drafter.open_prefix(0)
    absorb(drafter, 0, 0, [4, 5, 6, 5])
    drafter.fork(0, 1, [4, 5, 6, 5])
    assert proposed(drafter, 0, 6, 2) == (5, 5)  # as often as 6, and before it
    assert proposed(drafter, 0, 4, 2) == (4, 4)
    absorb(drafter, 1, 4, [6, 6])
    assert proposed(drafter, 1, 6, 1) == (6,) and proposed(drafter, 0, 7, 1) == (5,)
    drafter.truncate(1, 4)
    assert proposed(drafter, 1, 7, 1) == (5,)
    for request in (0, 1):
        drafter.close(request)
    assert vars(drafter)["_ids"] == {}


@pytest.mark.parametrize("name", ["repeat", "unigram"])
def test_the_text_is_the_targets(name: str) -> None:
    with Engine.load(target=str(tiny.PAIRS / "g_llama_oracle" / "target"), drafter=name) as engine:
        ids, params = tiny.prompt(20, 500, seed=1), SamplingParams(max_tokens=60, ignore_eos=True)
        plain = engine.using(draft_tokens=0).generate(ids, params)
        done = engine.generate(ids, params)
    assert done.token_ids == plain.token_ids and done.rounds[0].drafted
