"""The axes of a sweep: what a user may write, what is left to the drafter, and the methods that come of them."""

from __future__ import annotations

from typing import Any

import pytest

from foldspec.bench.axes import Asked, Axes
from foldspec.bench.methods import parse_methods
from foldspec.errors import UsageError


def axes(asked: Asked | None = None, **known: Any) -> Axes:
    known = {"drafter": None, "takes_steps": True, "drafts": 4, "temperature": 1.0} | known
    return (asked or Asked()).axes(**known)


def labels(made: Axes) -> list[str]:
    return [point.label for point in made.points]


def test_a_point_for_every_combination_and_the_drafter_alone_for_every_drafting() -> None:
    made = axes(Asked(draft_tokens="4,8", steps="2", confidence=".5", leniency="0,.4"))
    base = [
        f"full:draft_tokens={drafts}:{effort}:draft_temperature=1"
        for drafts in (4, 8)
        for effort in ("steps=2", "confidence=0.5")
    ]
    rules = ("linear:leniency=0", "linear:leniency=0.4", "unverified")
    assert labels(made) == ["ar", *(f"{each}:accept={rule}" for each in base for rule in rules)]
    assert [p.kind for p in made.points] == ["verifier", *["point", "point", "drafter"] * 4]
    last = made.points[-2]
    assert (last.draft_tokens, last.effort, last.leniency) == (8, "confidence 0.5", 0.4)
    assert [m.label for m in parse_methods(made.methods)] == labels(made)  # bench reads them as they are
    assert made.as_dict() == {
        "draft_tokens": [4, 8],
        "effort": ["K 2", "confidence 0.5"],
        "accept": "linear",
        "leniency": [0.0, 0.4],
    }


def test_what_is_not_asked_for_is_the_drafters() -> None:
    assert axes().efforts == (("steps", 1), ("steps", 2), ("steps", 4)) and axes().draft_tokens == (4,)
    assert axes(drafts=2).efforts == (("steps", 1), ("steps", 2))  # more steps than places are none
    of_one = axes(takes_steps=False, drafts=5)
    assert of_one.efforts == (None,) and of_one.as_dict()["effort"] == ["K 1"]
    assert labels(of_one)[1] == "full:draft_tokens=5:draft_temperature=1:accept=linear:leniency=0"
    assert axes(Asked(entropy_bound=".1")).efforts == (("entropy_bound", 0.1),)  # any effort, and the steps are none
    free = axes(drafter="lookup", takes_steps=False, drafts=7)
    assert labels(free)[1] == "lookup:draft_tokens=7:accept=linear:leniency=0"  # it has no law to draw from
    assert labels(axes(Asked(accept="exact"), takes_steps=False)) == [
        "ar",
        "full:draft_tokens=4:draft_temperature=1:accept=exact",
        "full:draft_tokens=4:draft_temperature=1:accept=unverified",
    ]


def test_drafts_are_drawn_as_the_requests_are_unless_it_is_said() -> None:
    assert axes(temperature=0.7).draft_temperature == 0.7 and axes(temperature=0.0).draft_temperature == 0
    assert "draft_temperature" not in labels(axes(temperature=0.0))[1]
    assert axes(Asked(draft_temperature=0.0)).draft_temperature == 0


@pytest.mark.parametrize("rule", ["linear", "lenience", "cactus"])
def test_the_first_leniency_of_every_rule_is_its_strict_end(rule: str) -> None:
    from foldspec.acceptance import make_rule

    strict, *others = axes(Asked(accept=rule)).leniency
    assert make_rule(rule, leniency=strict).lossless
    assert others and not any(make_rule(rule, leniency=each).lossless for each in others)


def test_options_of_the_rule_and_of_the_context_stand_in_every_label() -> None:
    made = axes(Asked(accept="cactus:divergence=modified", context="fold:alpha=4", leniency="0.1"), takes_steps=False)
    assert labels(made)[1] == (
        "fold:alpha=4:draft_tokens=4:draft_temperature=1:accept=cactus:divergence=modified:leniency=0.1"
    )
    assert made.as_dict()["accept"] == "cactus:divergence=modified"


def test_a_number_in_a_label_is_the_number() -> None:
    made = axes(Asked(leniency="0.123456789,.5"), takes_steps=False)
    assert [p.label.rpartition("=")[2] for p in made.points[1:3]] == ["0.123456789", "0.5"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"steps": ""}, "--steps: names nothing"),
        ({"steps": "1,,2"}, "--steps: has an empty place"),
        ({"steps": "1,2,1"}, "--steps: 1 is named twice"),
        ({"leniency": "0,.5,0.50"}, "--leniency: 0.5 is named twice"),
        ({"steps": "1.5"}, "--steps: '1.5' is not a number"),
        ({"steps": "0"}, "--steps: must be a whole number of at least 1"),
        ({"draft_tokens": "0,4"}, "--draft-tokens: 0 drafts are plain decoding"),
        ({"confidence": "1.1"}, "--confidence: must be a finite number"),
        ({"entropy_bound": "nan"}, "--entropy-bound: must be a finite number"),
        ({"leniency": "0,1.1"}, "--leniency: must be a finite number of at least 0 and at most 1"),
        ({"leniency": "0,1", "accept": "lenience"}, "--leniency: must be a finite number above 0"),
        ({"leniency": "0", "accept": "match"}, "--leniency: changes nothing about the rule match"),
        ({"accept": "unverified"}, "--accept: 'unverified' is no rule that a sweep varies"),
        ({"accept": "linear:leniency=0.3"}, "--accept linear:leniency=0.3: leniency has an option of its own"),
        ({"accept": "exact:draft_temperature=1"}, "draft_temperature has an option of its own; use --draft-temp"),
        ({"accept": "cactus:divergence=kl"}, "--accept cactus:divergence=kl: must be one of taylor"),
        ({"accept": "linear:"}, "--accept linear:: '' is no option of a method"),
        ({"context": "lookup"}, "--context lookup: is not one context method"),
        ({"context": "full,fold"}, "--context full,fold: is not one context method"),
        ({"context": "full:steps=2"}, "--context full:steps=2: steps has an option of its own; use --steps"),
        ({"draft_temperature": -1.0}, "--draft-temperature: must be a finite number"),
    ],
)
def test_what_means_nothing_is_refused_by_its_option(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        Asked(**asked)
    assert says in str(error.value)


def test_points_that_would_all_be_one_are_refused() -> None:
    """At temperature 0 a token that is not the target's argmax has no probability, and cactus raises none."""
    with pytest.raises(UsageError, match="all points would be one"):
        axes(Asked(accept="cactus"), temperature=0.0)
    axes(Asked(accept="cactus", leniency="0.1"), temperature=0.0)
    axes(Asked(accept="lenience"), temperature=0.0)
    with pytest.raises(UsageError, match="lookup reads no context"):
        axes(Asked(context="fold"), drafter="lookup")
