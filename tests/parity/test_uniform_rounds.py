"""An engine whose drafter is DiffusionGemma: output ids are plain decoding's for every effort and both lossless rules,
with kept prompts and in one batch; what it says of itself; and the pair of the registry at its true widths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusion
import gemma
import pytest
import tiny
import torch
from cli.command import main, refused
from safetensors.torch import load_file

from foldspec import Engine, SamplingParams
from foldspec.checkpoints.registry import find
from foldspec.checkpoints.shapes import list_tensors
from foldspec.checkpoints.weights import check
from foldspec.drafters import make_network
from foldspec.errors import FoldspecError
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import built_in
from foldspec.memory import make_plan
from foldspec.models.config import ModelConfig
from foldspec.options import EngineOptions, MethodOptions
from foldspec.resources import filled_in

VOCABULARY, LENGTH = 5, 8
PAIR = "gemma-4-31b-diffusiongemma"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """So few ids that a random drafter is often right; windows of 4 and 5, chunks that straddle them."""
    into = tmp_path_factory.mktemp("uniform")
    target = gemma.write_target(into / "target", vocab_size=VOCABULARY)
    drafter = diffusion.write(into / "drafter", vocab_size=VOCABULARY + 3, num_hidden_layers=2, layer_types=None)
    settings = {"page_size": 16, "prefill_chunk": 11, "max_context": 128, "max_batch": 20, "debug": True}
    with Engine.load(target=str(target), drafter=str(drafter), threads=1, **settings) as found:
        yield found


PROMPTS = [tiny.prompt(length, VOCABULARY, seed=length) for length in range(1, 60, 3)]
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
DRAWN = [SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(len(PROMPTS))]


def ids(engine: Engine, params: Any, **method: Any) -> list[tuple[int, ...]]:
    return [done.token_ids for done in engine.using(**method).generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Mapping[str, list[tuple[int, ...]]]:
    assert len(PROMPTS) == 20
    return {"greedy": ids(engine, GREEDY, draft_tokens=0), "drawn": ids(engine, DRAWN, draft_tokens=0)}


@pytest.mark.parametrize("accept", ["exact", "match"])
@pytest.mark.parametrize("steps, bound", [(1, None), (2, None), (4, None), (3, 0.0), (3, 2.0)])
def test_greedy_ids_are_plain_decodings(
    engine: Engine, plain: Mapping[str, list[tuple[int, ...]]], steps: int, bound: float | None, accept: str
) -> None:
    own = engine.using(steps=steps, entropy_bound=bound, accept=accept, draft_tokens=4)
    found = own.generate(PROMPTS, GREEDY)
    assert [done.token_ids for done in found] == plain["greedy"] and own.lossless
    rounds = [r for done in found for r in done.rounds]
    assert {r.accepted for r in rounds} >= {0, 1} and all(r.steps == steps for r in rounds if r.drafted)
    assert max(len(r.drafted) for r in rounds) == 4


def test_drawn_drafts_and_seeded_output(engine: Engine, plain: Mapping[str, list[tuple[int, ...]]]) -> None:
    """Drafts that are drawn change no greedy token; by ``match``, output that is drawn is that of plain decoding."""
    own = engine.using(steps=2, draft_temperature=1.0, entropy_bound=0.5, draft_tokens=5)
    assert [done.token_ids for done in own.generate(PROMPTS[:5], GREEDY)] == plain["greedy"][:5]
    for noise in ("own", "shared"):
        found = own.using(accept="match", draft_noise=noise).generate(PROMPTS[:5], DRAWN[:5])
        assert [done.token_ids for done in found] == plain["drawn"][:5]


def test_from_a_kept_prompt(engine: Engine, plain: Mapping[str, list[tuple[int, ...]]]) -> None:
    own = engine.using(steps=2, draft_tokens=4)
    with own.prefill(PROMPTS[-1]) as prefix:
        assert [own.generate(prefix, GREEDY).token_ids for _ in range(2)] == [plain["greedy"][-1]] * 2


@pytest.mark.parametrize(
    ("method", "where"),
    [({"order": "entropy"}, "order"), ({"confidence": 0.5}, "confidence"), ({"context": "fold"}, "context")],
)
def test_what_means_nothing_to_it_is_refused(engine: Engine, method: dict[str, Any], where: str) -> None:
    with pytest.raises(FoldspecError, match=where):
        engine.using(**method).generate(PROMPTS[:1], GREEDY)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no canvas": ({"canvas_length": None}, {}, "canvas_length is missing"),
    "more chosen than there are": ({}, {"top_k_experts": 9}, "top_k_experts must be in 1 .. 8"),
    "no experts": ({}, {"num_experts": None}, "num_experts is missing"),
    "values of their own": ({}, {"attention_k_eq_v": False}, "attention_k_eq_v = False is not supported"),
    "another vocabulary": ({}, {"vocab_size": 4096}, "it was made for 4096 ids, the target has 5"),
    "a text that looks ahead": ({}, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention of text"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_pair_is_refused_in_one_line(engine: Engine, name: str, tmp_path: Path) -> None:
    config = ModelConfig.read(diffusion.GOLDEN).values
    top, text, said = BAD[name]
    changed = {**config, **top, "text_config": {**config["text_config"], **text}}
    tensors = load_file(diffusion.GOLDEN / "model.safetensors")
    if name == "another vocabulary":
        tensors["model.decoder.embed_tokens.weight"] = torch.zeros(4096, 64)
    drafter = tiny.write_checkpoint(tmp_path / "drafter", changed, tensors)
    with pytest.raises(FoldspecError, match=said):
        Engine.load(target=str(engine.resources.found.target.folder), drafter=str(drafter))


# ---------------------------------------------------------------------------------------------------- the registry's


def test_the_released_file_has_the_modules_tensors() -> None:
    """1,047 less 356 of the vision tower; shapes too."""
    source = find(PAIR).drafter
    assert source is not None
    listed = list_tensors(source.config, source.name)
    config = ModelConfig(source.config, source.name)
    network = make_network(config, tuple(listed.entries), Kernels("reference"))
    check(listed, {k: tuple(t.shape) for k, t in network.state_dict().items()}, rename=network.parameter_name)
    read = [name for name in listed.entries if network.parameter_name(name) is not None]
    assert len(listed.entries) == 1047 and len(read) == len(network.state_dict()) == 691
    with pytest.raises(FoldspecError, match="unknown target architecture"):
        Engine.load(target=str(diffusion.GOLDEN), drafter="none")


def test_the_memory_of_the_pair() -> None:
    """In bf16, at a batch of one. By hand: 30.7e9 and 25.3e9 parameters; sliding layers keep rings of both."""
    kernels, device = Kernels("reference"), torch.device("cpu")
    found = built_in(find(PAIR), kernels)
    method = filled_in(MethodOptions(), found)
    assert method.draft_tokens == 16 and method.context == "full"
    plan = make_plan(
        found,
        EngineOptions(max_batch=1, cache_tokens=16384),
        method,
        dtype=torch.bfloat16,
        device=device,
        kernels=kernels,
        chunk=512,
        longest=8192,
        must_fit=False,
    )
    sizes = [sum(p.numel() for p in module.parameters()) for module in (found.model, found.network)]
    assert plan.weights == 2 * sum(sizes) and 25e9 < sizes[1] < 26e9
    assert plan.draft_cache == (16384 + 256) * 5 * 2 * 2 * 512 * 2  # and one page for the rows of a draft
    assert plan.longest_pass == 512
    ring = (1024 - 1 + 512) * 2
    assert plan.rings == 2 * ring * 2 * (50 * 16 * 256 + 25 * 8 * 256)


@pytest.mark.slow
def test_the_pair_as_dummies() -> None:
    """Two layers of each at their true widths: 128 experts, 262,144 ids."""
    words = (PAIR, "--load-format", "dummy", "--dummy-layers", 2, "--threads", 1, "--max-context", 512)
    done = main("generate", *words, "--prompt-ids", "1,2,3", "--max-tokens", 4, "--steps", 2, "--json")
    assert done.code == 0, done
    assert len(done.json["token_ids"]) == 4 and "decodes alone" not in done.err
    refused(main("generate", *words, "--prompt-ids", "1,2,3", "--order", "entropy"), 2, "draws all places anew")
