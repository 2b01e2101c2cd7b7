"""A method that does not say what plain decoding says has no speedup: the probe, the measured requests, the excuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from simulated import TICK, Engine, FakeClock, bench, cells

from foldspec.bench import parity, summary
from foldspec.bench.methods import AR
from foldspec.bench.protocol import Arm
from foldspec.bench.report import as_csv, remarks

IDS = tuple(range(100))
HOW: dict[str, Any] = {"lossless": True, "made_up": "", "dtype": "float32"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.collect", lambda: 0)


class Altered(Engine):
    """Says one token that is not plain decoding's, in answer to prompts that begin with ``where``."""

    at = 5
    where: Sequence[int] = (0,)

    def stream(self, prefix: Any, params: Any) -> Any:
        stream = super().stream(prefix, params)
        steps = stream._steps

        def changed() -> Any:
            for piece in steps:
                done = stream.completion
                if prefix.token_ids[0] in self.where:
                    done.token_ids = tuple(99 if i == self.at else t for i, t in enumerate(done.token_ids))
                yield piece

        stream._steps = changed()
        return stream


def arms(method: Engine, gap: float = 0.25, **more: Any) -> list[Arm]:
    """Plain decoding, whose two best logits are ``gap`` apart everywhere, and a method."""
    plain = Engine(method.clock, 32 * TICK)
    prefill = plain.prefill

    def close(prompt: Sequence[int]) -> Any:
        prefix = prefill(prompt)
        prefix.logits = np.array([[0.5, 3.0, 3.0 - gap]])
        return prefix

    plain.prefill = close  # type: ignore[method-assign]
    return [Arm(AR, plain, False), Arm("sim", method, True, **more)]


def probed(method: Engine, gap: float = 0.25, **more: Any) -> dict[str, dict[str, Any]]:
    return parity.probe(arms(method, gap, **more), IDS, lambda stage, done, total: None)


def judged(lines: Sequence[dict[str, Any]], probe: Any = None, drawn: bool = False, **how: Any) -> dict[str, Any]:
    found = parity.verdicts({AR: HOW, "sim": {**HOW, **how}}, lines, probe or {}, drawn=drawn)
    assert list(found) == ["sim"]
    return found["sim"]


def line(first_diff: int | None = None, gap: float | None = None, n_out: int = 33, **more: Any) -> dict[str, Any]:
    known = {"task": "t", "length": 16, "id": "0", "method": "sim", "finish": "length", "n_out": n_out}
    return {**known, "first_diff": first_diff, "gap": gap, **more}


GREEN_PROBE = {"sim": {"n_out": 16, "first_diff": None, "gap": None}}


def test_the_probe_is_short_and_compares_id_for_id() -> None:
    same = Engine(FakeClock(), 64 * TICK, take=lambda i: 4)
    assert probed(same) == {"sim": {"n_out": parity.TOKENS, "first_diff": None, "gap": None}}
    other = Altered(FakeClock(), 64 * TICK, take=lambda i: 4)
    assert probed(other) == {"sim": {"n_out": parity.TOKENS, "first_diff": 5, "gap": 0.25}}
    shorter = Engine(FakeClock(), 64 * TICK, take=lambda i: 4, n_out=9)
    assert probed(shorter)["sim"]["first_diff"] == 9


def test_methods_that_lose_something_or_are_made_up_are_not_asked() -> None:
    method = Engine(FakeClock(), 64 * TICK)
    assert probed(method, lossless=False) == probed(method, made_up="forced acceptance 3") == {}
    assert method.calls == 0


def test_a_method_that_does_not_run_is_said_and_red_is_not_said_of_it() -> None:
    found = probed(Engine(FakeClock(), 64 * TICK, fails=lambda ids: True))
    assert found["sim"]["error"] == "out of memory"
    assert judged([], found)["state"] == "not judged" and "out of memory" in judged([], found)["why"]
    assert judged([line()], found)["state"] == "green"  # what was measured speaks


@pytest.mark.parametrize(
    ("lines", "probe", "how", "state", "why"),
    [
        ([line()] * 3, GREEN_PROBE, {}, "green", ""),
        ([], GREEN_PROBE, {}, "green", ""),
        ([line(5, 0.25)], GREEN_PROBE, {}, "red", "t 16 0 differs from AR at token 5 (gap 2.5e-01)"),
        ([line(5, 1e-4)], GREEN_PROBE, {}, "red", "gap 1.0e-04"),
        ([line(5, 9e-5)], GREEN_PROBE, {}, "green", ""),
        ([line(33, None)], GREEN_PROBE, {}, "red", "AR had ended"),
        ([line(5, 9e-5, id="0"), line(5, 9e-5, id="1")], GREEN_PROBE, {}, "red", "2 near ties in 12 tokens"),
        ([line(5, 9e-5), line(5, 9e-5), *[line()] * 30], GREEN_PROBE, {}, "green", ""),  # 2 in 1,002 tokens
        ([line(4, 9e-5), line(3, 9e-5), *[line()] * 30], GREEN_PROBE, {}, "red", "2 near ties in 999 tokens, 1 in 500"),
        ([line(5, 0.25, finish="failed")], GREEN_PROBE, {}, "green", ""),
        ([line(5, 0.25, method="full")], GREEN_PROBE, {}, "green", ""),
        ([line()], {"sim": {"n_out": 16, "first_diff": 5, "gap": 0.25}}, {}, "red", "the probe differs from AR"),
        ([line()], {"sim": {"n_out": 16, "first_diff": 5, "gap": 1e-6}}, {}, "green", ""),
        ([line(5, 0.25)], {}, {"lossless": False}, "not judged", "lossy"),
        ([line(5, 0.25)], GREEN_PROBE, {"dtype": "bfloat16"}, "not judged", "bfloat16"),
        ([line()], {}, {"made_up": "dummy weights"}, "not judged", "dummy weights"),
        ([], {}, {}, "not judged", "nothing was probed"),
    ],
)
def test_verdicts(lines: Any, probe: Any, how: dict[str, Any], state: str, why: str) -> None:
    found = judged(lines, probe, **how)
    assert found["state"] == state and why in found["why"], found


