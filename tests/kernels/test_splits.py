"""How a read is split on a GPU: what is measured, when, and what is kept of it. Clock and launch are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from output_laws import mutant

from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import splits
from foldspec.kernels.multi_read_attention.device import DeviceOutput, DeviceRead, facts_of
from foldspec.kernels.multi_read_attention.splits import MOST_PLACES, SPLITS, Splits, fastest, guess

PAGE, PAGES, SLOTS = 16, 40, 1024


def made(first: int, last: int, *, ring: int = 0, requests: int = 2, rows: int = 3) -> DeviceRead:
    """A read whose rows see ``first .. last-1``."""
    draw = torch.Generator().manual_seed(first + last)
    keys, values = (torch.randn(SLOTS, 2, 8, generator=draw) for _ in range(2))
    q = torch.randn(requests, rows, 4, 8, generator=draw)
    table = torch.stack([torch.randperm(SLOTS // PAGE, generator=draw)[:PAGES] for _ in range(requests)]).int()
    bounds = (torch.full((requests, rows), bound, dtype=torch.int32) for bound in (first, last))
    return DeviceRead(q, keys, values, table, table, *bounds, scale=0.3, page=PAGE, ring=ring)


NEAR, FAR = made(30, 90, ring=200), made(0, 50)


class Device:
    """A GPU whose times are ``seconds(splits)``; it notes what it was asked to run."""

    def __init__(self, seconds: Callable[[tuple[int, ...]], float], name: str = "made-up 9000") -> None:
        self.seconds, self.name = seconds, name
        self.ran: list[Sequence[DeviceRead]] = []

    def launch(self, reads: Sequence[DeviceRead]) -> None:
        self.ran.append(reads)

    def clock(self, run: Callable[[], object]) -> float:
        run()
        return self.seconds(tuple(read.splits for read in self.ran[-1]))

    def splits(self, file: Path | None = None) -> Splits:
        return Splits(file, self.clock, lambda device: self.name)


def best_at(*best: int) -> Callable[[tuple[int, ...]], float]:
    return lambda tried: 1 + sum(abs(a - b) for a, b in zip(tried, best, strict=True))


def tuned(device: Device, reads: Sequence[DeviceRead], file: Path | None = None) -> list[int]:
    one = device.splits(file)
    with one.tuning():
        return [read.splits for read in one.filled(reads, device.launch)]


# -------------------------------------------------------------------------------------------------------- the choice


def test_the_longest_read_comes_first_and_every_count_is_tried() -> None:
    tried: list[tuple[int, ...]] = []

    def seconds(splits: tuple[int, ...]) -> float:
        tried.append(splits)
        return best_at(8, 32)(splits)

    assert fastest([100, 5000], seconds) == (8, 32)
    assert tried == [(1, 1), *((1, n) for n in SPLITS[1:]), *((n, 32) for n in SPLITS[1:])]


@pytest.mark.parametrize("best", SPLITS)
def test_the_fastest_count_is_taken(best: int) -> None:
    assert fastest([1000], best_at(best)) == (best,)


def test_of_counts_that_tie_the_smallest_is_taken() -> None:
    assert fastest([10, 20], lambda tried: 1.0) == (1, 1)
    assert fastest([1000], lambda tried: 2.0 if tried == (1,) else 1.0) == (8,)


def test_the_merge_takes_no_more_than_it_can() -> None:
    tried = []
    fastest([3, 2, 1], lambda splits: tried.append(splits) or -sum(splits))  # type: ignore[func-returns-value]
    assert max(map(sum, tried)) == MOST_PLACES


@pytest.mark.parametrize(
    ("entries", "programs", "processors", "most", "wanted"),
    [
        (131_072, 8, 132, 128, 64),  # one request of 8 kv heads: 33 would do, 64 is the next
        (131_072, 8, 132, 42, 32),  # one of three reads
        (131_072, 16, 132, 128, 32),
        (131_072, 64, 132, 128, 8),
        (131_072, 264, 132, 128, 1),  # full without
        (8_192, 8, 132, 128, 32),  # 32 splits of 256 entries
        (2_100, 8, 132, 128, 8),
        (255, 8, 132, 128, 1),
        (0, 8, 132, 128, 1),
        (131_072, 8, 60, 128, 16),  # a smaller GPU
    ],
)
def test_the_guess(entries: int, programs: int, processors: int, most: int, wanted: int) -> None:
    assert guess(entries, programs, processors, most) == wanted


# ---------------------------------------------------------------------------------------------------- when it measures


def test_it_measures_while_something_warms_up_and_never_in_a_round() -> None:
    device = Device(best_at(8, 16))
    one = device.splits()
    reads = [NEAR, FAR]
    assert one.filled(reads, device.launch) is reads and not device.ran  # nothing known: the launch guesses
    with one.tuning():
        found = one.filled(reads, device.launch)
    assert [read.splits for read in found] == [8, 16] and len(device.ran) == 9
    assert [read.splits for read in one.filled(reads, device.launch)] == [8, 16] and len(device.ran) == 9
    longer = [NEAR, replace(FAR, last=FAR.last + 70)]  # the next round's
    assert [read.splits for read in one.filled(longer, device.launch)] == [8, 16]
    other = [made(0, 50, rows=4)]
    assert one.filled(other, device.launch) is other  # another shape
    kept = [replace(NEAR, splits=1), FAR]
    assert [read.splits for read in one.filled(kept, device.launch)] == [1, 16]  # what is asked for is not changed


def test_an_error_while_it_measures_leaves_nothing_behind() -> None:
    def fail(tried: tuple[int, ...]) -> float:
        raise RuntimeError("no memory")

    device = Device(fail)
    one = device.splits()
    with pytest.raises(RuntimeError, match="no memory"), one.tuning():
        one.filled([NEAR], device.launch)
    assert one.filled([NEAR], device.launch)[0] is NEAR


def test_a_read_that_grows_is_measured_as_long_as_it_may_become() -> None:
    """Over pages that are not the same ones again and again; a window and a ring are measured as they are."""
    device = Device(best_at(1, 1, 1))
    window = made(10, 40)
    tuned(device, [FAR, NEAR, window])
    far, near, same = device.ran[0]
    assert far.first.unique().tolist() == [0] and far.last.unique().tolist() == [PAGES * PAGE]
    assert far.key_table.unique().numel() == SLOTS // PAGE and far.key_table.dtype == torch.int32
    assert int(far.key_table.max()) < SLOTS // PAGE and torch.equal(far.key_table, far.value_table)
    for measured, own in ((near, NEAR), (same, window)):
        assert measured.key_table is own.key_table and measured.last is own.last


def test_the_kernels_of_an_engine_measure() -> None:
    """Through dispatch: the same output, with the splits that were found."""
    seen: list[tuple[int, ...]] = []

    def clock(run: Callable[[], object]) -> float:
        run()
        return best_at(16, 32)(seen[-1])

    kernels, facts = Kernels(splits=Splits(None, clock, str)), facts_of(NEAR)
    plain = kernels.device_attention([NEAR, FAR])
    run = kernels.choose("device_attention", facts)

    def listen(reads: Sequence[DeviceRead], out: torch.Tensor | None) -> DeviceOutput:
        seen.append(tuple(read.splits for read in reads))
        output: DeviceOutput = run(reads, out)
        return output

    kernels._chosen["device_attention", facts] = listen
    with kernels.tuning():
        found = kernels.device_attention([NEAR, FAR])
    assert torch.equal(found.out, plain.out) and seen[-1] == (16, 32) and len(seen) == 10
    kernels.device_attention([NEAR, FAR])
    assert seen[-1] == (16, 32) and len(seen) == 11


# -------------------------------------------------------------------------------------------------------- what is kept


def test_a_later_process_takes_what_was_found(tmp_path: Path) -> None:
    """For this device, these shapes, and these kernels."""
    file = tmp_path / "cache" / "splits.json"
    device = Device(best_at(8, 16))
    assert tuned(device, [NEAR, FAR], file) == [8, 16] and len(device.ran) == 9
    later = Device(best_at(64, 64))
    assert tuned(later, [NEAR, FAR], file) == [8, 16] and not later.ran
    assert tuned(Device(best_at(64)), [FAR], file) == [64]  # another call
    assert tuned(Device(best_at(32)), [made(0, 50, requests=1)], file) == [32]  # another shape
    assert tuned(Device(best_at(1, 32), "other"), [NEAR, FAR], file) == [1, 32]  # another device
    assert tuned(later, [NEAR, FAR], file) == [8, 16] and not later.ran  # and all of that stays
    assert list(file.parent.iterdir()) == [file]
    shapes = json.loads(file.read_text())["choices"]
    assert set(shapes) == {"made-up 9000", "other"} and len(shapes["made-up 9000"]) == 3


def test_other_kernels_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "splits.json"
    tuned(Device(best_at(8)), [FAR], file)
    monkeypatch.setattr(splits, "_source", lambda: "changed")
    assert tuned(Device(best_at(32)), [FAR], file) == [32]
    assert json.loads(file.read_text())["choices"]["made-up 9000"].popitem()[1] == [32]


def test_the_kernels_source_is_what_tells_them_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = splits._source()
    for name in splits.SOURCES:
        (tmp_path / name).write_bytes(Path(splits.__file__).with_name(name).read_bytes())
    monkeypatch.setattr(splits, "__file__", str(tmp_path / "splits.py"))
    assert splits._source() == before
    (tmp_path / "triton_kernels.py").write_text("# one byte more")
    assert splits._source() != before


DAMAGED = [
    "",
    "{",
    "null",
    "[]",
    '{"source": "x"}',
    '{"choices": {}}',
    '"text"',
    '{"source": SOURCE, "choices": []}',
    '{"source": SOURCE, "choices": {"made-up 9000": [1]}}',
    '{"source": SOURCE, "choices": {"made-up 9000": {SHAPE: 8}}}',
    '{"source": SOURCE, "choices": {"made-up 9000": {SHAPE: [7]}}}',
    '{"source": SOURCE, "choices": {"made-up 9000": {SHAPE: ["8"]}}}',
    '{"source": SOURCE, "choices": {"made-up 9000": {SHAPE: [8, 8]}}}',
    '{"source": SOURCE, "choices": {"made-up 9000": {SHAPE: [64, 64, 64]}}}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_counts_for_nothing(text: str, tmp_path: Path) -> None:
    file = tmp_path / "splits.json"
    tuned(Device(best_at(8)), [FAR], file)
    (shape,) = json.loads(file.read_text())["choices"]["made-up 9000"]
    file.write_text(text.replace("SOURCE", json.dumps(splits._source())).replace("SHAPE", json.dumps(shape)))
    assert tuned(Device(best_at(32)), [FAR], file) == [32]
    assert json.loads(file.read_text())["choices"]["made-up 9000"][shape] == [32]  # and it is whole again


def test_a_file_of_bytes_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "splits.json"
    file.write_bytes(b"\xff\xfe\x00")
    assert tuned(Device(best_at(8)), [FAR], file) == [8]
    blocked = tmp_path / "a file"
    blocked.write_text("")
    assert tuned(Device(best_at(8)), [FAR], blocked / "splits.json") == [8]


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "splits.json"
    tuned(Device(best_at(8)), [FAR], file)
    before = file.read_bytes()

    def fail(*names: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        assert tuned(Device(best_at(8, 16)), [NEAR, FAR], file) == [8, 16]
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


# ----------------------------------------------------------------------------------------------------- the GPU's clock


def test_the_clock_replays_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA would hear of it: a call to compile, ten recorded, five replays of which the first does not count."""
    told: list[str] = []
    elapsed = iter([500.0, 40.0, 30.0, 50.0, 60.0])  # ms

    class Graph:
        def replay(self) -> None:
            told.append("replay")

    class Recording:
        def __init__(self, graph: Graph) -> None:
            pass

        def __enter__(self) -> None:
            told.append("record")

        def __exit__(self, *error: object) -> None:
            told.append("recorded")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("mark")

        def synchronize(self) -> None:
            told.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return next(elapsed)

    for name, stand_in in (("CUDAGraph", Graph), ("graph", Recording), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    assert splits.device_seconds(lambda: told.append("run")) == pytest.approx(0.003)
    once = ["mark", "replay", "mark", "wait"]
    assert told == ["run", "wait", "record", *["run"] * 10, "recorded", *once * 5]


# -------------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (") < best:", ") > best:"),
        (") < best:", ") <= best:"),
        ("key=lambda i: -lengths[i]", "key=lambda i: lengths[i]"),
        ("sum(tried) <= MOST_PLACES and ", ""),
    ],
)
def test_a_mistake_in_the_choice_is_seen(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "fastest", mutant(splits, old, new)["fastest"])
    checks: list[Callable[[], None]] = [
        test_the_longest_read_comes_first_and_every_count_is_tried,
        lambda: test_the_fastest_count_is_taken(8),
        test_of_counts_that_tie_the_smallest_is_taken,
        test_the_merge_takes_no_more_than_it_can,
    ]
    with pytest.raises(AssertionError):
        for check in checks:
            check()
