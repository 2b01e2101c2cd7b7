"""What a bench keeps: whole requests only, whatever was torn; resumed with the same plan or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foldspec.bench.store import Store
from foldspec.errors import UsageError

ARMS = ("ar", "fold")
PLAN = {"settings": {"seed": 0, "methods": ["ar", "fold"]}, "inputs": {"t 4 a": "00"}}


def request(name: str) -> list[dict[str, Any]]:
    return [{"task": "t", "length": 4, "id": name, "method": arm, "x": 1.5} for arm in ARMS]


def opened(folder: Path, plan: dict[str, Any] = PLAN, *, resume: bool = False) -> Store:
    store = Store(folder, arms=ARMS)
    store.open(plan, resume=resume)
    return store


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    with opened(tmp_path / "out") as store:
        for name in "ab":
            store.append(request(name))
    return tmp_path / "out"


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as store:
        store.append(request("a"))
        lines = (tmp_path / "out" / "requests.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == request("a") == store.lines


def test_resumed(begun: Path) -> None:
    with opened(begun, resume=True) as store:
        assert store.resumed == 2 and store.has(("t", 4, "a")) and not store.has(("t", 4, "c"))
        store.append(request("c"))
    with opened(begun, resume=True) as store:
        assert store.lines == request("a") + request("b") + request("c")


def test_every_place_at_which_it_can_be_torn(begun: Path) -> None:
    path = begun / "requests.jsonl"
    whole = path.read_bytes()
    half = len("".join(json.dumps(line) + "\n" for line in request("a")))
    for cut in (*range(0, len(whole), 7), half - 1, half, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with opened(begun, resume=True) as store:
            expected = request("a") if cut >= half else []
            assert store.lines == expected, cut
            store.append(request("b"))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines == expected + request("b"), cut


def test_damage_elsewhere_is_no_tear(begun: Path) -> None:
    path = begun / "requests.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{", *lines[2:]]) + "\n")
    with pytest.raises(UsageError, match="line 2 is not JSON"):
        opened(begun, resume=True)


def test_other_settings_or_inputs_are_refused(begun: Path) -> None:
    before = (begun / "requests.jsonl").read_bytes()
    other = {**PLAN, "settings": {**PLAN["settings"], "seed": 1}}
    with pytest.raises(UsageError, match="seed was 0, is 1"):
        opened(begun, other, resume=True)
    with pytest.raises(UsageError, match="inputs"):
        opened(begun, {**PLAN, "inputs": {"t 4 a": "11"}}, resume=True)
    assert (begun / "requests.jsonl").read_bytes() == before


def test_a_folder_that_has_something_is_refused_without_resume(begun: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not empty"):
        opened(begun)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "requests.jsonl").write_text("")
    with pytest.raises(UsageError, match="no plan"):
        opened(tmp_path / "mine", resume=True)
    with opened(tmp_path / "new", resume=True) as store:  # nothing to resume is a beginning
        assert store.lines == []


def test_two_at_once(begun: Path) -> None:
    with opened(begun, resume=True), pytest.raises(UsageError, match="another bench"):
        opened(begun, resume=True)


def test_without_a_folder() -> None:
    store = Store(None, arms=ARMS)
    store.open(PLAN, resume=False)
    store.append(request("a"))
    store.finish({})
    assert store.lines == request("a")
