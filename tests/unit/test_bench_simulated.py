"""A simulated engine with known times gives back exactly what was put in; each planted fault moves the figure where no
guard looks, and trips the guard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from simulated import TICK, Engine, FakeClock, bench, cells

from foldspec.bench import guards, metrics, summary, timing
from foldspec.bench.methods import AR_AGAIN
from foldspec.bench.protocol import Bench, WarmUp
from foldspec.errors import MeasurementError

HOW = {"resamples": 200, "seed": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to collect here, and it takes longer than all else."""
    monkeypatch.setattr("gc.collect", lambda: 0)


def pair(**fault: Any) -> tuple[Engine, Engine]:
    """AR with 32 ticks a step; a method that commits 4 tokens in a round of 64 ticks: TPOT 16 ticks, speedup 2."""
    clock = FakeClock()
    return Engine(clock, 32 * TICK), Engine(clock, 64 * TICK, take=lambda i: 4, **fault)


def figures(measured: Bench) -> dict[str, dict[str, Any]]:
    done, _ = summary.pairs(measured.store.lines, measured.labels)
    return {row["method"]: row for row in summary.rows(done, measured.labels, bandwidth=100.0, **HOW)}


def measured(plain: Engine, method: Engine, **settings: Any) -> Bench:
    it = bench(plain, {"sim": method}, **settings)
    it.run(cells())
    return it


def test_times_come_back_exactly() -> None:
    it = measured(*pair())
    ar, sim, again = (figures(it)[name] for name in ("ar", "sim", AR_AGAIN))
    assert ar["tpot_ms_median"] == 32 * TICK * 1e3 and sim["tpot_ms_median"] == 16 * TICK * 1e3
    assert sim["speedup_mean"] == 2.0 and sim["speedup_ci"] == [2.0, 2.0] and sim["verdict"] == "gain"
    assert again["speedup_mean"] == 1.0 and again["speedup_ci"] == [1.0, 1.0] and again["verdict"] == "none"
    assert ar["tau_mean"] == ar["tau_pooled"] == 1.0 and sim["tau_mean"] == sim["tau_pooled"] == 4.0
    assert sim["round_in_ar_steps"] == sim["break_even_tau"] == 2.0
    assert sim["ttft_ms_median"] == 66 * TICK * 1e3  # 64 of prefill, 2 to the first token
    assert ar["draft_prefill_ms_median"] == 0 and sim["draft_prefill_ms_median"] == 8 * TICK * 1e3
    assert sim["tpot_incl_draft_prefill_ms_median"] == (16 + 8 / 32) * TICK * 1e3
    assert sim["gb_s"] == pytest.approx(1e6 / (64 * TICK) / 1e9) and sim["bandwidth_share"] == sim["gb_s"] / 100
    assert sim["diff_from_ar"] == 0 and sim["gap_largest"] is None
    for line in it.store.lines:
        assert not line["clock_disturbed"] and sum(line["commits"]) == line["n_out"] - 1 == 32


def test_a_mean_of_ratios_and_no_ratio_of_means() -> None:
    plain, method = pair()
    plain.slow = lambda ids: 4.0 if ids[0] == 0 else 1.0  # one of six requests: AR takes 4 times as long
    row = figures(measured(plain, method))["sim"]
    assert row["speedup_mean"] == (8 + 5 * 2) / 6
    assert row["speedup_ratio_of_means"] == pytest.approx((4 * 32 + 5 * 32) / (6 * 16))


def test_the_last_round_of_a_request_is_cut_and_counted_as_it_is() -> None:
    clock = FakeClock()
    method = Engine(clock, 64 * TICK, take=lambda i: 5)  # 32 tokens in 7 rounds, the last commits 2
    row = figures(measured(Engine(clock, 32 * TICK), method))["sim"]
    assert row["tau_mean"] == pytest.approx(32 / 7) and row["tau_pooled"] == 32 / 7


def test_parts_of_a_round_come_from_runs_of_their_own() -> None:
    plain, method = pair()
    it = measured(plain, method, trace=True)
    row = figures(it)["sim"]
    assert row["parts_ms"] == {"draft": 32 * TICK * 1e3, "verify": 32 * TICK * 1e3, "accept": 0.0, "host": 0.0}
    assert row["speedup_mean"] == 2.0
    warm = sum(w.runs for w in it.warmed if w.method == "sim")
    assert method.calls == warm + 6 + 6


def test_warm_up_ends_when_two_runs_agree_and_says_when_they_do_not() -> None:
    plain, method = pair()
    it = measured(plain, method)
    assert [(w.method, w.runs, w.change, w.settled) for w in it.warmed] == [("ar", 2, 0.0, True), ("sim", 2, 0.0, True)]
    plain, method = pair()
    method.slow = lambda ids: 1.0 + 1 / max(1, method.calls)
    it = bench(plain, {"sim": method}, warmup=3)
    it.warm_up(cells()[0])
    ar, sim = it.warmed
    assert ar.settled and sim.runs == 3 and not sim.settled and sim.change is not None and sim.change > 0.05
    assert it.store.lines == []


