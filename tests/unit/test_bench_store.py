"""What a bench keeps: whole requests only, whatever was torn; resumed with the same plan or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from foldspec.bench.lines import LATER
from foldspec.bench.store import Store
from foldspec.errors import ResourceError, UsageError

ARMS = ("ar", "fold")
PLAN = {"settings": {"seed": 0, "methods": ["ar", "fold"]}, "inputs": {"t 4 a": "00"}}

LINE: dict[str, Any] = {
    "task": "t",
    "length": 4,
    "order": 0,
    "input_sha256": "00",
    "n_in": 4,
    "finish": "length",
    "n_out": 4,
    "rounds": 2,
    "commits": [1, 2],
    "ttft_ms": 2.0,
    "draft_prefill_ms": 0.0,
    "decode_ms": 4.5,
    "tpot_ms": 1.5,
    "output_ids_sha256": "00",
    "clock_disturbed": False,
    "first_diff": None,
    "gap": None,
    "score": None,
    "answered": None,
    "second_opinion": None,
    "bytes_a_round": 100,
    "parts_ms": None,
    "calibration": None,
    "sm_mhz": [1980.0, 1965.0],
    "core_mhz": None,
    "celsius": [60.0, 61.0],
    "throttle": [],
    "compiled": False,
}


def request(name: str) -> list[dict[str, Any]]:
    return [LINE | {"id": name, "method": arm} for arm in ARMS]


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
    with pytest.raises(UsageError, match="line 2: is not JSON"):
        opened(begun, resume=True)


WRONG = {
    "task": (None, [], 3),
    "length": (0, "4", 4.0, True),
    "id": (None, []),
    "method": (None, []),
    "finish": ("cancelled", None, []),
    "n_out": (0, -1, 5, "4", math.nan),
    "rounds": (1, 3, -2, None),
    "commits": ([3, 0], [1, 1], [1, "2"], 3, None),
    "decode_ms": (-1, 0, "4", math.inf, math.nan, 9.0),
    "tpot_ms": (-1.5, 0, None, "1.5", math.nan, 0.5),
    "clock_disturbed": (0, None),
    "first_diff": (-1, 1.5, "1"),
    "gap": (-1, math.nan, "0"),
    "score": (2, -0.5, "1", True),
    "answered": (0, "yes"),
    "second_opinion": (1.5, math.nan),
    "bytes_a_round": (0, -1, None, math.nan),
    "parts_ms": (3, [], {"draft": 1}, {"draft": 1, "verify": 1, "accept": 1, "host": math.nan}),
}


def test_an_edited_line_is_refused(begun: Path) -> None:
    """Whatever is missing, of the wrong kind, impossible, or denied by another figure: none is summed up."""
    path = begun / "requests.jsonl"
    whole = [json.loads(line) for line in path.read_text().splitlines()]
    edited = [({k: v for k, v in whole[1].items() if k != name}, name) for name in LINE if name not in LATER]
    edited += [({**whole[1], name: value}, ".") for name, values in WRONG.items() for value in values]
    beyond = {"decode_ms": 10**400, "logprob": 1e308, "spent": math.nan, "made_up": 0, "bytes_a_round": math.inf}
    edited += [({**whole[1], name: value}, f"^.*: {name} is") for name, value in beyond.items()]
    edited += [(line, "not the line of a run") for line in (None, 3, [], "x")]
    for line, says in edited:
        path.write_text("".join(json.dumps(each) + "\n" for each in [whole[0], line, *whole[2:]]))
        with pytest.raises(UsageError, match=says) as error:
            opened(begun, resume=True)
        assert "requests.jsonl, line 2" in str(error.value), line


def test_what_no_json_reader_takes(begun: Path) -> None:
    path = begun / "requests.jsonl"
    for data in (b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(data + b"\n")
        with pytest.raises(UsageError, match="line 1: is not JSON"):
            opened(begun, resume=True)
        assert path.read_bytes() == data + b"\n"


def test_a_folder_that_no_system_can_make(tmp_path: Path) -> None:
    for name in ("a\0b", "a" * 300):
        with pytest.raises(ResourceError, match="cannot be written"):
            opened(tmp_path / name)


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
