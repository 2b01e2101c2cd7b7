"""The rule ``exact``, and the names of rules."""

from __future__ import annotations

import pytest
import torch
from deciding import VERIFYING, decide, targets

from foldspec import FoldspecError
from foldspec.acceptance import RULES, make_rule
from foldspec.records import PointMass, Verdict


def logits_of(*tokens: int) -> torch.Tensor:
    """Rows whose argmax are these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 8).float()


def test_drafts_stand_while_they_are_the_argmax_and_the_row_after_them_gives_the_next_token() -> None:
    proposals = [PointMass((1, 2, 3)), PointMass(()), PointMass((4,)), PointMass((5, 6))]
    rows = logits_of(1, 2, 7, 0, 6, 4, 3, 0, 6, 1)
    assert decide("exact", rows, proposals) == [Verdict(2, 7), Verdict(0, 6), Verdict(1, 3), Verdict(0, 0)]


def test_of_equal_logits_the_lowest_id_is_the_argmax() -> None:
    assert decide("exact", torch.zeros(1, 50_000), [PointMass(())]) == [Verdict(0, 0)]


@pytest.mark.parametrize("rule", VERIFYING)
def test_of_two_tied_logits_the_higher_id_is_refused_as_a_draft(rule: str) -> None:
    """As plain decoding would: a draft of the lower id stands, one of the higher is replaced by the lower."""
    rows = logits_of(5, 0)
    rows[0, 2] = rows[0, 5]
    assert decide(rule, rows, [PointMass((2,))]) == [Verdict(1, 0)]
    assert decide(rule, rows, [PointMass((5,))]) == [Verdict(0, 2)]
    assert decide(rule, rows[:1], [PointMass(())]) == [Verdict(0, 2)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_of_their_request_that_names_the_position(bad: float) -> None:
    """-inf among others is a law that rules an id out, and no error."""
    rows = logits_of(0, 1, 2, 3)
    rows[2, 3], rows[0, 5] = bad, -float("inf")
    good, broken = targets(rows, [PointMass((0,)), PointMass((2,))], prompt=(5, 6, 7))
    assert (good.sound, broken.sound) == (2, 0)
    rows[2, 3], rows[3, 0] = 0.0, bad
    assert targets(rows, [PointMass((0,)), PointMass((2,))], prompt=(5, 6, 7))[1].sound == 1


def test_an_unknown_rule_names_the_known_ones() -> None:
    with pytest.raises(FoldspecError, match="known: " + ", ".join(RULES)):
        make_rule("exakt")
