"""Language models as drafters, of every family: state after any round, drafts, and what an engine makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gemma
import pytest
import tiny
import torch

from foldspec import Engine, SamplingParams
from foldspec.acceptance.base import AcceptanceRule
from foldspec.cache.rows import Rows
from foldspec.drafters.autoregressive import Autoregressive, AutoregressiveNetwork
from foldspec.drafters.base import Host, Room
from foldspec.drafters.language import LanguageNetwork
from foldspec.errors import UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.records import PointMass, Proposal, Sampled, Verdict
from foldspec.sampling import ARGMAX, DraftSampling, TargetLaws
from foldspec.schedule.prefill import prefill
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Rounds

FAMILIES: dict[str, dict[str, Any]] = {"llama": tiny.TARGET, "qwen3.5": tiny.QWEN3_5, "gemma4": gemma.TARGET}
DRAFTS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    made = {name: tiny.write_target(root / name, config, seed=3) for name, config in FAMILIES.items()}
    made["target"] = tiny.write_target(root / "target", seed=0)
    for rows in (120, 140):
        made[f"llama {rows}"] = tiny.write_target(root / f"llama {rows}", {**tiny.TARGET, "vocab_size": rows}, seed=4)
    return made


def load(target: Path, drafter: Path, **options: Any) -> Engine:
    sizes = {"threads": 1, "max_context": 256, "page_size": 16, "max_batch": 3, "debug": True}
    return Engine.load(target=str(target), drafter=str(drafter), **{**sizes, **options})


PROMPTS = [tiny.prompt(length, 128, seed=length) for length in (1, 15, 16, 40)]
PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_drafts_for_itself_fills_every_block(folders: dict[str, Path], family: str) -> None:
    with load(folders[family], folders[family], draft_tokens=DRAFTS) as engine:
        plain = engine.using(draft_tokens=0)
        for prompt in PROMPTS:
            done = engine.generate(prompt, PARAMS)
            assert done.token_ids == plain.generate(prompt, PARAMS).token_ids
            assert all(round_.accepted == len(round_.drafted) for round_ in done.rounds)
            assert [len(round_.committed) for round_ in done.rounds[:-1]] == [DRAFTS + 1] * (len(done.rounds) - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_drafter_changes_no_token(folders: dict[str, Path], family: str) -> None:
    """Together and from a prefix; by both lossless rules."""
    with load(folders["target"], folders[family], draft_tokens=DRAFTS) as engine:
        plain = [done.token_ids for done in engine.using(draft_tokens=0).generate(list(PROMPTS), PARAMS)]
        for way in ({"accept": "match"}, {"accept": "exact", "draft_temperature": 1.0}):
            assert [done.token_ids for done in engine.using(**way).generate(list(PROMPTS), PARAMS)] == plain
        with engine.prefill(PROMPTS[-1]) as prefix:
            assert prefix.held == (40, 40)
            for length in (1, 9):
                assert engine.using(draft_tokens=length).generate(prefix, PARAMS).token_ids == plain[-1]
            assert engine.using(drafter="lookup").generate(prefix, PARAMS).token_ids == plain[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_that_run_out(folders: dict[str, Path], family: str) -> None:
    prompts, params = [tiny.prompt(10, 128, seed=i) for i in range(3)], SamplingParams(max_tokens=24, ignore_eos=True)
    with load(folders["target"], folders[family], draft_tokens=DRAFTS, cache_tokens=80) as engine:
        plain = [engine.using(draft_tokens=0).generate(prompt, params).token_ids for prompt in prompts]
        assert [done.token_ids for done in engine.generate(list(prompts), params)] == plain
        assert engine.scheduler.preempted, "this was to run out of pages"


def test_sampled_output_of_one_seed_is_one_output(folders: dict[str, Path]) -> None:
    """Alone and in a batch, and with ``shared`` noise that of plain decoding."""
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5, ignore_eos=True)
    with load(folders["target"], folders["llama"], draft_temperature=1.0) as engine:
        together = engine.generate(list(PROMPTS), params)
        assert [engine.generate(prompt, params).token_ids for prompt in PROMPTS] == [x.token_ids for x in together]
        shared = engine.using(accept="match", draft_noise="shared")
        plain = engine.using(draft_tokens=0, accept="match")
        assert shared.generate(PROMPTS[2], params).token_ids == plain.generate(PROMPTS[2], params).token_ids


# ------------------------------------------------------------------------------------------------------ vocabularies


@pytest.mark.parametrize("rows", [120, 140])
def test_tables_of_other_sizes(folders: dict[str, Path], rows: int) -> None:
    """What only one of the tables has is never drafted; what only the target's has can be in the text."""
    prompt = [*PROMPTS[2], 127, 126, 3]
    with load(folders["target"], folders[f"llama {rows}"]) as engine:
        plain = engine.using(draft_tokens=0).generate(prompt, PARAMS).token_ids
        hot = {"draft_temperature": 50.0}
        for way in (engine, engine.using(**hot)):
            done = way.generate(prompt, PARAMS)
            assert done.token_ids == plain
            assert all(token < min(rows, 128) for round_ in done.rounds for token in round_.drafted)
        sampled = engine.using(**hot).generate(prompt, SamplingParams(max_tokens=20, temperature=50.0, seed=1))
        drafted = {token for round_ in sampled.rounds for token in round_.drafted}
        assert len(drafted) > 12 and max(drafted) < min(rows, 128)


