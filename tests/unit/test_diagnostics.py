"""The diagnostics of scripts/reproduce: each part against what it should find where that is known."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import brute
import pytest
import tiny
import torch
from filelock import FileLock
from reading import Reading, draw
from reproduce import adaptive, features, finding1, watched
from reproduce.clock import PARTS, Clock
from reproduce.command import main
from reproduce.probe import Entries, judged, sampled

from foldspec import Engine
from foldspec.context import METHODS
from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels

# ------------------------------------------------------------------------------------------------------------ figure1


def test_attention_is_taken_out_of_the_part_that_it_was_in(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, now = Kernels(), [0.0]

    def attend(_: Any) -> list[Any]:
        now[0] += 2.0
        return []

    monkeypatch.setattr(kernels, "multi_read_attention", attend)
    clock = Clock(kernels, torch.device("cpu"))
    monkeypatch.setattr(clock, "_now", lambda: now[0])
    clock.start()
    for part, seconds, attentions in (("draft", 1.0, 2), ("host", 0.5, 0), ("verify", 3.0, 4), ("accept", 0.25, 0)):
        now[0] += seconds
        for _ in range(attentions):
            kernels.multi_read_attention([])
        clock(part)
    assert clock.seconds == dict(zip(PARTS, (8.0, 3.0, 4.0, 1.0, 0.75), strict=True)) and clock.rounds == 1


def test_a_breakdown_is_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a tiny pair, down to the files that it leaves; the parts are all of a round."""
    folder = tiny.PAIRS / "a_llama_zlab"
    words = [
        "--target",
        str(folder / "target"),
        "--drafter",
        str(folder / "drafter"),
        "--lengths",
        "64,256",
        "--load-format",
        "auto",
    ]
    assert main(["figure1", "--out", str(tmp_path), *words]) == 0
    assert {"figure1.json", "figure1.md", "figure1.png", "figure1.svg"} <= {path.name for path in tmp_path.iterdir()}
    found = json.loads((tmp_path / "figure1.json").read_text())
    assert "Figure 1 of the FOLD paper" in capsys.readouterr().out and "Figure 1" in found["mirrors"]
    assert [(cell["way"], cell["length"]) for cell in found["cells"]] == [
        ("AR", 64), ("SD", 64), ("AR", 256), ("SD", 256)
    ]  # fmt: skip
    (tmp_path / "figure1.json").unlink()
    for tokens in ("2", "3"):  # the two rounds that go before, or less
        assert main(["figure1", "--out", str(tmp_path), *words, "--max-new", tokens]) == 2
        assert "end within the two rounds that are not measured" in capsys.readouterr().err
        assert not (tmp_path / "figure1.json").exists()
    assert main(["figure1", "--out", str(tmp_path), *words, "--max-new", "30", "--force-accept", "5"]) == 0
    assert json.loads((tmp_path / "figure1.json").read_text())["origins"][0]["plan"]["settings"]["force_accept"] == "5"
    for cell in found["cells"]:
        assert sum(cell["ms"].values()) == pytest.approx(cell["total_ms"]) and min(cell["ms"].values()) >= 0
        assert cell["ms"]["target attention"] > 0 and (cell["ms"]["drafter attention"] > 0) == (cell["way"] == "SD")


# ----------------------------------------------------------------------------------------------------------- finding1