def test_warm_up_once_a_length_and_on_no_measured_input() -> None:
    plain, method = pair()
    it = bench(plain, {"sim": method})
    it.run([*cells(2, "a", 16), *cells(2, "b", 16), *cells(2, "a", 32)])
    assert [(w.method, w.length) for w in it.warmed] == [("ar", 16), ("sim", 16), ("ar", 32), ("sim", 32)]
    assert not it.warm_hashes & {line["input_sha256"] for line in it.store.lines}


def test_an_average_weighs_tasks_alike_and_a_method_is_set_against_another() -> None:
    clock = FakeClock()
    plain = Engine(clock, 32 * TICK, slow=lambda ids: 2.0 if len(ids) == 32 else 1.0)
    fast = Engine(clock, 64 * TICK, take=lambda i: 4)
    faster = Engine(clock, 32 * TICK, take=lambda i: 4)
    it = bench(plain, {"fast": fast, "faster": faster})
    it.run([*cells(2, "a", 16), *(replace_length(cell, 16) for cell in cells(8, "b", 32))])
    done, _ = summary.pairs(it.store.lines, it.labels)
    rows = {row["method"]: row for row in summary.averages(done, it.labels, **HOW)}
    assert rows["fast"]["speedup_mean"] == (2 + 4) / 2 and rows["fast"]["speedup_ci"] == [3.0, 3.0]
    assert rows["fast"]["tasks"] == 2 and rows["fast"]["n"] == 10 and rows["fast"]["tau_mean"] == 4.0
    assert rows["fast"]["verdict"] == "few"  # one of the tasks has two requests
    set_against = summary.against(done, it.labels, "fast", **HOW)
    assert [(r["task"], r["method"], r["speedup_mean"]) for r in set_against] == [
        ("a", "faster", 2),
        ("b", "faster", 2),
    ]
    floor = summary.noise(done, **HOW)
    assert floor is not None and floor["n"] == 10 and floor["contains_1"] and floor["width"] == floor["spread"] == 0


def replace_length(cell: Any, length: int) -> Any:
    """The same inputs, filed under another length, so that two tasks meet."""
    inputs = tuple(dataclasses.replace(item, length=length) for item in cell.inputs)
    return dataclasses.replace(cell, length=length, inputs=inputs)


# Faults. Each: what the figure is without guards, and what the guard says.

FAULTS = [
    ("late clock", "speedup_mean", lambda x: x > 2.0, "late clock"),
    ("first token counted", "speedup_mean", lambda x: x < 2.0, "first token"),
    ("tokens after a stop", "speedup_mean", lambda x: x > 2.0, "tokens after a stop id were counted"),
    ("tokens after a stop", "tau_mean", lambda x: x > 4.0, "tokens after a stop id were counted"),
    ("unequal prefill", "speedup_mean", lambda x: x > 2.0, "prefill reused unequally"),
]


@pytest.mark.parametrize(("fault", "figure", "moved", "says"), FAULTS)
def test_a_fault_of_the_engine(fault: str, figure: str, moved: Callable[[float], bool], says: str) -> None:
    off = measured(*pair(fault=fault), guarded=False)
    assert moved(figures(off)["sim"][figure]), figures(off)["sim"][figure]
    with pytest.raises(MeasurementError, match=says):
        measured(*pair(fault=fault))


def test_an_output_that_differs_is_kept_and_said_with_the_gap_of_the_two_best_logits() -> None:
    plain, _ = pair()

    class Other(Engine):
        def stream(self, prefix: Any, params: Any) -> Any:
            stream = super().stream(prefix, params)
            if prefix.token_ids[0] == 0:
                steps = stream._steps

                def changed() -> Any:
                    for piece in steps:
                        done = stream.completion
                        done.token_ids = tuple(99 if i == 5 else t for i, t in enumerate(done.token_ids))
                        yield piece

                stream._steps = changed()
            return stream

    it = measured(plain, Other(plain.clock, 64 * TICK, take=lambda i: 4))
    row = figures(it)["sim"]
    assert row["diff_from_ar"] == 1 and row["gap_largest"] == 0.25 and row["speedup_mean"] == 2.0 and row["n"] == 6
    assert [x["first_diff"] for x in it.store.lines if x["method"] == "sim"] == [5, None, None, None, None, None]


