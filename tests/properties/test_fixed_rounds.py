"""Rounds on fixed buffers are the ordinary loop's, id for id and draft for draft: drafters, methods, batches, blocks;
lengths that cross pages and windows; requests that come, end, fail and are put back meanwhile. And what they run on
stays where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fixed
import pytest
import torch

from foldspec import Engine, SamplingParams
from foldspec.schedule.fixed import State
from foldspec.schedule.graphs import Outside, _Seat
from foldspec.schedule.scheduler import Step

LLAMA, MIXED, DEEPSPEC, DSPARK = "a_llama_zlab", "b_qwen3_zlab_mixed", "c_qwen3_deepspec_dflash", "d_qwen3_dspark"
# around a page of 16, a window of 24 and the window with a block; the last is far from the first token on
LENGTHS = (1, 16, 23, 80)
ALL = [(LLAMA, name) for name in ("plain", "full", "fold", "fold, two copies")] + [
    (DSPARK, name) for name in ("full", "window", "fold")
]
ALL += [(MIXED, name) for name in ("window", "fold", "rerope", "streaming", "shared_window")]


def both(
    pair: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    method: dict[str, Any],
    **options: Any,
) -> tuple[int, list[Step]]:
    """Compare. Rounds on fixed buffers, and all steps there. ``options`` of engines of their own."""
    steps: list[Step] = []
    stories, ran = [], 0
    for graphs in ("off", "on"):
        engine = fixed.load(pair, graphs, **options) if options else fixed.loaded(pair, graphs)
        engine = engine.using(**method)
        steps.clear()
        engine.scheduler.watch = steps.append
        stories.append([fixed.story(done) for done in engine.generate(list(prompts), params)])
        ran = fixed.graphs_of(engine).rounds if graphs == "on" else 0
    for prompt, a, b in zip(prompts, *stories, strict=True):
        assert a == b, f"a prompt of {len(prompt)} tokens"
    return ran, steps


@pytest.mark.parametrize(("pair", "method"), ALL)
def test_rounds_are_the_ordinary_loops(pair: str, method: str) -> None:
    params = [SamplingParams(max_tokens=28 + i, ignore_eos=True) for i in range(len(LENGTHS))]
    ran, steps = both(pair, fixed.prompts(LENGTHS), params, fixed.METHODS[method])
    assert 0 < ran < len(steps), "prompts are prefilled in ordinary steps"


@pytest.mark.parametrize(("batch", "drafts"), [(1, 1), (1, 4), (2, 2), (3, 3)])
def test_blocks_and_batches(batch: int, drafts: int) -> None:
    method = {**fixed.METHODS["fold"], "draft_tokens": drafts}
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    assert both(DEEPSPEC, fixed.prompts((20, 40, 60)[:batch]), params, method)[0] >= 23 / (drafts + 1)


def test_stop_ids_and_strings_and_limits_end_rounds_where_they_do_elsewhere() -> None:
    prompts = fixed.prompts((20, 33, 47), seed=3)
    engine = fixed.loaded(LLAMA, "off").using(context="full")
    ids = [done.token_ids for done in engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, stop_ids=(ids[0][11],)),
        SamplingParams(max_tokens=7, ignore_eos=True),
        SamplingParams(max_tokens=40, ignore_eos=True, min_tokens=20, stop_ids=(ids[2][5],)),
    ]
    assert both(LLAMA, prompts, params, fixed.METHODS["full"])[0] > 5


def test_a_request_is_put_back_for_want_of_pages_and_goes_on() -> None:
    params, options = SamplingParams(max_tokens=40, ignore_eos=True), {"cache_tokens": 8 * 16}
    ran, steps = both(LLAMA, fixed.prompts((30, 30, 30)), params, fixed.METHODS["fold"], **options)
    assert ran > 10 and any(step.preempted for step in steps)


def test_the_last_places_of_a_context_are_filled() -> None:
    """There is no room for a whole block behind the last entries, in the target's pages: those rounds are ordinary."""
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    assert both(LLAMA, fixed.prompts((40,)), params, fixed.METHODS["full"], max_context=75, max_batch=1)[0] > 5


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    prompts, params = fixed.prompts((20, 33), seed=5), SamplingParams(max_tokens=40, ignore_eos=True)
    stories = []
    for graphs in ("off", "on"):
        with fixed.load(MIXED, graphs, weights="float32", kernels="reference", **fixed.METHODS["fold"]) as engine:
            if not stories:
                plain = [done.token_ids for done in engine.generate(prompts, params)]
                elsewhere = {*plain[1], *plain[0][:6], *prompts[0], *prompts[1]}
                bad = next(token for token in plain[0][6:] if token not in elsewhere)
            engine.resources.found.model.model.embed_tokens.weight[bad] = torch.nan
            stories.append([fixed.story(done) for done in engine.generate(prompts, params)])
            assert graphs == "off" or fixed.graphs_of(engine).rounds > 2
    assert stories[0] == stories[1]
    assert "not finite" in stories[0][0][-1] and stories[0][1][1] == "length"


