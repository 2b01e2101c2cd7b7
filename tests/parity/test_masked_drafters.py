"""Masked drafters beside transformers: at contexts of any length, with drafts of any length, the tokens are those of a
loop that computes everything anew in every step and knows no cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import masked
import pytest
import tiny
import torch
import transformers
from oracles import write
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config

from foldspec.effort import Effort

WIDTHS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
MASK = 9
Logits = Callable[[Sequence[int]], torch.Tensor]  # ids of everything -> the row that says what stands at each place
EFFORTS = [
    Effort(),
    Effort(steps=2, order="static"),
    Effort(steps=3, order="entropy"),
    Effort(steps=3, order="sequential"),
]
PLACES = [(1, 7), (2, 3), (3, 9), (4, 1), (5, 6), (8, 8), (11, 2), (12, 5), (31, 7), (33, 12)]  # ids, drafts


def cases(*variants: Any) -> list[Any]:
    """Each variant with each effort; every day the first with two of them, the others with one."""
    quick = {(variants[0], "static"), *((each, "entropy") for each in variants)}
    marks = {True: (), False: pytest.mark.slow}
    return [
        pytest.param(each, effort, marks=marks[(each, effort.order) in quick], id=f"{each}-{effort.order}")
        for each in variants
        for effort in EFFORTS
    ]


def four(block: Sequence[int]) -> torch.Tensor:
    """A 4-d mask: a place sees those of its own block's number and below."""
    numbers = torch.tensor(block)
    return torch.zeros(len(block), len(block)).masked_fill(
        numbers[None, :] > numbers[:, None], torch.finfo(torch.float32).min
    )[None, None]


def reveal(rows: torch.Tensor, order: str, count: int) -> list[int]:
    """Which of the masked places are the surest, the first of equal ones first; all of it at temperature 0."""
    rows = rows.clone()
    rows[:, MASK] = -torch.inf
    p = rows.softmax(-1)
    scores = {
        "static": p.amax(-1),
        "entropy": (p * p.clamp_min(1e-30).log()).sum(-1),
        "sequential": -torch.arange(len(p)).float(),
    }[order]
    return sorted(range(len(p)), key=lambda i: (-float(scores[i]), i))[:count]


def fill(y: list[int], free: Sequence[int], quotas: Sequence[int], order: str, logits: Logits, end: int) -> None:
    """Steps over the free places, until none is masked."""
    for quota in filter(None, quotas):
        left = [place for place in free if y[place] == MASK]
        if not left:
            return
        rows = logits(y[:end])[left]
        rows[:, MASK] = -torch.inf
        for i in reveal(rows, order, min(quota, len(left))):
            y[left[i]] = int(rows[i].argmax())


