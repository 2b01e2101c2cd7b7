"""Greedy output is plain decoding's, id for id: drafters that have one step, and those without weights, at every effort
and by both lossless rules. (Drafters of many steps and language models: ``test_masked_equality.py``,
``test_uniform_rounds.py``, ``test_adapter.py``, ``test_autoregressive.py``.)"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import tiny

from foldspec import SamplingParams

PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)
LENGTHS: list[dict[str, Any]] = [{}, {"draft_tokens": 1}, {"draft_tokens": 3}]
DRAWN: list[dict[str, Any]] = [*LENGTHS, {"draft_temperature": 0.8}]
CONFIDENT: list[dict[str, Any]] = [*DRAWN, *({"confidence_stop": share} for share in (0.3, 0.6, 1.0))]
EFFORTS = {
    "b_qwen3_zlab_mixed": DRAWN,
    "c_qwen3_deepspec_dflash": DRAWN,
    "d_qwen3_dspark": CONFIDENT,
    "e_gemma4_dspark": CONFIDENT,
}
WITHOUT_WEIGHTS = [{"drafter": name} | length for name, length in product(("lookup", "repeat", "unigram"), LENGTHS[1:])]


@pytest.mark.slow
@pytest.mark.parametrize("pair", EFFORTS)
def test_twenty_prompts(pair: str) -> None:
    with tiny.load_pair(pair) as engine:
        prompts = [tiny.prompt(1 + 7 * i % 61, engine.vocabulary - 2, seed=100 + i) for i in range(20)]
        plain = [done.token_ids for done in engine.using(draft_tokens=0).generate(list(prompts), PARAMS)]
        drafted = set()
        for way, rule in product(EFFORTS[pair] + WITHOUT_WEIGHTS, ("exact", "match")):
            found = engine.using(accept=rule, **way).generate(list(prompts), PARAMS)
            assert [done.token_ids for done in found] == plain, (way, rule)
            drafted |= {len(each.drafted) for done in found for each in done.rounds}
        assert drafted >= {0, 1, 3}