def test_texts_that_are_drawn_are_judged_by_the_probe_alone() -> None:
    assert judged([line(5, 0.25)], GREEN_PROBE, drawn=True)["state"] == "green"
    red = {"sim": {"n_out": 16, "first_diff": 5, "gap": 0.25}}
    assert judged([line()], red, drawn=True)["state"] == "red"


def test_a_planted_token_takes_the_speedup_out_of_every_row() -> None:
    clock = FakeClock()
    good = Engine(clock, 32 * TICK, take=lambda i: 4)
    it = bench(
        Engine(clock, 32 * TICK), {"sim": Altered(clock, 64 * TICK, take=lambda i: 4, n_out=33), "good": good}, warmup=0
    )
    it.run([*cells(6, "a"), *cells(6, "b")])
    how = {"resamples": 200, "seed": 0}
    done, _ = summary.pairs(it.store.lines, it.labels)
    rows = summary.rows(done, it.labels, bandwidth=None, **how)
    averages = summary.averages(done, it.labels, **how)
    over = [summary.against(done, it.labels, other, **how) for other in ("good", "sim")]
    methods = {AR: HOW, "sim": HOW, "good": HOW}
    found = parity.verdicts(methods, it.store.lines, {}, drawn=False)
    assert found["sim"]["state"] == "red" and found["good"]["state"] == "green"
    assert found["sim"]["compared"] == {"requests": 12, "tokens": 10 * 33 + 2 * 6}
    assert [d["id"] for d in found["sim"]["differing"]] == ["0", "0"]
    tables = [*rows, *averages, *over[0], *over[1]]
    assert all(row["speedup_mean"] is not None for row in tables)  # without the verdict all would be shown
    parity.withhold(tables, found)
    for row in tables:
        red = "sim" in (row["method"], row.get("against"))
        assert (row["verdict"] == "red") == red == (row["parity_red"] is not None), row
        assert all((row[name] is None) == red for name in parity.SPEEDUPS if name in row), row
    assert {row["method"] for row in parity.shown(rows)} == {"ar", "good", "ar again"}
    assert ",parity_red" in as_csv(rows).splitlines()[0] and "speedup_ci,," not in as_csv(rows)


def test_what_differs_is_told_with_ids_and_what_the_others_say_without_it() -> None:
    differing = [{"task": "t", "length": 16, "id": str(i), "first_diff": 5, "gap": 2e-6} for i in range(7)]
    compared = {"requests": 40, "tokens": 4000}
    one = {"state": "green", "why": "", "probe": None, "compared": compared, "differing": differing}
    half = {**one, "state": "not judged", "why": "bfloat16: the shape of a pass decides how it rounds", "differing": []}
    lossy = {**half, "why": "its rule is lossy"}
    row = {"task": "t", "length": 16, "method": "sim", "diff_from_ar": 7, "speedup_mean_equal_output": 1.2345}
    methods = {name: {"lossless": name != "lossy", "made_up": ""} for name in ("ar", "sim", "half", "lossy")}
    found = parity.notes({"parity": {"sim": one, "half": half, "lossy": lossy}, "summary": [row], "methods": methods})
    listed = "; ".join(f"t 16 {i} at token 5 (gap 2.0e-06)" for i in range(5))
    assert found == [
        f"sim differs from AR in 7 of 40 requests: {listed}; and 2 more; speedup without them: t 16 1.234",
        "equality with AR not judged (bfloat16: the shape of a pass decides how it rounds): half",
    ]
    assert parity.notes({"summary": [], "methods": {}}) == []


def test_two_paths_a_failure_and_a_missing_clock_are_said() -> None:
    def of(runs: bool, why_not: str | None) -> dict[str, Any]:
        return {
            "lossless": True,
            "made_up": "",
            "law": "",
            "graphs": {"asked": "auto", "runs": runs, "why_not": why_not},
        }

    env = {"device_type": "cuda", "threads": 1, "load_before": None, "load_after": None, "clocks_locked": None}
    known: dict[str, Any] = {
        "summary": [], "noise": None, "tasks": [], "warmup": [], "settings": {"tasks": []}, "complete": True,
        "notices": [], "failed": [], "env": {**env, "clocks": {"by": None, "why_not": "nvidia-ml-py is not installed"}},
        "methods": {"ar": of(True, None), "full": of(True, None), "lookup": of(False, "it looks into the text")},
    }  # fmt: skip
    said = remarks(known)
    assert "NOT ONE PATH for AR and lookup: only AR's rounds run on fixed buffers (it looks into the text)" in said
    assert not any("full" in line for line in said)
    assert "no device clock was read: nvidia-ml-py is not installed" in said
    known["methods"]["ar"] = of(False, "recording failed: no memory")
    assert "NOT ONE PATH for AR and full: only full's rounds run on fixed buffers (recording failed: no memory)" in (
        remarks(known)
    )
    known["failed"] = [{"method": "full", "task": "t", "length": 16, "id": "3", "error": "out of memory"}]
    known["env"] |= {"clocks": {"by": "nvidia-smi", "why_not": ""}, "clocks_locked": False}
    assert "FAILED: full at t 16 3: out of memory" in remarks(known)
    assert "device clock read by nvidia-smi; not held by a setting" in remarks(known)
