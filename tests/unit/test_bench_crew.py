"""A bench that several devices measure, all of them in this process: what is kept, in which order, and who dies."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import simulated
from band import Band
from simulated import TICK, FakeClock, cells
from tiny import PAIRS

from foldspec.bench import crew
from foldspec.bench.cluster import cores_each
from foldspec.bench.crew import Hand, Reply, admitted
from foldspec.bench.inputs import make_cells
from foldspec.bench.protocol import Bench, Place
from foldspec.bench.session import Session
from foldspec.bench.settings import BenchSettings
from foldspec.bench.sources import About, make_sources
from foldspec.engine import Engine
from foldspec.errors import FoldspecError, MeasurementError, UsageError

CELLS = [*cells(5, "a", 16), *cells(4, "b", 16), *cells(3, "a", 32)]
PLACES = [Place(i, number) for i, cell in enumerate(CELLS) for number in range(len(cell.inputs))]


@pytest.fixture(autouse=True)
def quick_and_a_busy_machine_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.collect", lambda: 0)
    monkeypatch.setattr("foldspec.bench.guards.clock_disturbed", lambda run: False)
    monkeypatch.setattr("foldspec.bench.session.read_bandwidth", lambda device: None)


def bench() -> Bench:
    clock = FakeClock()
    plain = simulated.Engine(clock, 8 * TICK, slow=lambda ids: 1 + ids[0] % 7)
    return simulated.bench(plain, {"sim": simulated.Engine(clock, 12 * TICK, take=lambda i: 1 + i % 3)}, warmup=2)


def member() -> Callable[[Place], Reply]:
    """A device with a clock of its own."""
    own = bench()

    def measure(place: Place) -> Reply:
        before = len(own.warmed)
        lines = own.measure(CELLS, place)
        return Reply(lines, own.warmed[before:], 1)

    return measure


def measured(band: Band) -> tuple[list[dict[str, Any]], list[tuple[str, Sequence[Place]]], Bench]:
    """What the store has at the end, what was lost, and the bench."""
    it, lost = bench(), list[tuple[str, Sequence[Place]]]()
    it.run(CELLS, lambda places: crew.spread(band, places, lambda *told: lost.append(told)))
    return it.store.lines, lost, it


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["task"], line["length"], line["id"]


def without(lines: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Lines in an order of their own, without some fields."""
    kept = [{k: v for k, v in line.items() if k not in names} for line in lines]
    return sorted(kept, key=lambda line: (*key(line), line["order"]))


def serial() -> list[dict[str, Any]]:
    it = bench()
    it.run(CELLS)
    return it.store.lines


@pytest.mark.parametrize("seed", range(4))
def test_in_whatever_order_the_lines_are_those_of_one_device(seed: int) -> None:
    draw = random.Random(seed)
    band = Band([member() for _ in range(3)], first=draw.choice)
    lines, lost, it = measured(band)
    assert without(lines, "device") == without(serial(), "device") and not lost
    assert [key(line) for line in lines] != [key(line) for line in serial()]  # they did come in another order
    assert [place for _, place in band.handed] == PLACES and band.most == 3
    devices = {key(line): {other["device"] for other in lines if key(other) == key(line)} for line in lines}
    assert all(len(each) == 1 for each in devices.values())  # a request is not torn
    asked = Counter(device for (device,) in devices.values())
    assert [told["requests"] for told in band.devices] == [asked[i] for i in range(3)]
    warmed = Counter((w.method, w.length) for w in it.warmed)  # each device by itself, once a length
    assert warmed["ar", 16] == warmed["sim", 16] == 3 and 1 <= warmed["ar", 32] <= 3


def test_a_slow_device_holds_nobody_up() -> None:
    band = Band([member() for _ in range(3)], first=max)  # device 0 is done when nobody else is left
    lines, lost, _ = measured(band)
    assert without(lines, "device") == without(serial(), "device") and not lost
    assert band.devices[0]["requests"] == 1 and lines[-1]["device"] == 0


def test_what_a_device_died_over_is_done_by_another() -> None:
    band = Band([member() for _ in range(3)], dies=lambda device, place: device == 1)
    lines, lost, _ = measured(band)
    assert without(lines, "device") == without(serial(), "device")
    assert lost == [("device 1 is gone (it was shot)", ())]
    assert [device for device, place in band.handed if place == PLACES[1]] == [1, 0]  # the next that is free
    assert band.devices[1]["requests"] == 0 and {line["device"] for line in lines} == {0, 2}


def test_a_request_that_kills_two_devices_is_named_and_the_others_go_on() -> None:
    poison = PLACES[4]
    band = Band([member() for _ in range(3)], dies=lambda device, place: place == poison)
    lines, lost, _ = measured(band)
    assert [places for _, places in lost] == [(), (), (poison,)] and lost[-1][0] == "2 devices died over it"
    left = [line for line in serial() if key(line) != poison.item(CELLS).key]
    assert without(lines, "device") == without(left, "device")


def test_when_no_device_is_left_the_rest_is_told() -> None:
    band = Band([member()], dies=lambda device, place: place == PLACES[2])
    lines, lost, _ = measured(band)
    assert list(dict.fromkeys(map(key, lines))) == [place.item(CELLS).key for place in PLACES[:2]]
    assert [places for _, places in lost] == [(), tuple(PLACES[2:])] and lost[-1][0] == "no device is left"


