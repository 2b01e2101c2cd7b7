"""``--load-format dummy`` and ``--force-accept``: what runs, what is filled in, and that every line says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shrunk
import tiny
import torch
from cli.command import Result, generate, main, refused

from foldspec import Engine, SamplingParams
from foldspec.bench.schema import check
from foldspec.models.base import ForwardPlan
from foldspec.models.llama import Llama

DUMMY = ("--load-format", "dummy", "--threads", 1, "--max-context", 512, "--max-batch", 1)
SMALL = ("--lengths", 40, "--limit", 2, "--max-new", 13, "--warmup", 1, "--bootstrap", 100)
PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module", autouse=True)
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shrunk.install(tmp_path_factory.mktemp("registry"), patch)
        patch.setattr("foldspec.bench.guards.clock_disturbed", lambda run: False)  # a busy machine is no matter here
        yield


def load(name: str, **options: Any) -> Engine:
    return Engine.load(name, load_format="dummy", **{"max_context": 400, "max_batch": 2, "page_size": 16, **options})


def bench(name: str, *more: object) -> Result:
    return main("bench", name, *DUMMY, "--dummy-layers", 2, *SMALL, *more)


def test_bench_says_so_on_every_line(tmp_path: Path) -> None:
    done = bench("llama", "--force-accept", 2, "--out", tmp_path / "out", "--format", "json", "--trace")
    assert done.code == 0, done
    check(done.json)
    words = "dummy weights of 2 layers"
    told, *steps = done.err.splitlines()
    assert told == "foldspec: dummy weights (2 of 7 layers) and contexts: outputs mean nothing, there is no text"
    assert steps and all(line.startswith(f"foldspec: {words}, forced acceptance 2, ") for line in steps)
    forced = dict.fromkeys(("lookup", "full", "window", "fold"), f"{words}, forced acceptance 2")
    of = {"ar": words, "ar again": words, **forced}
    rows = {row["method"]: row for row in done.json["summary"]}
    assert {method: row["made_up"] for method, row in rows.items()} == of
    for row in rows.values():
        assert row["diff_from_ar"] is None and row["speedup_mean_equal_output"] is None
    assert [rows[m]["tau_mean"] for m in ("ar", "full", "window", "fold")] == [1, 3, 3, 3]  # 12 tokens in 4 rounds
    for settings in done.json["methods"].values():
        assert settings["lossless"] is False and settings["load_format"] == "dummy" and settings["dummy_layers"] == 2
        assert settings["law"] == "none: its weights are made up"
    lines = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 12 and all(line["made_up"] == of[line["method"]] for line in lines)
    assert all(line["first_diff"] is None and line["score"] is None for line in lines)


def test_the_table_says_so_too() -> None:
    done = bench("llama", "--methods", "full", "--limit", 1, "--force-accept", "tau=2.5", "--quiet")
    assert done.code == 0 and done.err == ""
    table, _, below = done.out.partition("\n\n")
    assert all("dummy weights of 2 layers" in line for line in table.splitlines()[1:])
    assert "MADE UP (dummy weights of 2 layers; dummy weights of 2 layers, forced acceptance tau=2.5)" in below
    assert "DIFFER" not in below


@pytest.mark.parametrize("name", ["hybrid", "gemma", "diffusion"])
def test_bench_runs_the_other_families(name: str) -> None:
    """A target that has no drafter here is measured with prompt lookup alone."""
    done = bench(name, "--limit", 1, "--format", "json")
    assert done.code == 0, done
    alone = name != "hybrid"
    assert {"full" in done.json["methods"], done.json["drafter"] is not None} == {not alone}
    assert ("decodes alone" in done.err) == (name == "diffusion")
    plan = bench(name, "--dry-run")
    assert plan.code == 0 and ("methods: ar, lookup, and" in plan.out) == alone
    if alone:
        refused(bench(name, "--methods", "fold", "--quiet"), 2, "there is no drafter")


def test_what_cannot_run_is_said_before_numbers_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 150,000 ids takes minutes to fill."""
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("weights were made"))
    refused(bench("llama", "--tasks", "random,docs", "--quiet"), 2, "--tasks docs: ", "without a tokenizer", "random")
    for more in ((), ("--dry-run",)):
        line = refused(bench("llama", "--methods", "fold", "--force-accept", "paper", "--quiet", *more), 2)
        assert "the paper gives no tau of llama under fold" in line