def balanced(count: int, steps: int) -> list[int]:
    return [count // steps + (i < count % steps) for i in range(steps)]


def on_grid(ids: Sequence[int], count: int, block: int, effort: Effort, logits: Logits) -> list[int]:
    """Block after block, each whole."""
    y, last = list(ids), len(ids) + count
    while len(y) < last:
        free = list(range(len(y), min(last, (len(y) // block + 1) * block)))
        end = (len(y) // block + 1) * block
        y += [MASK] * (end - len(y))
        fill(y, free, balanced(block, effort.steps or 1), effort.order or "static", logits, end)
    return y[len(ids) : last]


@torch.inference_mode()
@pytest.mark.parametrize(("block", "effort"), cases(4, 5))
def test_sdar(block: int, effort: Effort, tmp_path: Path) -> None:
    folder = write(tmp_path, Qwen3Config(**WIDTHS, head_dim=16))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    declare(folder, "SDARForCausalLM", block_size=4)
    bench = masked.Bench(folder, effort, 12, block_length=None if block == 4 else block)

    def logits(y: Sequence[int]) -> torch.Tensor:
        grid = [place // block for place in range(len(y))]
        return oracle(torch.tensor([list(y)]), attention_mask=four(grid)).logits[0]

    for request, (length, count) in enumerate(PLACES):
        ids = tiny.prompt(length, seed=3)
        assert list(bench.draft(ids, count, request)) == on_grid(ids, count, block, effort, logits), (length, count)


def declare(folder: Path, architecture: str, **more: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "architectures": [architecture], "mask_token_id": MASK, **more}
    path.write_text(json.dumps(config))


@torch.inference_mode()
@pytest.mark.parametrize(("tables", "effort"), cases(False, True))
def test_our_masked_llama(tables: bool, effort: Effort, tmp_path: Path) -> None:
    target = tiny.load_target(tiny.write_target(tmp_path / "target"))
    folder = masked.write_masked_llama(tmp_path / "drafter", tables=tables)
    bench = masked.Bench(folder, effort, 12, target=target)
    own, of_target = load_file(folder / "model.safetensors"), load_file(tmp_path / "target" / "model.safetensors")
    embed = (own if tables else of_target)["model.embed_tokens.weight"]
    head = embed if tables else of_target["lm_head.weight"]
    config = json.loads((folder / "config.json").read_text())
    names = {key: value for key, value in config.items() if key in LlamaConfig().to_dict() and key != "architectures"}
    oracle = LlamaForCausalLM._from_config(LlamaConfig(**names, pad_token_id=None), attn_implementation="eager").eval()
    mask = own.pop("model.mask_embedding")
    oracle.load_state_dict({**own, "model.embed_tokens.weight": embed, "lm_head.weight": embed})

    def logits(y: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(list(y))
        rows = embed[ids].clone()
        rows[ids == MASK] = mask
        grid = [place // 4 for place in range(len(y))]
        return oracle.model(inputs_embeds=rows[None], attention_mask=four(grid)).last_hidden_state[0] @ head.T

    for request, (length, count) in enumerate(PLACES):
        ids = [token for token in tiny.prompt(length + 20, seed=4) if token != MASK][:length]
        assert list(bench.draft(ids, count, request)) == on_grid(ids, count, 4, effort, logits), (length, count)


def dream_quotas(count: int, steps: int) -> list[int]:
    """By Dream's clock, in the words of its sampler."""
    t, left, found = torch.linspace(1, 1e-3, steps + 1, dtype=torch.float64), count, []
    for i in range(steps):
        n = int(left * (1 - t[i + 1] / t[i])) if i < steps - 1 else left
        found.append(n)
        left -= n
    return found


@torch.inference_mode()
@pytest.mark.parametrize(("prefix_cache", "effort"), cases("exact", "approximate"))
def test_dream(prefix_cache: str, effort: Effort, tmp_path: Path) -> None:
    folder = write(tmp_path, Qwen2Config(**WIDTHS))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    declare(folder, "DreamModel", model_type="Dream")
    bench = masked.Bench(folder, effort, 12, prefix_cache=prefix_cache)
    differ = 0
    for request, (length, count) in enumerate(PLACES):
        ids = tiny.prompt(length, seed=6)
        cache, kept = DynamicCache(), length - 1

        def whole(y: Sequence[int]) -> torch.Tensor:
            rows = oracle(torch.tensor([list(y)]), attention_mask=four([0] * len(y))).logits[0]
            return torch.cat([rows[:1], rows[:-1]])

        def once(y: Sequence[int], cache: DynamicCache = cache, kept: int = kept) -> torch.Tensor:
            """The prefix as it was beside the first canvas; the rows from the anchor's on anew."""
            if cache.get_seq_length() == 0:
                oracle(torch.tensor([list(y)]), attention_mask=four([0] * len(y)), cache=cache)
            if cache.get_seq_length() > kept:
                cache.crop(kept - cache.get_seq_length())
            mask = torch.zeros(1, 1, len(y) - kept, len(y))
            positions = torch.arange(kept, len(y))[None]
            rows = oracle(
                torch.tensor([list(y[kept:])]), attention_mask=mask, cache=cache, position_ids=positions
            ).logits[0]
            return torch.cat([torch.zeros(kept + 1, rows.shape[1]), rows[:-1]])

        found = bench.draft(ids, count, request)
        y = [*ids, *[MASK] * count]
        quotas, order = dream_quotas(count, effort.steps or 1), effort.order or "entropy"
        fill(y, range(length, len(y)), quotas, order, whole if prefix_cache == "exact" else once, len(y))
        assert list(found) == y[length:], (length, count)
        y[length:] = [MASK] * count
        fill(y, range(length, len(y)), quotas, order, whole, len(y))
        differ += list(found) != y[length:]
    # one step sees the canvas that is all masks; from the second on, the prefix does not know what was revealed
    assert (differ > 0) == (prefix_cache == "approximate" and (effort.steps or 1) > 1)