def test_forced_acceptance_runs_as_it_does_elsewhere() -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=4)
    for spec in ("2", "tau=2.7", "0.9,0.6,0.3"):
        assert both(LLAMA, fixed.prompts((20, 40)), params, {**fixed.METHODS["fold"], "force_accept": spec})[0] > 5


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ({}, {"temperature": 0.8}),
        ({}, {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.02}),
        ({"accept": "match"}, {"temperature": 0.7, "top_p": 0.8}),
        ({"accept": "linear", "leniency": 0.4}, {"temperature": 0.8}),
        ({"accept": "lenience", "leniency": 0.5}, {"temperature": 0.8}),
        ({"accept": "cactus", "leniency": 0.3}, {"temperature": 0.8}),
        ({"accept": "typical"}, {"temperature": 0.8}),
        ({"accept": "typical"}, {}),
        ({"accept": "unverified"}, {}),
    ],
)
def test_sampled_rounds_and_those_of_every_rule(rule: dict[str, Any], options: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=i, **options) for i in range(2)]
    assert both(LLAMA, fixed.prompts((20, 33)), params, {**fixed.METHODS["fold"], **rule})[0] > 1


def test_requests_sampled_each_in_its_own_way_share_rounds() -> None:
    ways: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5, "min_p": 0.1})
    params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=7, **way) for way in ways]
    assert both(LLAMA, fixed.prompts((20, 33, 21)), params, fixed.METHODS["full"])[0] > 1


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 2},
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 3.0}},
    ],
)
def test_requests_that_the_host_looks_into_run_in_the_ordinary_loop(options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, **options)
    assert both(LLAMA, fixed.prompts((20, 30)), params, fixed.METHODS["full"])[0] == 0


@pytest.mark.parametrize(
    ("pair", "method", "why"),
    [
        (LLAMA, {"context": "yarn"}, "yarn"),
        (LLAMA, {"context": "infllm"}, "infllm"),
        (LLAMA, {"context": "cmr"}, "cmr"),
        (LLAMA, {"context": "fold_auto"}, "fold_auto"),
        (LLAMA, {"draft_temperature": 1.0}, "draft-temperature"),
        (LLAMA, {"drafter": "lookup"}, "lookup"),
        (DSPARK, {"confidence_stop": 0.5}, "confidence"),
        ("f_qwen3_5_zlab_mixed", {}, "recurrent"),
        ("e_gemma4_dspark", {}, "rings"),
    ],
)
def test_what_cannot_run_so_says_why_and_runs_as_ever(pair: str, method: dict[str, Any], why: str) -> None:
    engine = fixed.loaded(pair, "on").using(**method)
    assert engine.graphs["runs"] is False and why in engine.graphs["why_not"]
    assert len(engine.generate([3, 4, 5, 6], SamplingParams(max_tokens=6, ignore_eos=True)).token_ids) == 6