def test_caches_hold_what_is_measured_and_no_more() -> None:
    """Of a model for 262,144 tokens, one request alone would not fit beside the numbers of its head."""
    words = ("bench", "llama", "--load-format", "dummy", "--threads", 1, "--max-batch", 1, "--dummy-layers", 2, *SMALL)
    done = main(*words, "--methods", "full", "--format", "json")
    assert done.code == 0, done
    assert {method["max_context"] for method in done.json["methods"].values()} == {40 + 13}
    plan = main(*words, "--lengths", "40,300k", "--dry-run", "--format", "json").json
    assert list(plan["prefills"]) == ["40", str(262144 - 13)]
    few = main(*words[:8], "--dry-run", "--format", "json").json
    assert few["prefills"] == {"512": 5, "2048": 5, "8192": 5} and few["max_new"] == 16


def test_a_dry_run_says_so_too() -> None:
    for name, alone in (("llama", False), ("diffusion", True)):
        plan = bench(name, "--dry-run")
        assert "outputs mean nothing" in plan.err and ("decodes alone" in plan.err) == alone
        assert bench(name, "--dry-run", "--quiet").err == ""


def test_a_drafter_of_another_target_is_not_left_out() -> None:
    """Only one that no class runs is."""
    words = ("bench", "--target", "t/llama", "--drafter", "t/dflash-hybrid", *DUMMY, *SMALL, "--quiet")
    refused(main(*words), 3, "t/dflash-hybrid", "made for 8 layers, the target has 7")


def test_generate_gives_no_text() -> None:
    words = ("generate", "llama", *DUMMY, "--prompt-ids", "1,2,3", "--max-tokens", 9, "--force-accept", 3)
    done = main(*words, "--json")
    assert done.code == 0, done
    assert done.json["text"] == "" and done.json["lossless"] is False
    assert done.json["made_up"] == "dummy weights, forced acceptance 3" and len(done.json["token_ids"]) == 9
    assert done.json["tau"] == 4 and done.json["settings"]["law"].startswith("none")
    plain = main(*words)
    assert plain.code == 0 and plain.out == ""
    assert all("dummy weights" in line for line in plain.err.splitlines())
    refused(main("generate", "llama", *DUMMY, "-p", "text", "--quiet"), 2, "dummy weights come without a tokenizer")


def test_forced_acceptance_of_real_weights_gives_no_text_either() -> None:
    words = ("--prompt-ids", "4,5,6", "--max-tokens", 11, "--ignore-eos", "--json", "--threads", 1)
    real, forced = generate(*words, "--trace"), generate(*words, "--trace", "--force-accept", 4)
    assert real.code == forced.code == 0
    assert real.json["made_up"] == "" and real.json["lossless"] is True
    assert forced.json["made_up"] == "forced acceptance 4" and forced.json["lossless"] is False
    assert [r["accepted"] for r in forced.json["rounds"]] == [4, 4] and forced.json["text"] == ""
    refused(generate(*words, "--force-accept", 4, "--stop", "x"), 2, "stop strings need a text")
    refused(generate(*words, "--force-accept", 9), 2, "a round proposes 5 drafts at most, not 9")
    refused(generate(*words, "--force-accept", "paper"), 2, "the paper gives no tau of this pair under fold")
    refused(generate(*words, "--dummy-layers", 2), 2, "add --load-format dummy")
    refused(main("generate", "--target", "some/where", *DUMMY, "--prompt-ids", 1), 2, "is not in the registry")