def test_a_drafter_of_fewer_positions_stops_there(folders: dict[str, Path], tmp_path: Path) -> None:
    short = tiny.write_target(tmp_path / "short", {**tiny.TARGET, "max_position_embeddings": 24}, seed=4)
    with load(folders["target"], short, draft_tokens=DRAFTS) as engine:
        done = engine.generate(PROMPTS[2], PARAMS)
        assert done.token_ids == engine.using(draft_tokens=0).generate(PROMPTS[2], PARAMS).token_ids
        ends = [round_.anchor_pos + len(round_.drafted) for round_ in done.rounds]
        assert max(ends) > 24 and all(round_.drafted == () for round_ in done.rounds if round_.anchor_pos >= 24)
        assert max(end for end, round_ in zip(ends, done.rounds, strict=True) if round_.drafted) == 24


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_that_is_planned_is_what_is_allocated(folders: dict[str, Path], family: str) -> None:
    with load(folders["target"], folders[family], max_context=100) as engine:
        resources, plan = engine.resources, engine.resources.plan
        held = [*resources.found.model.parameters(), *resources.found.network.parameters()]  # type: ignore[union-attr]
        assert plan.weights == sum(p.nbytes for p in held)
        drafts = sum(data.nbytes for data in resources._draft_cache.tensors)
        assert plan.draft_cache + plan.rings == drafts and (plan.rings > 0) == (family != "llama")
        read = engine.bytes_read(50) - engine.using(draft_tokens=0).bytes_read(50)
        model, spec = resources.found.network.language, resources._draft_cache.spec  # type: ignore[union-attr]
        assert read == sum(model.bytes_read + spec.bytes_read(50 + i) for i in range(5))  # 5 drafts where nobody says


# -------------------------------------------------------------------------------------------------------------- state


class Scripted(AcceptanceRule):
    """So many drafts stand, whatever they are."""

    lossless = False

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)

    def judge(self, target: TargetLaws, proposal: Proposal, noise: Noise) -> Verdict:
        return Verdict(self.counts.pop(0), (7 * len(self.counts) + 11) % 128)

    def law(self) -> str:
        return "the script"


SCRIPT = [0, 4, 1, 3, 2, 4, 4, 0]


