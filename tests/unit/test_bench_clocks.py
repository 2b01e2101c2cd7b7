"""The device's clock beside each run: who is asked, what a fall does, and that nobody who fails ends a bench."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated import TICK, Engine, FakeClock, bench, cells

from foldspec.bench import clocks, summary
from foldspec.bench.clocks import Clocks, Reading, as_fields, flagged
from foldspec.bench.lines import check_line
from foldspec.bench.schema import check

UUID = "GPU-1b2c"
HOW: dict[str, Any] = {"resamples": 200, "seed": 0, "bandwidth": None}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.collect", lambda: 0)


class Nvml(SimpleNamespace):
    """As much of ``pynvml`` as is asked. ``mhz`` and ``bits`` are what the next readings find."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, mhz: Iterator[int], bits: int = 0, **more: Any) -> None:
        super().__init__(**more)
        self.mhz, self.bits = mhz, bits

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == UUID
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("handle", self.NVML_CLOCK_SM)
        return next(self.mhz)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert (handle, sensor) == ("handle", self.NVML_TEMPERATURE_GPU)
        return 61

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.bits


def forever(value: int) -> Iterator[int]:
    while True:
        yield value


@pytest.fixture
def no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def of_gpu(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> Clocks:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return clocks.of_gpu(UUID)


def measured(found: Clocks, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Lines of a bench that reads these clocks, and the row of its method."""
    time = FakeClock()
    it = bench(
        Engine(time, 32 * TICK), {"sim": Engine(time, 64 * TICK, take=lambda i: 4)}, clocks=found, warmup=0, **settings
    )
    it.run(cells(2))
    done, _ = summary.pairs(it.store.lines, it.labels)
    rows = summary.rows(done, it.labels, **HOW)
    return it.store.lines, next(row for row in rows if row["method"] == "sim")


def test_a_steady_clock_flags_nothing_and_stands_on_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_gpu(monkeypatch, Nvml(forever(1980), bits=0x03))  # idle, and held by a setting: nothing is slowed down
    lines, row = measured(found)
    assert row["flagged"] == 0 and row["n"] == 2 and len(lines) == 6
    for line in lines:
        assert line["sm_mhz"] == [1980, 1980] and line["celsius"] == [61, 61] and line["throttle"] == []
        assert line["core_mhz"] is None and line["compiled"] is False
    assert found.facts() == {"clocks_locked": True, "clocks": {"by": "nvidia-ml-py", "why_not": ""}}


@pytest.mark.parametrize(
    ("mhz", "bits", "flags"),
    [
        ([1980] * 5 + [1780] * 7, 0, 1),  # 10.1% lost in the last run of the first request; the second is as slow
        ([1980] * 5 + [1790] * 7, 0, 0),  # 9.6%
        ([1980] * 4 + [1700] * 8, 0, 1),  # between two runs of the first request
        ([1980] * 6 + [1700] * 6, 0, 0),  # between two requests: each is equally slow for all methods
        ([1700] * 5 + [1980] * 7, 0, 0),  # it rose
        ([1980, 1980, 1900, 1900, 1820, 1740] + [1740] * 6, 0, 1),  # little by little
        ([1980] * 12, 0x20, 2),
        ([1980] * 12, 0x04, 2),
    ],
)
def test_a_fall_or_a_reason_flags_the_request_and_drops_nothing(
    monkeypatch: pytest.MonkeyPatch, mhz: list[int], bits: int, flags: int
) -> None:
    _, row = measured(of_gpu(monkeypatch, Nvml(iter(mhz), bits)), order="fixed")
    assert row["flagged"] == flags and row["n"] == 2 and row["speedup_mean"] == 2.0


def test_what_slows_down_within_a_run_is_seen_after_it() -> None:
    hot = Reading(1980.0, 88.0, ("heat, by hardware",))
    assert as_fields("sm_mhz", Reading(1980.0, 60.0), hot)["throttle"] == ["heat, by hardware"]
    assert as_fields("sm_mhz", hot, Reading(1980.0, 60.0))["celsius"] == [88.0, 60.0]


def test_a_reading_lies_outside_of_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings that take a second leave every figure as it was."""
    time = FakeClock()

    def slow() -> Reading:
        time.pass_(1.0)
        return Reading(1980.0)

    it = bench(Engine(time, 32 * TICK), {"sim": Engine(time, 64 * TICK, take=lambda i: 4)}, clocks=Clocks(slow, "it"))
    it.run(cells(2))
    done, left_out = summary.pairs(it.store.lines, it.labels)
    row = next(row for row in summary.rows(done, it.labels, **HOW) if row["method"] == "sim")
    assert row["speedup_mean"] == 2.0 and row["tpot_ms_median"] == 16 * TICK * 1e3 and not left_out
    assert row["ttft_ms_median"] == 66 * TICK * 1e3 and time.now > 12


def test_a_reader_that_fails_flags_nothing_ends_nothing_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_gpu(monkeypatch, Nvml(iter([1980, 1980, 1980])))  # then StopIteration, which no library should raise
    lines, row = measured(found)
    assert row["flagged"] == 0 and row["n"] == 2 and row["speedup_mean"] == 2.0
    assert [line["sm_mhz"] for line in lines].count(None) == 5
    assert found.facts()["clocks"] == {"by": "nvidia-ml-py", "why_not": "nvidia-ml-py: StopIteration"}


def test_what_is_missing_is_named(no_library: None, no_command: None) -> None:
    found = clocks.of_gpu(UUID)
    lines, row = measured(found)
    why_not = "nvidia-ml-py is not installed; nvidia-smi is not on the path"
    assert found.facts() == {"clocks_locked": None, "clocks": {"by": None, "why_not": why_not}}
    assert row["flagged"] == 0 and all(line["sm_mhz"] is None and line["throttle"] == [] for line in lines)


def test_a_library_that_finds_no_driver_is_named(monkeypatch: pytest.MonkeyPatch, no_command: None) -> None:
    def init() -> None:
        raise RuntimeError("NVML Shared Library Not Found")

    found = of_gpu(monkeypatch, Nvml(forever(1980), nvmlInit=init))
    assert found.facts()["clocks"]["why_not"].startswith("nvidia-ml-py: NVML Shared Library Not Found; nvidia-smi")


@pytest.mark.parametrize(
    ("says", "reading"),
    [
        ("1980, 45, 0x0000000000000000\n", Reading(1980.0, 45.0, (), False)),
        ("1200, 88, 0x0000000000000042\n", Reading(1200.0, 88.0, ("heat, by hardware",), True)),
        ("[N/A], 45, 0x0\n", Reading()),
        ("", Reading()),
    ],
)
def test_the_command_where_there_is_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_library: None, says: str, reading: Reading
) -> None:
    smi = tmp_path / "nvidia-smi"
    query = "clocks.sm,temperature.gpu,clocks_throttle_reasons.active"
    wanted = f"--id={UUID} --query-gpu={query} --format=csv,noheader,nounits"
    smi.write_text(f'#!/bin/sh\n[ "$*" = "{wanted}" ] || exit 3\nprintf "{says}"\n')
    smi.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(smi))
    found = clocks.of_gpu(UUID)
    assert found.read() == reading
    assert found.facts()["clocks"]["by"] == "nvidia-smi"
    assert ("ValueError" in found.facts()["clocks"]["why_not"]) == (reading == Reading())


