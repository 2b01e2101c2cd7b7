"""What the rooms hand one another, and the three numbers that a completion computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from deciding import decide, strict

from foldspec.acceptance import RULES, make_rule
from foldspec.context import METHODS, make_method
from foldspec.context.base import DrafterLayer, Opened
from foldspec.errors import UsageError
from foldspec.models.rope import Rope
from foldspec.options import MethodOptions
from foldspec.records import Completion, DrafterFacts, Piece, PointMass, Round, Verdict


def rounds(*committed: int) -> list[Round]:
    return [Round(5 + i, (1, 2, 3), max(0, n - 1), (9,) * n) for i, n in enumerate(committed)]


def test_tau_is_committed_tokens_a_round() -> None:
    """The target's own token counts; the first token, which prefill gives, belongs to no round."""
    done = Completion((1, 2), token_ids=(9,) * 8, rounds=rounds(4, 1, 2))
    assert done.tau == pytest.approx(7 / 3)
    assert Completion((1,), token_ids=(9,)).tau is None


def test_a_round_that_was_cut_counts_what_was_emitted() -> None:
    """``accepted`` counts agreeing drafts all the same."""
    cut = Round(5, (1, 2, 3), accepted=3, committed=(1, 2))
    assert Completion((1,), token_ids=(9, 1, 2), rounds=[cut]).tau == 2


def test_drafts_by_position_leave_out_what_lies_behind_a_cut() -> None:
    """A position counts the rounds that drafted it; short blocks have fewer, and a cut hides what follows it."""
    whole = [Round(5, (1, 2, 3), 2, (1, 2, 9)), Round(8, (4, 5, 6), 0, (9,)), Round(9, (7,), 1, (7, 9))]
    assert Completion((1,), rounds=whole).by_position == [(2, 3), (1, 2), (0, 2)]
    cut = [Round(11, (1, 2, 3), 3, (1,)), Round(5, (1, 2, 3), 1, (1,)), Round(6, (), 0, (9,))]
    assert Completion((1,), rounds=[*whole, *cut]).by_position == [(4, 5), (1, 2), (0, 2)]
    assert Completion((1,), rounds=[Round(6, (), 0, (9,))]).by_position == Completion((1,)).by_position == []


def test_seconds_a_token_leave_the_first_one_out() -> None:
    done = Completion((1,), token_ids=(9,) * 5, first_time=2.0, last_time=4.0)
    assert done.tpot == pytest.approx(0.5) and done.ttft == 2.0


@pytest.mark.parametrize("ids", [(), (9,)])
def test_one_token_has_no_seconds_a_token(ids: tuple[int, ...]) -> None:
    assert Completion((1,), token_ids=ids, first_time=2.0, last_time=2.0).tpot is None
    assert Completion((1,)).ttft is None and Completion((1,), token_ids=(9, 9)).tpot is None


def test_records_cannot_be_changed() -> None:
    facts = DrafterFacts("here", 8, 16, (0, 1), 4, 15)
    for record in (PointMass((1,)), Verdict(0, 1), Round(0, (), 0, (1,)), Piece("", (1,)), facts):
        for field in dataclasses.fields(record):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(record, field.name, None)


def test_completions_do_not_share_their_rounds() -> None:
    first, second = Completion((1,)), Completion((1,))
    first.rounds.append(Round(0, (), 0, (1,)))
    assert second.rounds == []


# -------------------------------------------------------------------------------------------- names that users can give


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_made_and_reads_the_block_once(name: str) -> None:
    method = make_method(
        MethodOptions(context=name, window=8, alpha=2.0, yarn_ref=64), (DrafterLayer(), DrafterLayer(6, True)), 5
    )
    state = method.begin(Opened(64, Rope(torch.ones(2), theta=1e4), 1.0, lambda *_: torch.empty(0)))
    for layer in (0, 1):
        assert method.stores(layer).rotated or method.stores(layer).buffer
        for n in (0, 3, 8, 9, 40):
            reads = method.reads(layer, state, n, None)
            assert [read.block for read in reads].count(True) == 1
            assert all(len(read.first) == len(read.last) == len(read.query_at) == 5 for read in reads)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown context method 'fould'; known: full, window, fold"):
        make_method(MethodOptions(context="fould"), (), 1)
    with pytest.raises(UsageError, match="unknown acceptance rule 'strict'; known: exact"):
        make_rule("strict")


@pytest.mark.parametrize("name", RULES)
def test_every_rule_states_its_law(name: str) -> None:
    rule = strict(name)
    assert rule.law() and isinstance(rule.lossless, bool)


def test_the_exact_rule() -> None:
    """Two requests: the drafts stand up to the first that is not the target's argmax, whose own token follows."""
    wanted = [4, 7, 2, 9, 1, 3]  # rows of the first request (3 drafts), then of the second (1 draft)
    logits = torch.full((6, 10), -1.0)
    logits[range(6), wanted] = 1.0
    first, second = decide("exact", logits, [PointMass((4, 7, 5)), PointMass((1,))])
    assert first == Verdict(2, 2) and second == Verdict(1, 3)
    assert decide("exact", logits[:4], [PointMass((4, 7, 2))]) == [Verdict(3, 9)]
    assert decide("exact", logits[:2], [PointMass(()), PointMass(())]) == [Verdict(0, 4), Verdict(0, 7)]
    assert decide("exact", torch.zeros(1, 10), [PointMass(())]) == [Verdict(0, 0)]  # a tie: the lowest id


def test_what_a_verdict_commits() -> None:
    proposal = PointMass((4, 7, 5))
    assert Verdict(1, 9).run(proposal) == (4, 9) and Verdict(0, 9).run(PointMass(())) == (9,)
    assert Verdict(3, 9, followed=False).run(proposal) == (4, 7, 5)