@pytest.mark.parametrize("by", [0, 7, 1000])
def test_a_block_that_is_moved_meets_entries_as_much_further_off(by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its own rows where they were."""
    block, n = 4, 20
    monkeypatch.setattr(finding1, "Moved", type("Moved", (finding1.Shifted,), {"by": by}), raising=False)
    monkeypatch.setitem(METHODS, "moved", "reproduce.finding1:Moved")
    q, k, v = draw(n, block, seed=by)
    found = Reading("reference", block=block, heads=1, width=8, context="moved").whole(q, k, v)
    wanted = brute.one_softmax(q, k, v, brute.frequencies(8), lambda r, j: n + r - j + (by if j < n else 0))
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


# ------------------------------------------------------------------------------------------------------------ figure3


def made_up(drift: float, width: int = 16, count: int = 400, seed: int = 0) -> torch.Tensor:
    """Noise, and one direction that grows along the entries."""
    states = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    states[:, 2] += drift * torch.arange(count) / count
    return states


@pytest.mark.parametrize(("drift", "kind", "low", "high"), [(0.0, "same", 0.35, 0.65), (40.0, "same", 0.9, 1.0),
                                                            (40.0, "other", 0.3, 0.7)])  # fmt: skip
def test_the_probe_finds_an_order_that_is_there_and_no_other(drift: float, kind: str, low: float, high: float) -> None:
    """``other``: places that have nothing to do with the drift."""
    draws = torch.Generator().manual_seed(1)
    pairs = []
    for seed in range(5):
        at = torch.arange(400) if kind == "same" else torch.randperm(400, generator=draws)
        pairs.append(sampled(Entries(made_up(drift, seed=seed), at), 64, 256, 200, draws))
    assert low <= judged(pairs, 600)["mean"] <= high


def test_the_probe_is_judged_by_inputs_that_it_has_not_seen() -> None:
    """Noise of more directions than pairs can be learnt by heart, and is worth nothing on other noise."""
    draws = torch.Generator().manual_seed(1)
    inputs = [Entries(made_up(0.0, width=400, seed=seed), torch.arange(400)) for seed in range(5)]
    assert 0.3 < judged([sampled(one, 64, 256, 40, draws) for one in inputs], 100)["mean"] < 0.7


def test_pairs_are_as_far_apart_as_they_should_be() -> None:
    at = torch.randperm(600, generator=torch.Generator().manual_seed(2))
    states = at[:, None].float()  # an entry is its place
    pairs = sampled(Entries(states, at), 64, 1024, 2000, torch.Generator().manual_seed(3))
    apart = pairs.differences[:, 0]
    assert apart.abs().min() >= 64 and 280 < apart.abs().max() < 300  # half of all at most
    assert torch.equal(apart < 0, pairs.before == 1) and 0.45 < pairs.before.mean() < 0.55


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny.load_pair("a_llama_zlab").using(window=24)


def test_features_are_what_the_drafter_makes_its_keys_of(engine: Engine) -> None:
    """Against the keys that a prefill left in its cache, of every layer."""
    ids = tiny.prompt(300, vocabulary=engine.vocabulary)
    found = features.features(engine, ids)
    network = engine.resources.found.network
    with engine.prefill(ids) as prefix, torch.inference_mode():
        reader = engine.resources.prefix_drafter._reader  # type: ignore[attr-defined]
        for layer, block in enumerate(network.blocks):  # type: ignore[union-attr, operator]
            keys = block.self_attn.context(found)[0]
            torch.testing.assert_close(keys, reader._stored(prefix.request, layer, 0, 300, False), atol=1e-4, rtol=1e-4)


def test_shuffled_entries_are_realigned_with_their_tokens(engine: Engine) -> None:
    """The first 64 tokens and the window stay; chunks of 64 are read in another order."""
    ids = tiny.prompt(64 + 5 * 64 + 30, vocabulary=engine.vocabulary)
    found = features.entries(engine, ids, seed=4)
    read = found["shuffled, as read"].at
    assert sorted(read.tolist()) == list(range(320)) and not torch.equal(read, torch.arange(320))
    assert torch.equal(read.view(5, 64) - read.view(5, 64)[:, :1], torch.arange(64).expand(5, 64))
    order, older = read.argsort(), torch.tensor(ids[64:384])
    again = features.features(engine, (*ids[:64], *older[order].tolist(), *ids[384:]))[64:384]
    torch.testing.assert_close(found["shuffled, as text"].states[order], again)
    assert torch.equal(found["features"].at, torch.arange(320))
    torch.testing.assert_close(found["features"].states, features.features(engine, ids)[64:384])


# ----------------------------------------------------------------------------------------------------------- adaptive


def test_what_is_compared_is_fold_and_window_themselves(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "watched", "reproduce.watched:Watched")
    methods = {name: engine.using(context="watched", auto_alphas=alphas) for name, alphas in watched.FIXED.items()}
    methods[watched.AUTO] = engine.using(context="watched")
    prompt = tiny.prompt(90, vocabulary=engine.vocabulary)
    found = watched.decode(engine, methods, prompt, 40)
    rounds = {name: one["rounds"] for name, one in found["methods"].items()}
    assert {one["tokens"] for one in found["methods"].values()} == {39}
    for name, one in found["methods"].items():
        share = one["cost"] / one["rounds"] - 1
        assert share == 0 if name == "window" else 0 < share < 0.2, name
    assert sum(found["arms"].values()) in (rounds[watched.AUTO], rounds[watched.AUTO] - 1)
    for tokens in range(36, 41):  # a last round may have no place for drafts
        (one,) = watched.decode(engine, {"window": methods["window"]}, prompt, tokens)["methods"].values()
        assert one["cost"] == one["rounds"]
    real = {
        "window": {"context": "window"},
        "fold": {"context": "fold", "alpha": 2.0},
        "fold_auto": {"context": "fold_auto"},
    }
    for name, changes in real.items():
        done = engine.using(**changes).generate(prompt, watched.SamplingParams(max_tokens=40))
        assert len(done.rounds) == rounds[name]


def row(number: int, rounds: dict[str, int], cost: float = 1.0) -> dict[str, Any]:
    methods = {name: {"tokens": 60, "rounds": count, "cost": count * cost} for name, count in rounds.items()}
    return {
        "task": "docs",
        "length": 64,
        "id": f"docs/{number}",
        "n_in": 64,
        "methods": methods,
        "arms": {"2": 9, "0": 1},
    }


def test_a_gain_is_one_only_where_the_interval_says_so() -> None:
    rows = [
        row(i, {"window": 30, "fold:alpha=1": 20, "fold": 24 + i % 2 * 3, "fold:alpha=4": 25, "fold_auto": 25})
        for i in range(8)
    ]
    cell = adaptive.summary([adaptive.request(one) for one in rows])
    words = [adaptive.verdict(name, one) for name, one in cell[adaptive.RATE]["less"].items()]
    assert [word.split(": ")[1].split(", +")[0].split(", -")[0] for word in words] == [
        "a gain", "a loss", "no difference shown", "no difference shown"
    ]  # fmt: skip
    assert cell["tau"]["means"]["window"]["mean"] == 2.0 and "+0.400" in words[0]


METHOD_NAMES = (*watched.FIXED, watched.AUTO)
GOOD = row(0, dict.fromkeys(METHOD_NAMES, 25))
CHOSEN = argparse.Namespace(seed=2, max_new=8, lengths="64", limit=1)


def test_a_file_of_other_settings_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "cells", lambda *_: ([], []))
    path = tmp_path / "adaptive-docs.jsonl"
    lines = [json.dumps({"plan": {"seed": 1}, "about": {}}), json.dumps(GOOD), '{"task": "do']
    path.write_text("\n".join(lines))
    head, rows = watched.read(path)
    assert head["plan"] == {"seed": 1} and len(rows) == 1 and path.read_text().endswith("}\n")
    with pytest.raises(UsageError, match="began with other settings"):
        watched.measure(tiny.load_pair("a_llama_zlab"), CHOSEN, tmp_path, "docs")


def test_a_file_is_measured_into_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "cells", lambda *_: ([], []))
    engine = tiny.load_pair("a_llama_zlab")
    with FileLock(tmp_path / "adaptive-docs.lock"), pytest.raises(UsageError, match="another process measures there"):
        watched.measure(engine, CHOSEN, tmp_path, "docs")
    watched.measure(engine, CHOSEN, tmp_path, "docs")
    assert set(watched.read(tmp_path / "adaptive-docs.jsonl")[0]["plan"]["weights"]) == {"target", "drafter"}


def test_what_is_no_request_of_the_comparison_is_refused(tmp_path: Path) -> None:
    head, one = json.dumps({"plan": {}, "about": {}}), GOOD["methods"]["fold"]
    changes: list[dict[str, Any]] = [{"task": "kv"}, {"id": 3}, {"length": "2k"}, {"n_in": 1.5}, {"arms": {"2": -1}}]
    changes += [{"arms": 3}, {"methods": 3}, {"methods": {"fold": one}}]
    changes += [
        {"methods": {**GOOD["methods"], "fold": each}}
        for each in (3, {}, one | {"tokens": 0}, one | {"rounds": True}, one | {"cost": math.nan}, one | {"cost": "1"})
    ]
    bad = [json.dumps({**GOOD, **change}) for change in changes] + ["3", "[]", "{}", "{"]
    texts = [f"{head}\n{json.dumps(GOOD)}\n{line}\ntorn" for line in bad]
    path = tmp_path / "adaptive-docs.jsonl"
    for text in [*texts, "", "torn", "[]\n", '{"plan": {}}\n', '{"plan": 1}\n']:
        path.write_text(text)
        with pytest.raises(UsageError, match="is no file of this comparison"):
            watched.read(path)
        assert path.read_text() == text  # what is not ours is left alone
