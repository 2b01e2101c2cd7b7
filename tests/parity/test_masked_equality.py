"""Greedy output with a masked drafter is that of plain decoding, id for id: every kind of drafter, effort and lossless
rule, requests together, prompts in chunks, caches checked after every step. And whatever stands of its drafts, each
round drafts what a drafter would that has only ever seen the committed text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import masked
import pytest
import tiny
import torch

from foldspec import Engine, SamplingParams
from foldspec.cache.rows import Rows
from foldspec.noise import Noise

PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)
EFFORTS: dict[str, dict[str, Any]] = {
    "one step": {},
    "steps": {"steps": 3, "order": "entropy"},
    "confidence": {"confidence": 0.05, "order": "dynamic"},
    "top-1 confidence": {"confidence": 0.02},
    "entropy bound": {"entropy_bound": 4.0},
    "origin": {"steps": 2, "order": "origin"},
    "drawn": {"steps": 2, "draft_temperature": 0.8},
}
# the target reads the drafter's own weights causally, so that some drafts stand; of the third, nothing is shared
KINDS = {"dream": "Qwen2ForCausalLM", "sdar": "Qwen3ForCausalLM", "masked llama": "LlamaForCausalLM"}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    at: Path = tmp_path_factory.mktemp("equality")
    if request.param == "masked llama":
        target = tiny.write_target(at / "target")
        drafter = masked.write_masked_llama(at / "drafter")
    else:
        target = masked.golden_folder(request.param, at / "target", architectures=[KINDS[request.param]])
        drafter = masked.golden_folder(request.param, at / "drafter")
    options: dict[str, Any] = {"draft_tokens": 6, "max_context": 128, "prefill_chunk": 16, "prefill_budget": 7}
    with Engine.load(target=str(target), drafter=str(drafter), debug=True, page_size=16, **options) as found:
        yield found


def prompts(engine: Engine) -> list[Any]:
    return [tiny.prompt(n, engine.vocabulary - 20, seed=n) for n in (*range(1, 17), 30, 31, 32, 45)]


def outputs(engine: Engine) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate(prompts(engine), PARAMS)]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[tuple[int, ...]]:
    return outputs(engine.using(draft_tokens=0))


QUICK = (("steps", "exact"), ("confidence", "match"))
EACH = [
    pytest.param(effort, rule, marks=() if (effort, rule) in QUICK else pytest.mark.slow)
    for effort in EFFORTS
    for rule in ("exact", "match")
]


@pytest.mark.parametrize(("effort", "rule"), EACH)
def test_greedy_output_is_plain_decodings(engine: Engine, plain: Any, effort: str, rule: str) -> None:
    used = engine.using(accept=rule, **EFFORTS[effort])
    assert used.lossless and used.method.effort.order is not None
    found = outputs(used)
    assert found == plain and all(len(ids) == 14 for ids in found)


def others(engine: Engine) -> dict[str, Any]:
    kind = engine.resources.found.drafter
    assert kind is not None
    dream = kind.config.architecture == "DreamModel"
    return {"prefix_cache": "approximate"} if dream else {"block_length": 5}


def test_an_approximate_prefix_and_another_grid(engine: Engine, plain: Any) -> None:
    """From one prefill, too, whose entries were computed on the drafter's own grid."""
    used = engine.using(steps=3, order="entropy", **others(engine))
    assert outputs(used) == plain
    with engine.prefill(prompts(engine)[-1]) as prefix:
        for each in (engine, used):
            done, alone = each.generate(prefix, PARAMS), each.generate(prompts(engine)[-1], PARAMS)
            assert done.token_ids == alone.token_ids == plain[-1] and done.rounds == alone.rounds


@pytest.mark.parametrize(
    "forced", [pytest.param("0", marks=pytest.mark.slow), pytest.param("2", marks=pytest.mark.slow), "0.7,0.8,0.6"]
)
def test_every_round_drafts_as_if_it_were_the_first(engine: Engine, forced: str) -> None:
    method = {"steps": 2, "order": "entropy"}
    used = engine.using(force_accept=forced, **method)
    asked = prompts(engine)[10:14]
    done = used.generate(asked, SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=5))
    fresh = engine.using(**method)
    counts = set()
    for prompt, each in zip(asked, done, strict=True):
        text = [*prompt, *each.token_ids]
        for r in each.rounds:
            counts.add(r.accepted)
            drafter = fresh._drafter
            with torch.inference_mode():
                drafter.open(999)
                drafter.absorb(Rows.of([999], [0], [r.anchor_pos]), text[: r.anchor_pos], ())
                rows = Rows.of([999], [r.anchor_pos], [1])
                (again,) = drafter.propose(rows, [text[r.anchor_pos]], [len(r.drafted)], [Noise(0)])
                drafter.close(999)
            assert again.tokens == r.drafted
    assert len(counts) > 1 or forced != "0.7,0.8,0.6"