def test_a_command_that_hangs(monkeypatch: pytest.MonkeyPatch, no_library: None) -> None:
    def hangs(*args: Any, **kwargs: Any) -> Any:
        raise subprocess.TimeoutExpired("nvidia-smi", kwargs["timeout"])

    monkeypatch.setattr("shutil.which", lambda name: "nvidia-smi")
    monkeypatch.setattr("subprocess.run", hangs)
    assert clocks.of_gpu(UUID).read() == Reading()


def test_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for core, khz in ((0, 3_900_000), (1, 800_000), (2, 2_100_000)):
        path = tmp_path / f"cpu{core}" / "cpufreq" / "scaling_cur_freq"
        path.parent.mkdir(parents=True)
        path.write_text(f"{khz}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 2, 7}, raising=False)
    found = clocks.of_cores(tmp_path)
    assert found.read() == Reading(2100.0)  # the fastest of those that it may use
    assert as_fields(found.unit, found.read(), found.read())["core_mhz"] == [2100.0, 2100.0]
    none = clocks.of_cores(tmp_path / "nothing")
    assert none.read() == Reading() and none.facts()["clocks"]["why_not"] == "this system shows no scaling_cur_freq"
    assert clocks.find(torch.device("cpu")).unit == "core_mhz"


def test_a_gpu_is_known_by_its_uuid_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="1b2c"))
    monkeypatch.setattr(clocks, "of_gpu", lambda uuid: asked.append(uuid) or Clocks())
    clocks.find(torch.device("cuda:1"))
    assert asked == [UUID]


def test_lines_are_read_back_and_older_ones_too() -> None:
    time = FakeClock()
    it = bench(Engine(time, 32 * TICK), {"sim": Engine(time, 64 * TICK, take=lambda i: 4)}, warmup=0)
    it.run(cells(1))
    new = it.store.lines[0]
    check_line(new, "here")
    check(new, "request")
    old = {k: v for k, v in new.items() if k not in ("sm_mhz", "core_mhz", "celsius", "throttle", "compiled")}
    check_line(old, "here")
    assert old["sm_mhz"] is None and not flagged([old])
    for name, wrong in (("sm_mhz", [1980]), ("sm_mhz", "fast"), ("throttle", "heat"), ("compiled", 1)):
        with pytest.raises(Exception, match=f"{name} is "):
            check_line({**new, name: wrong}, "here")


# What was compiled or recorded within a run


def counting(grows: Callable[[int], bool]) -> Callable[[Any], int]:
    """A count that grows between its n-th call and the one before where ``grows`` says so."""
    state = {"calls": 0, "count": 0}

    def prepared(engine: Any) -> int:
        state["calls"] += 1
        state["count"] += grows(state["calls"])
        return state["count"]

    return prepared


def test_what_was_compiled_within_a_run_voids_the_request_for_all() -> None:
    time = FakeClock()
    plain = Engine(time, 32 * TICK)
    sim = Engine(time, 64 * TICK, take=lambda i: 4, slow=lambda ids: 8.0 if ids[0] == 0 else 1.0)  # it compiles there
    # calls come in pairs, before and after a run: the 4th is after the second run, the 7th before the fourth
    it = bench(plain, {"sim": sim}, warmup=0, order="fixed", prepared=counting(lambda call: call in (4, 7)))
    it.run(cells(3))
    assert [line["compiled"] for line in it.store.lines] == [False, True, False] + [False] * 6
    done, left_out = summary.pairs(it.store.lines, it.labels)
    assert left_out == {("sim", 16, "compiled"): 1}
    row = next(row for row in summary.rows(done, it.labels, **HOW) if row["method"] == "sim")
    assert row["n"] == 2 and row["speedup_mean"] == 2.0
    for line in it.store.lines:
        line["compiled"] = False  # unseen, it would have moved the figure
    done, _ = summary.pairs(it.store.lines, it.labels)
    row = next(row for row in summary.rows(done, it.labels, **HOW) if row["method"] == "sim")
    assert row["speedup_mean"] < 2.0
