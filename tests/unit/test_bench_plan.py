"""What is to be measured: methods, lengths, inputs, the order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from foldspec.bench.bandwidth import read_bandwidth
from foldspec.bench.inputs import Source, make_cells, parse_lengths, random_source
from foldspec.bench.methods import order, parse_methods
from foldspec.bench.settings import BenchSettings
from foldspec.errors import UsageError


def test_methods() -> None:
    methods = {m.label: m.changes for m in parse_methods("full, ar,fold:alpha=4:window=128,window:draft_tokens=3")}
    assert methods == {
        "ar": {"draft_tokens": 0},
        "full": {"context": "full", "drafter": None},
        "fold:alpha=4:window=128": {"context": "fold", "drafter": None, "alpha": 4.0, "window": 128},
        "window:draft_tokens=3": {"context": "window", "drafter": None, "draft_tokens": 3},
    }
    assert next(iter(methods)) == "ar"
    (_, streaming, layers) = parse_methods("streaming:sinks=2:recents=254,fold:layer_alpha=1/2.5:layer_window=64/128")
    assert streaming.changes == {"context": "streaming", "drafter": None, "sinks": 2, "recents": 254}
    assert layers.changes["layer_alpha"] == (1.0, 2.5) and layers.changes["layer_window"] == (64, 128)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "nothing to compare"),
        ("ar", "nothing to compare"),
        ("ar:window=2", "no options"),
        ("full,full", "twice"),
        ("fold:alpha=2,fold:alpha=2.0", "twice"),
        ("fold:alpha", "no option"),
        ("fold:beta=2", "no option"),
        ("fold:alpha=2:alpha=3", "no option"),
        ("fold:window=x", "not a number"),
        ("fold:alpha=0.5", "at least 1"),
        ("fold:layer_alpha=1/x", "not a number"),
        ("cmr:cmr_chunk=0", "at least 1"),
    ],
)
def test_methods_that_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_methods(text)


def test_order_turns_and_reverses() -> None:
    arms = ["ar", "a", "b", "ar again"]
    orders = [order(arms, i, "rotate") for i in range(8)]
    assert all(sorted(each) == sorted(arms) for each in orders)
    assert [a[::-1] for a in orders[::2]] == orders[1::2]  # ABBA
    places = Counter((arm, place) for each in orders for place, arm in enumerate(each))
    assert set(places.values()) == {2} and len(places) == 16  # every arm in every place equally often
    assert [order(arms, i, "fixed") for i in range(3)] == [arms] * 3


def test_lengths() -> None:
    assert parse_lengths("2k, 512", 4096) == ([512, 2048], [])
    lengths, notices = parse_lengths("512,8k", 8064)
    assert lengths == [512, 8064] and "8k is 8064 here" in notices[0]
    for bad in ("", "k", "-1", "0", "1.5k", "x", "9" * 5000):
        with pytest.raises(UsageError):
            parse_lengths(bad, 4096)
    with pytest.raises(UsageError, match="no length that fits"):
        parse_lengths("512", 0)


class Thing:
    def __init__(self, name: str, ids: tuple[int, ...]) -> None:
        self.id, self.prompt, self.answer = name, ids, None


def test_cells() -> None:
    items = [Thing(str(i), (i, 1, 2, 3)) for i in range(4)] + [Thing("long", (9,) * 50)]
    seen: list[Any] = []

    def source(length: int, count: int) -> list[Thing]:
        seen.append((length, count))
        return items[:count]

    (cell,) = make_cells({"t": Source(source, 40)}, [4], limit=3)
    assert [i.id for i in cell.inputs] == ["0", "1", "2"] and cell.spare.id == "3" and not cell.made_up
    assert seen == [(4, 4)] and len({i.sha256 for i in (*cell.inputs, cell.spare)}) == 4
    (cell,) = make_cells({"t": Source(source, 40)}, [4], limit=5)  # none left to warm up on, and one is too long
    assert len(cell.inputs) == 4 and cell.too_long == 1 and cell.made_up and cell.spare.ids == (3, 2, 1, 0)
    assert cell.spare.sha256 not in {i.sha256 for i in cell.inputs}
    with pytest.raises(UsageError, match="no item"):
        make_cells({"t": Source(lambda length, count: [], 40)}, [4], limit=3)
    with pytest.raises(UsageError, match="same id"):
        make_cells({"t": Source(lambda length, count: [items[0], items[0]], 40)}, [4], limit=1)


def test_requests_that_are_not_each_their_own_are_refused() -> None:
    """As of a chat template that drops the text: what runs once and counts twice narrows every interval."""
    cases = [
        ([Thing("a", (1, 2)), Thing("b", (1, 2)), Thing("c", (3,))], "same prompt"),
        ([Thing("a", ()), Thing("b", (1, 2))], "empty"),
        ([Thing("a", (1, 2, 1))], "to warm up on"),
    ]
    for items, says in cases:
        with pytest.raises(UsageError, match=says):
            make_cells({"t": Source(lambda length, count, items=items: items, 40)}, [4], limit=2)


def test_random_ids_come_from_the_seed() -> None:
    a, b, c = (random_source(50, seed)(20, 3) for seed in (0, 0, 1))
    assert [i.prompt for i in a] == [i.prompt for i in b] != [i.prompt for i in c]
    assert all(len(i.prompt) == 20 and max(i.prompt) < 50 for i in a)
    assert random_source(50, 0)(20, 2)[1].prompt == a[1].prompt  # whatever the count


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0},
        {"limit": 10**9},
        {"bootstrap": 10**9},
        {"max_new": 1},
        {"warmup": -1},
        {"bootstrap": 10},
        {"order": "random"},
        {"methods": "full"} | {"against": "full"},
        {"methods": "full,fold", "against": "ar"},
    ],
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BenchSettings(**wrong)


def test_bandwidth_is_of_a_plausible_size() -> None:
    found = read_bandwidth(size=1 << 24, repeats=3)
    assert found is not None and 0.2 < found < 5000