@pytest.mark.parametrize("name", ["llama", "hybrid", "gemma"])
def test_a_context_is_filled_and_not_prefilled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs one row of the prompt; every cache holds all of it, in numbers; and what follows is decoding as
    ever: drafts of no kind change a token, since rounds take back what does not stand."""
    rows: list[int] = []
    forward = Llama.forward

    def counted(self: Llama, ids: torch.Tensor, plan: ForwardPlan, cache: Any) -> Any:
        rows.append(len(ids))
        return forward(self, ids, plan, cache)

    monkeypatch.setattr(Llama, "forward", counted)
    prompt = tiny.prompt(300, 211)
    with load(name) as engine:
        resources = engine.resources
        tiny.poison(resources.cache)
        if resources._draft_cache is not None:
            resources._draft_cache._values.fill_(torch.nan)
        with engine.prefill(prompt) as prefix:
            assert rows == [1] and prefix.held == (300, 300 if resources.found.network else 0)
            assert prefix.logits.isfinite().all()
            for layer in resources.cache._layers:
                for entries in resources.cache.entries(layer, prefix.request, 300 - 16):
                    kept = tiny.dense(entries)
                    assert len(kept) == 16 and kept.isfinite().all() and 0.8 < kept[:15].float().std() < 1.2
            for pool in resources.cache._recurrent:  # a state that is empty would be one of no context
                slot = pool._lives[prefix.request].slot
                for state in pool._data["matrix"][:, slot]:
                    assert state.isfinite().all() and 0.03 < state.std() < 0.3
                history = pool._data["columns"][:, slot, : pool._history]
                assert history.isfinite().all() and 0.5 < history.float().std() < 2
            plain = engine.using(draft_tokens=0).generate(prefix, PARAMS)
            assert len(plain.token_ids) == 24 and plain.error is None
            methods = ("full", "window", "fold") if resources.found.network else ()
            for changes in (*({"context": method} for method in methods), {"drafter": "lookup"}):
                assert engine.using(**changes).generate(prefix, PARAMS).token_ids == plain.token_ids, changes
        rows.clear()
        assert (
            engine.using(draft_tokens=0).generate(prompt, PARAMS).token_ids == plain.token_ids
        )  # without a prefix too
        assert rows[0] == 1 and sum(rows) == 24


def test_drafts_read_what_was_made_up() -> None:
    """A drafter's context is there in every copy: what a request that forks it drafts is what one that has its own
    drafts."""
    prompt = tiny.prompt(300, 211)
    with load("llama", dummy_layers=3) as engine:
        drafts = {}
        for changes in ({"context": "full"}, {"context": "fold"}):
            one = engine.using(**changes)
            direct = [r.drafted for r in one.generate(prompt, PARAMS).rounds]
            with one.prefill(prompt) as prefix:
                assert [r.drafted for r in one.generate(prefix, PARAMS).rounds] == direct
            drafts[changes["context"]] = direct
        assert drafts["full"] != drafts["fold"]
        assert all(0 <= token < 211 for rounds in drafts.values() for drafted in rounds for token in drafted)


def test_a_long_context_costs_no_prefill() -> None:
    long = {"max_context": 131_100, "max_batch": 1, "page_size": 256}
    with load("llama", dummy_layers=2, **long) as engine, engine.prefill([7] * 131_072) as prefix:
        assert prefix.held == (131_072, 131_072)
        assert len(engine.generate(prefix, SamplingParams(max_tokens=6)).token_ids) == 6


def test_a_request_that_gave_up_its_pages_is_filled_again() -> None:
    prompts = [tiny.prompt(60, 211, seed) for seed in range(2)]
    with load("llama", max_context=128, cache_tokens=176, force_accept="1") as engine:
        done = engine.generate(list(prompts), SamplingParams(max_tokens=60))
        assert engine.scheduler.preempted > 0
        assert [len(d.token_ids) for d in done] == [60, 60] and all(d.tau and d.tau > 1.8 for d in done)