def test_the_first_token_in_the_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A definition that divides by n_out: both sides by the same factor, so TPOT moves where the speedup may not."""
    monkeypatch.setattr(metrics, "tpot", lambda first, last, n_out: (last - first) / n_out)
    off = measured(*pair(), guarded=False)
    assert figures(off)["sim"]["tpot_ms_median"] == 16 * TICK * 1e3 * 32 / 33
    with pytest.raises(MeasurementError, match="is the first in it"):
        measured(*pair())


def test_prefill_of_another_prompt_or_run_afresh() -> None:
    plain, _ = pair()

    class Afresh(Engine):
        def stream(self, prefix: Any, params: Any) -> Any:  # its own prefill of a shorter prompt, and cheaper rounds
            return super().stream(self.prefill(prefix.token_ids[:4]), params)

    other = Afresh(plain.clock, 32 * TICK, take=lambda i: 4)
    off = measured(plain, other, guarded=False)
    assert figures(off)["sim"]["speedup_mean"] == 4.0
    with pytest.raises(MeasurementError, match="another prompt"):
        measured(plain, other)


class CountsWarmUp(Bench):
    """Keeps the first, cold run of the warm-up as if it were a request."""

    def warm_up(self, cell: Any) -> None:
        self.warm_hashes.add(cell.spare.sha256)
        self.store.append(self.request(cell.spare, 0))
        self.warmed.append(WarmUp("sim", cell.length, 1, None))


def test_warm_up_counted() -> None:
    plain, method = pair()
    method.slow = lambda ids: 8.0 if method.calls <= 1 else 1.0  # the first call compiles
    it = bench(plain, {"sim": method})
    bad = CountsWarmUp(it.arms, it.params, it.store, it.stop_ids, it.max_context, clock=it.clock)
    bad.run(cells())
    assert figures(bad)["sim"]["speedup_mean"] == (6 * 2 + 0.25) / 7
    (cell,) = cells()
    inputs = {item.key: item.sha256 for item in cell.inputs}
    with pytest.raises(MeasurementError, match="a warm-up run is among the measurements"):
        guards.check_sample(bad.store.lines, inputs, {cell.spare.sha256})
    with pytest.raises(MeasurementError, match="not in the sample"):
        guards.check_sample(bad.store.lines, inputs, set())
    twice = [*bad.store.lines[3:], bad.store.lines[3]]
    with pytest.raises(MeasurementError, match="counted twice"):
        guards.check_sample(twice, inputs, set())


def test_unpaired_runs() -> None:
    """The method fails on slow requests: what is left of it looks better than it is, unless they go for all."""
    plain, method = pair()
    plain.slow = method.slow = lambda ids: 8.0 if ids[0] < 300 else 1.0  # three of six
    method.fails = lambda ids: ids[0] < 200  # two of them
    it = measured(plain, method)
    ran = {name: [x["tpot_ms"] for x in it.store.lines if x["method"] == name and "tpot_ms" in x] for name in it.labels}
    assert metrics.ratio_of_means(ran["ar"], ran["sim"]) > 3
    with pytest.raises(ValueError, match="shorter"):
        metrics.ratios(ran["ar"], ran["sim"])
    done, left_out = summary.pairs(it.store.lines, it.labels)
    assert left_out == {("sim", 16, "missing"): 2} and figures(it)["sim"]["n"] == figures(it)["ar"]["n"] == 4
    assert figures(it)["sim"]["speedup_mean"] == 2.0 and len(done) == 1


def test_an_output_too_short_for_a_tpot_leaves_all_methods() -> None:
    plain, _ = pair()

    class Short(Engine):
        def stream(self, prefix: Any, params: Any) -> Any:
            self.n_out = 1 if prefix.token_ids[0] == 0 else 33
            return super().stream(prefix, params)

    it = measured(plain, Short(plain.clock, 64 * TICK, take=lambda i: 4))
    _, left_out = summary.pairs(it.store.lines, it.labels)
    assert left_out == {("sim", 16, "short_output"): 1} and figures(it)["ar"]["n"] == 5


def test_a_disturbed_clock_leaves_the_request_out() -> None:
    plain, _ = pair()

    class Disturbed(Engine):
        def stream(self, prefix: Any, params: Any) -> Any:
            stream = super().stream(prefix, params)
            if prefix.token_ids[0] == 0:
                original = stream._steps

                def late() -> Any:
                    for piece in original:
                        if stream.completion.finish_reason:
                            self.clock.pass_(64 * TICK)  # after the engine's last stamp, before the bench's
                        yield piece

                stream._steps = late()
            return stream

    it = measured(plain, Disturbed(plain.clock, 64 * TICK, take=lambda i: 4))
    _, left_out = summary.pairs(it.store.lines, it.labels)
    assert left_out == {("sim", 16, "clock"): 1} and figures(it)["sim"]["n"] == 5


def test_commits_that_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two published evaluators count: the whole last round, past the limit."""
    real = timing.measure

    def over(*args: Any, **kwargs: Any) -> Any:
        run = real(*args, **kwargs)
        return dataclasses.replace(run, commits=(*run.commits[:-1], 9))

    monkeypatch.setattr("foldspec.bench.protocol.measure", over)
    off = measured(*pair(), guarded=False)
    assert figures(off)["sim"]["tau_mean"] > 4.0
    with pytest.raises(MeasurementError, match="the commits say"):
        measured(*pair())