def test_an_error_of_foldspecs_own_ends_the_bench_and_what_was_done_stays() -> None:
    good = member()

    def bad(place: Place) -> Reply | FoldspecError:
        return MeasurementError("late clock", where="here") if place == PLACES[3] else good(place)

    it = bench()
    with pytest.raises(MeasurementError, match="here: late clock"):
        it.run(CELLS, lambda places: crew.spread(Band([bad]), places, lambda why, places: None))
    assert list(dict.fromkeys(map(key, it.store.lines))) == [place.item(CELLS).key for place in PLACES[:3]]


# Sessions over a tiny pair: what a device makes of the same words

SETTINGS = BenchSettings(
    methods="window:window=16,full:accept=linear:leniency=0.5",
    tasks="random",
    lengths="12,24",
    limit=2,
    max_new=7,
    warmup=1,
    ignore_eos=True,
    calibrate=True,
    bootstrap=100,
    temperature=1.0,  # of drawn drafts and a lossy rule's coins: seeds matter
)


def session(
    settings: BenchSettings = SETTINGS, out: Path | None = None, resume: bool = False, **options: Any
) -> Session:
    pair = {side: str(PAIRS / "a_llama_zlab" / side) for side in ("target", "drafter")}
    engine = Engine.load(**pair, threads=1, draft_temperature=1.0, **options)
    about = About(engine.vocabulary, engine.max_context, engine.tokenizer, engine.template)
    sources = make_sources(settings.task_names, about, seed=settings.seed, max_new=settings.max_new)
    cells = make_cells(sources, [int(n) for n in settings.lengths.split(",")], limit=settings.limit)
    return Session(engine, settings, cells, out=out, resume=resume)


TIMES = ("ttft_ms", "draft_prefill_ms", "decode_ms", "tpot_ms", "device")


def told(own: Session) -> list[dict[str, Any]]:
    """The lines of a session without times, which are the machine's."""
    lines = without(own.store.lines, *TIMES)
    for line in lines:
        for run in (line["calibration"] or {}).values():
            run.pop("ms", None)
    return lines


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a result in its own order, without times."""
    rows = [dict(zip(result["requests"]["columns"], row, strict=True)) for row in result["requests"]["rows"]]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def alone() -> Session:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foldspec.bench.guards.clock_disturbed", lambda run: False)
        own = session()
        own.run()
    return own


def hands(count: int) -> list[Hand]:
    found = [Hand(session, {}) for _ in range(count)]
    for hand in found:
        assert not isinstance(hand.begin(), FoldspecError)
    return found


def test_a_crew_gives_the_result_of_one_engine(alone: Session, tmp_path: Path) -> None:
    """Out of order, a death and a resumed rest: ids, commits, rounds and drafts' laws are those of the serial run."""
    own = session(out=tmp_path / "out")
    model = weakref.ref(own.bench.arms[0].engine.resources.found.model)
    own.let_go()
    assert model() is None  # the devices have all of the memory
    both = hands(2)
    first = Band([hand.measure for hand in both], first=max, dies=lambda device, place: place == Place(1, 1))
    heard: list[str] = []
    crew.run(own, first, heard.append)
    half = own.result()
    own.close()
    assert not half["complete"] and half["notices"][-3:] == heard and "random 24 1 was not measured" in heard[-1]
    warmed = Counter((one["method"], one["length"]) for one in half["warmup"])  # one device never came to 24
    assert warmed == {(label, n): 2 if n == 12 else 1 for label in list(own.methods) for n in (12, 24)}
    assert half["env"]["devices"] == first.devices and half["env"]["peak_mem_bytes"] > 2**20

    own = session(out=tmp_path / "out", resume=True)
    crew.run(own, Band([both[0].measure]), heard.append)
    whole, expected = own.result(), alone.result()
    own.close()
    assert whole["complete"] and whole["resumed"] == 3 and own.plan == alone.plan
    assert told(own) == told(alone) and table(whole) == table(expected)
    for name in ("tau_mean", "tau_ci", "tau_pooled", "diff_from_ar", "commit_counts", "n"):
        assert [row[name] for row in whole["summary"]] == [row[name] for row in expected["summary"]]
    for name in ("method", "profile", "d", "d_ci", "mu", "spent", "spent_ci", "tokens_a_round_modelled"):
        assert [row[name] for row in whole["calibration"]["methods"]] == [
            row[name] for row in expected["calibration"]["methods"]
        ]


def test_a_device_that_is_not_the_same_is_refused(alone: Session) -> None:
    same = Hand(session, {}).begin()
    assert admitted(same, alone.plan, "device 0")["machine"]
    other = Hand(session, {"page_size": 16}).begin()
    with pytest.raises(UsageError, match=r"device 1: is not as this process: methods\.ar\.page_size was 256, is 16"):
        admitted(other, alone.plan, "device 1")
    lacking = Hand(session, {"max_context": 10**9}).begin()
    with pytest.raises(UsageError, match="device 2: --max-context: "):
        admitted(lacking, alone.plan, "device 2")


@pytest.mark.parametrize(
    ("cpus", "actors", "cores"),
    [
        ([2], 2, 1),
        ([16], 3, 5),
        ([8, 8], 2, 8),
        ([8, 8], 3, 4),
        ([64, 4], 2, 32),
        ([2], 3, 0),
        ([], 1, 0),
        ([0, 1], 1, 1),
    ],
)
def test_cores_are_shared_out(cpus: list[int], actors: int, cores: int) -> None:
    assert cores_each(cpus, actors) == cores