def test_a_cpu_runs_the_ordinary_loop_unless_asked() -> None:
    for graphs in ("auto", "off"):
        with fixed.load(LLAMA, graphs) as engine:
            assert engine._rounds.graphs is None and engine.graphs["runs"] is False and engine.graphs["why_not"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "full", "window", "fold"])
def test_rounds_of_a_real_pair_are_the_ordinary_loops(method: str) -> None:
    """The embedded pair, at its own window: one request is far from the first round on, one comes to be."""
    texts = ["The capital of France is", "def quicksort(a):\n    " * 36, "Once upon a time there was a village. " * 45]
    stories = []
    for graphs in ("off", "on"):
        with Engine.load("smollm2-135m", offline=True, graphs=graphs, max_context=640, max_batch=3) as engine:
            engine = engine.using(**{**fixed.METHODS[method], **({} if method == "plain" else {"window": 256})})
            done = engine.generate(texts, SamplingParams(max_tokens=48, ignore_eos=True))
            stories.append([fixed.story(one) for one in done])
            assert graphs == "off" or fixed.graphs_of(engine).rounds > 10
    assert stories[0] == stories[1]


# ----------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("method", ["plain", "full", "window", "fold"])
def test_a_round_reads_and_writes_the_same_memory_from_round_to_round(method: str) -> None:
    """All that it has not made itself: weights, pools, tables, buffers."""
    with fixed.load(MIXED, "on", **fixed.METHODS[method]) as engine:
        graphs, seen = fixed.graphs_of(engine), []
        find = graphs._find

        def watched(state: State) -> Any:
            run = find(state)

            def look() -> None:
                with Outside() as outside:
                    run()
                assert graphs.buffers is not None
                buffers = {name: x.data_ptr() for name, x in graphs.buffers.tensors.items()}
                seen.append((state, set(outside.found), buffers))

            return look

        graphs._find = watched  # type: ignore[method-assign]
        lengths = (5, 8, 11) if method == "plain" else (12, 20, 32)
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        engine.generate(fixed.prompts((5, 30, 60)), params)
        states = {state for state, _, _ in seen}
        assert states == {State(n, method == "fold", True, False) for n in (1, 2, 3)}
        for state in states:
            places = [found for other, found, _ in seen if other == state]
            # the first of its kind makes what is kept: tables of angles, a norm's weight in fp32
            assert all(found == places[-1] for found in places[1:])
        assert all(buffers == seen[0][2] for _, _, buffers in seen)


def test_between_rounds_the_host_knows_what_the_device_holds_and_pages_are_given_back() -> None:
    """Nothing is uploaded then but for tables that change, and a round takes no page that it does not fill."""
    with fixed.load(DSPARK, "on", **fixed.METHODS["fold"]) as engine:
        graphs, pages, looked = fixed.graphs_of(engine), engine.resources.cache.tables, 0

        def look(step: Step) -> None:
            nonlocal looked
            going = [job.request for job in engine.scheduler._running if job.request.rounds]
            for request in going:
                assert len(pages.pages(request.id)) == -(-pages.length(request.id) // pages.page_size)
            if going and graphs.rounds > looked and step.decoded == len(going):
                looked = graphs.rounds
                assert graphs._seats == [_Seat.of(request) for request in going]
                assert graphs.buffers is not None
                for i, request in enumerate(going):
                    held = (graphs.buffers.first[i], graphs.buffers.anchor[i], graphs.buffers.left[i])
                    assert tuple(map(int, held)) == _Seat.of(request)[1:4]

        engine.scheduler.watch = look
        engine.generate(fixed.prompts((20, 30)), SamplingParams(max_tokens=30, ignore_eos=True))
        assert looked > 5


def test_both_states_of_fold_run_each_in_its_time() -> None:
    with fixed.load(LLAMA, "on", **fixed.METHODS["fold"]) as engine:
        engine.generate(fixed.prompts((4,))[0], SamplingParams(max_tokens=60, ignore_eos=True))
        assert list(fixed.graphs_of(engine)._runs) == [State(1, far, True, False) for far in (False, True)]
