"""Speculation must not change a token: the checks that every model family runs, with a drafter whose right and wrong
drafts are known beforehand, and with a tiny DFlash drafter."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny

from foldspec import Completion, Engine, SamplingParams
from foldspec.cache.rows import Rows
from foldspec.drafters import MODEL_FREE
from foldspec.drafters.base import NoDrafter
from foldspec.noise import Noise
from foldspec.records import PointMass, Proposal

BLOCK = 5
WINDOW = 24
METHODS: tuple[dict[str, Any], ...] = (
    {"context": "full"},
    {"context": "window", "window": WINDOW},
    {"context": "fold", "window": WINDOW, "alpha": 2.0},
)


class Script(NoDrafter):
    """Proposes the next k tokens of a text that it knows and then a wrong one; k is drawn from 0 .. B.

    ``texts``   what may be generated, prompts included
    ``right``   of the rounds so far: the anchor's position, and how many drafts were right
    """

    max_drafts = BLOCK
    texts: ClassVar[list[tuple[int, ...]]] = []
    vocabulary: ClassVar[int] = 0
    right: ClassVar[dict[tuple[int, int], int]] = {}

    def __init__(self) -> None:
        self._draw = random.Random(0)
        self._seen: dict[int, list[int]] = {}

    def absorb(self, rows: Rows, tokens: Sequence[int], taps: Sequence[Any]) -> None:
        for request, start, packed in rows:
            seen = self._seen.setdefault(request, [])
            assert start == len(seen), "committed rows come in order, and each once"
            seen += tokens[packed]

    def propose(
        self, anchors: Rows, tokens: Sequence[int], budgets: Sequence[int], noises: Sequence[Noise]
    ) -> list[Proposal]:
        proposals: list[Proposal] = []
        for (request, n, _), anchor, budget in zip(anchors, tokens, budgets, strict=True):
            begin = (*self._seen[request], anchor)
            (number,) = [i for i, text in enumerate(self.texts) if text[: n + 1] == begin]
            right = self._draw.randint(0, BLOCK)
            next_ids = self.texts[number][n + 1 :]
            drafts = (*next_ids[:right], *((i + 1) % self.vocabulary for i in next_ids[right : right + 1]))
            proposals.append(PointMass(drafts[: min(budget, BLOCK)]))
            self.right[number, n] = min(right, len(proposals[-1].tokens))
        return proposals


def follows_a_script(folder: Path, patch: pytest.MonkeyPatch, *, rounds: int = 200, **options: Any) -> None:
    """Greedy output of three requests at once is plain decoding's, each draft accepted that was right and no other,
    while blocks are taken back at every length for ``rounds`` rounds."""
    patch.setitem(MODEL_FREE, "script", "scripted:Script")
    settings = {"page_size": 16, "prefill_chunk": 50, "max_context": 1024, "max_batch": 3, "debug": True, **options}
    with Engine.load(target=str(folder), drafter="none", **settings) as engine:
        prompts = [tiny.prompt(length, engine.vocabulary, seed=2) for length in (3, 3 * WINDOW + 5, 150)]
        each = 2 + rounds * (BLOCK + 2) // 2 // len(prompts)
        params = SamplingParams(max_tokens=each, ignore_eos=True)
        plain = engine.generate(prompts, params)
        patch.setattr(Script, "texts", [(*done.prompt_ids, *done.token_ids) for done in plain])
        patch.setattr(Script, "vocabulary", engine.vocabulary)
        patch.setattr(Script, "right", {})
        found = engine.using(drafter="script").generate(prompts, params)
        assert [done.token_ids for done in found] == [done.token_ids for done in plain]
        assert sum(len(done.rounds) for done in found) >= rounds
        for number, done in enumerate(found):
            for r in done.rounds:
                assert r.accepted == Script.right[number, r.anchor_pos]
        counts = {(len(r.drafted), r.accepted) for done in found for r in done.rounds}
        assert counts >= {*((k + 1, k) for k in range(BLOCK)), (BLOCK, BLOCK)}


def speculates_like_plain(folder: Path, drafter: Path, **options: Any) -> list[Completion]:
    """With a drafter that has weights, under every context method, at contexts of more than three windows."""
    settings = {"page_size": 16, "prefill_chunk": 50, "max_context": 512, "max_batch": 2, "debug": True, **options}
    found: list[Completion] = []
    with Engine.load(target=str(folder), drafter=str(drafter), **settings) as engine:
        prompts = [tiny.prompt(length, engine.vocabulary, seed=4) for length in (WINDOW - 3, 3 * WINDOW + 17)]
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        plain = engine.using(draft_tokens=0).generate(prompts, params)
        for method in METHODS:
            done = engine.using(**method).generate(prompts, params)
            assert [d.token_ids for d in done] == [d.token_ids for d in plain], method
            assert all(r.drafted for d in done for r in d.rounds[:-1])
            found += done
    return found


def drafter_for(folder: Path, into: Path) -> Path:
    """A random DFlash drafter that fits the target in ``folder``: layers of both kinds, taps of the target's first
    layer and of the last but one."""
    target = json.loads((folder / "config.json").read_text())
    target = target.get("text_config", target)
    layers = target["num_hidden_layers"]
    config = tiny.changed(
        tiny.ZLAB,
        vocab_size=target["vocab_size"],
        hidden_size=target["hidden_size"],
        num_target_layers=layers,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=9,
        dflash_config={"block_size": 5, "mask_token_id": 0, "target_layer_ids": [0, layers - 2]},
    )
    return tiny.write_drafter(into, config)