class Bench:
    """A target and a drafter with caches of their own, in which nothing is valid that was not written."""

    def __init__(self, folders: dict[str, Path], family: str, sampling: DraftSampling = ARGMAX) -> None:
        self.model = tiny.load_target(folders["target"])
        network = tiny.load_network(folders[family])
        assert isinstance(network, AutoregressiveNetwork) and isinstance(network, LanguageNetwork)
        self.network, self.sampling = network, sampling

    def drafter(self) -> Autoregressive:
        room = Room(requests=2, longest=200, longest_pass=9, page_size=16)
        cache = self.network.caches(torch.float32, room, 24, tiny.CPU)
        tiny.poison(cache)
        host = Host(self.model, tiny.paged_cache(self.model), Kernels())
        drafter = self.network.bind(host, cache, MethodOptions(draft_tokens=DRAFTS), self.sampling)
        assert isinstance(drafter, Autoregressive)
        return drafter

    def absorbed(self, tokens: Sequence[int]) -> Autoregressive:
        drafter = self.drafter()
        drafter.open(0)
        with torch.inference_mode():
            for start in range(0, len(tokens), 8):
                piece = tokens[start : start + 8]
                drafter.absorb(Rows.of([0], [start], [len(piece)]), piece, ())
        return drafter


def next_logits(drafter: Autoregressive, n: int, anchor: int) -> torch.Tensor:
    """The logits of the anchor's row, of which nothing stays."""
    with torch.inference_mode(), drafter.drafting([0]):
        logits = drafter.run(Rows.of([0], [n], [1]), [anchor])
    drafter.truncate(0, n)
    return logits


@pytest.mark.parametrize("length", [1, 14])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_every_accepted_count_the_state_is_that_of_a_fresh_absorb(
    folders: dict[str, Path], family: str, length: int
) -> None:
    bench = Bench(folders, family)
    drafter, cache = bench.drafter(), tiny.paged_cache(bench.model)
    prompt = tiny.prompt(length, 128, seed=9)
    cache.open(0)
    drafter.open(0)
    request = Request(0, tuple(prompt), 100, frozenset())
    with torch.inference_mode():
        logits = prefill(0, prompt, model=bench.model, cache=cache, drafter=drafter, chunk=7, device=tiny.CPU)
    request.commit([int(logits.argmax())])
    loop = Rounds(bench.model, cache, drafter, Scripted(SCRIPT), device=tiny.CPU)
    for accepted in SCRIPT:
        (round_,) = loop.round([request])
        assert round_.accepted == accepted and len(round_.drafted) == DRAFTS
        committed = [*request.prompt, *request.output]
        n = len(committed) - 1
        assert drafter.held(0) == drafter.cache.tables.length(0) == n == request.anchor_pos
        drafter.cache.check()
        fresh = bench.absorbed(committed[:-1])
        layers = [i for i, pool in enumerate(drafter.cache.spec.pool_of) if i in drafter.cache._layers]
        for layer in layers:
            window = drafter.cache._layers[layer][0].rings
            first = 0 if window is None else max(0, n - gemma.WINDOW + 1)
            for kept, wanted in zip(
                drafter.cache.entries(layer, 0, first), fresh.cache.entries(layer, 0, first), strict=True
            ):
                torch.testing.assert_close(tiny.dense(kept), tiny.dense(wanted), atol=2e-5, rtol=1e-5)
        found, wanted = next_logits(drafter, n, committed[-1]), next_logits(fresh, n, committed[-1])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_what_stands_is_not_computed_again(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many accepted drafts, absorbing feeds the one token that is new; a model with states feeds all."""
    for family, wanted in (("llama", 1), ("gemma4", 1), ("qwen3.5", 4)):
        drafter = Bench(folders, family).absorbed(PROMPTS[1])
        with torch.inference_mode():
            (proposal,) = drafter.propose(Rows.of([0], [15], [1]), [5], [DRAFTS], [Noise(0)])
            drafts = proposal.tokens
            drafter.truncate(0, 18)
            fed: list[int] = []
            run = drafter.run
            monkeypatch.setattr(drafter, "run", lambda rows, ids, **k: (fed.extend(ids), run(rows, ids, **k)))  # noqa: B023
            drafter.absorb(Rows.of([0], [15], [4]), [5, drafts[0], drafts[1], drafts[2] ^ 1], ())
        assert len(fed) == wanted and fed[-1] == drafts[2] ^ 1
        assert drafter.held(0) == 19


def test_drafts_that_the_caches_are_too_small_for(folders: dict[str, Path]) -> None:
    with (
        load(folders["target"], folders["gemma4"], prefill_chunk=32) as engine,
        pytest.raises(UsageError, match="drafts of at most 31 tokens, not 32"),
    ):
        assert engine.using(draft_tokens=31)._drafter.max_drafts == 31
        engine.using(draft_tokens=32)


def test_other_tokens_than_drafted_replace_them(folders: dict[str, Path]) -> None:
    """Nobody needs to truncate first: entries whose ids are not those committed go."""
    bench = Bench(folders, "llama")
    drafter = bench.absorbed(PROMPTS[1])
    with torch.inference_mode():
        (proposal,) = drafter.propose(Rows.of([0], [15], [1]), [5], [DRAFTS], [Noise(0)])
        other = [5, proposal.tokens[0], proposal.tokens[1] ^ 1]
        drafter.absorb(Rows.of([0], [15], [3]), other, ())
    fresh = bench.absorbed([*PROMPTS[1], *other])
    assert torch.equal(next_logits(drafter, 18, 9), next_logits(fresh, 18, 9))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_draft_is_drawn_from_the_models_law_after_the_drafts_before(folders: dict[str, Path], family: str) -> None:
    sampling = DraftSampling(temperature=0.9, top_k=20)
    bench = Bench(folders, family, sampling)
    drafter = bench.absorbed(PROMPTS[2])
    with torch.inference_mode():
        (proposal,) = drafter.propose(Rows.of([0], [16], [1]), [5], [3], [Noise(8)])
    assert isinstance(proposal, Sampled) and len(proposal.tokens) == 3
    text = [*PROMPTS[2], 5, *proposal.tokens]
    for i in range(3):
        law = sampling.law(next_logits(bench.absorbed(text[: 16 + i]), 16 + i, text[16 + i])[0])
        torch.testing.assert_close(proposal.law(i).probs(), law.probs(), atol=1e-5, rtol=0)
        assert proposal.law(i).ids.tolist() == law.ids.tolist()  # type: ignore[union-attr]


def test_budgets_are_kept_and_one_request_does_not_change_another(folders: dict[str, Path]) -> None:
    bench = Bench(folders, "llama")
    alone = []
    for token in (5, 9):
        drafter = bench.absorbed(PROMPTS[2])
        with torch.inference_mode():
            alone += drafter.propose(Rows.of([0], [16], [1]), [token], [DRAFTS], [Noise(0)])
    drafter = bench.absorbed(PROMPTS[2])
    drafter.fork(0, 1, PROMPTS[2])
    with torch.inference_mode():
        both = drafter.propose(Rows.of([0, 1], [16, 16], [1, 1]), [5, 9], [0, 3], [Noise(0), Noise(1)])
    assert both == [PointMass(()), PointMass(alone[1].tokens[:3])]


# ------------------------------------------------------------------------------------------------------------ for real


MANY = [tiny.prompt(1 + 7 * i % 61, 128, seed=100 + i) for i in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_prompts(folders: dict[str, Path], family: str) -> None:
    """Every draft length by both lossless rules, drafts drawn or not."""
    with load(folders["target"], folders[family], max_batch=8) as engine:
        plain = [done.token_ids for done in engine.using(draft_tokens=0).generate(list(MANY), PARAMS)]
        for length in (1, 4, 11):
            for rule in ("exact", "match"):
                for heat in (0.0, 0.8):
                    way = engine.using(draft_tokens=length, accept=rule, draft_temperature=heat)
                    assert [done.token_ids for done in way.generate(list(MANY), PARAMS)] == plain


@pytest.mark.slow
def test_smollm2_drafts_for_itself() -> None:
    with Engine.load(target="smollm2-135m-instruct", drafter="smollm2-135m-instruct", max_context=512) as engine:
        plain = engine.using(draft_tokens=0)
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        for prompt in ("The capital of France is", "def fibonacci(n):"):
            done = engine.using(draft_tokens=7).generate(prompt, params)
            assert done.token_ids == plain.generate(prompt, params).token_ids
            assert all(round_.accepted == len(round_.drafted) for round_ in done.rounds)
        assert engine.notices == ()
