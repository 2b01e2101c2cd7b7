"""The same checkpoint in foldspec and in transformers: what tests of every model family compare."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from foldspec import Engine, SamplingParams
from foldspec.cache.paged import PagedCache
from foldspec.kernels.dispatch import Kernels
from foldspec.models.base import LanguageModel

TOLERANCE = 1e-4
PAGE, LENGTH = 16, 83

# in pieces of these sizes; the last one repeats
WAYS = {
    "prefill": [LENGTH],
    "chunks of a page": [16],
    "chunks that straddle pages": [17],
    "chunks of 7": [7],
    "decode": [33, 1],
    "decode from nothing": [1],
    "blocks of 5": [31, 5],
    "blocks of 6": [32, 6],
    "blocks of 8": [15, 8],
}


class Pair:
    """A checkpoint, loaded by both."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.folder, self.model = folder, tiny.load_target(folder, dtype=dtype)
        auto = transformers.AutoModelForCausalLM
        self.oracle = auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()

    @functools.cached_property
    def ids(self) -> list[int]:
        return tiny.prompt(LENGTH, self.model.vocabulary, seed=5)

    def wanted(self, ids: Sequence[int]) -> torch.Tensor:
        """One forward over everything, by transformers."""
        return self._wanted(tuple(ids))[0]

    def layers(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """What every layer of transformers' gives: raw, while its own list has the last one after the final norm."""
        return self._wanted(tuple(ids))[1]

    @functools.cache  # noqa: B019  (few pairs, and they live as long as their tests)
    @torch.inference_mode()
    def _wanted(self, ids: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        raw: dict[int, torch.Tensor] = {}

        def keep(i: int, out: Any) -> None:
            raw[i] = out[0] if isinstance(out, tuple) else out

        core = self.oracle.model
        layers = getattr(core, "language_model", core).layers
        hooks = [m.register_forward_hook(lambda _m, _a, out, i=i: keep(i, out)) for i, m in enumerate(layers)]
        logits = self.oracle(torch.tensor([ids])).logits[0]
        for hook in hooks:
            hook.remove()
        return logits, [raw[i].reshape(len(ids), -1) for i in range(len(layers))]


def write(
    folder: Path,
    config: transformers.PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    factors: Mapping[str, float] = MappingProxyType({}),
    **save: Any,
) -> Path:
    """A random checkpoint, written by transformers; ``factors`` multiply weights with such a part in their names."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    buffers = [(name, b) for name, b in model.named_buffers() if name in model.state_dict()]  # Gemma's layer scalars
    tensors = {**dict(model.named_parameters()), **dict(buffers)}
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    weights = tiny.random_tensors(shapes, seed=config.get_text_config().hidden_size)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name] * math.prod(f for part, f in factors.items() if part in name))
    model.save_pretrained(folder, **save)
    return folder


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


def opened(model: LanguageModel, *requests: int, page_size: int = PAGE, dtype: Any = torch.float32) -> PagedCache:
    cache = tiny.paged_cache(model, page_size=page_size, dtype=dtype)
    for request in requests or (0,):
        cache.open(request)
    return cache


def feed(model: LanguageModel, cache: PagedCache, ids: Sequence[int], sizes: Sequence[int], request: int = 0) -> Any:
    """Ids in pieces of these sizes (the last one repeats); logits of all rows."""
    pieces, at, step = [], 0, 0
    while at < len(ids):
        size = sizes[min(step, len(sizes) - 1)]
        pieces.append(tiny.forward(model, cache, [ids[at : at + size]], [request]).logits)
        at, step = at + size, step + 1
    return torch.cat(pieces)


def meets_golden(folder: Path, tolerance: float = TOLERANCE) -> None:
    """What transformers computed when the golden files were made: logits, layer outputs, chunks, decoding, blocks,
    rollback, greedy ids."""
    golden = load_file(folder / "golden.safetensors")
    ids = golden["input_ids"][0].tolist()
    model = tiny.load_target(folder)
    with safe_open(folder / "golden.safetensors", "pt") as file:
        context = json.loads(file.metadata()["info"])["prefill_len"]

    whole = tiny.forward(model, opened(model), [ids], [0], taps=range(model.layer_count))
    close(whole.logits, golden["logits"][0], tolerance)
    for i, tap in enumerate(whole.taps):
        close(tap, golden[f"hidden.layer.{i:02d}"][0], tolerance)
    for sizes in ([24], [context, 1], [context, 5]):
        close(feed(model, opened(model), ids, sizes), golden["logits"][0], tolerance)

    draft, other = golden["rollback.draft_ids"][0].tolist(), golden["rollback.cont_ids"][0].tolist()
    for kept in (0, 2, 5, 6):
        cache = opened(model)
        feed(model, cache, ids[:context], [context])
        close(tiny.forward(model, cache, [draft], [0]).logits, golden["rollback.verify.logits"][0], tolerance)
        cache.truncate(0, context + kept)
        close(tiny.forward(model, cache, [other], [0]).logits, golden[f"rollback.k{kept}.logits"][0], tolerance)

    wanted = golden["greedy.ids"][0].tolist()
    with Engine.load(target=str(folder), drafter="none") as engine:
        done = engine.generate(ids[:context], SamplingParams(max_tokens=len(wanted), ignore_eos=True))
    assert list(done.token_ids) == wanted


def distance(model: LanguageModel, pair: Pair) -> float:
    """How far a model is from transformers' at most: logits and layer outputs of a prefill, logits of decoding and
    blocks, and after a block of which a part was taken back. Infinite where there is NaN."""
    ids, wanted = pair.ids, pair.wanted(pair.ids)
    whole = tiny.forward(model, opened(model), [ids], [0], taps=range(model.layer_count))
    pairs = [(whole.logits, wanted), *zip(whole.taps, pair.layers(ids), strict=True)]
    pairs.append((feed(model, opened(model), ids, [30, 1, 1, 1, 8]), wanted))
    cache, draft = opened(model), tiny.prompt(8, model.vocabulary, seed=1)
    feed(model, cache, ids[:40], [40])
    tiny.forward(model, cache, [draft], [0])
    cache.truncate(0, 43)
    after = [*ids[:40], *draft[:3], *ids[40:60]]
    pairs.append((tiny.forward(model, cache, [ids[40:60]], [0]).logits, pair.wanted(after)[43:]))
    far = max(float((found - true).abs().nan_to_num(torch.inf, torch.inf).max()) for found, true in pairs)
    return far


# ------------------------------------------------------------------------------------------------------ half precision

ULPS = 2  # units in the last place of a row's largest logit


def like_the_source(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, bool]:
    """Of bf16 logits [rows, vocabulary]: the share of rows that are within 2 ulp of the row's largest logit, and
    whether the argmax differs only where the first two logits are closer than that."""
    found, wanted = found.float(), wanted.float()
    ulp = torch.tensor([2.0 ** (math.frexp(x)[1] - 8) for x in wanted.abs().amax(-1).tolist()])
    near = (found - wanted).abs().amax(-1) <= ULPS * ulp
    first, second = wanted.topk(2, -1).values.unbind(-1)
    same = found.argmax(-1) == wanted.argmax(-1)
    return float(near.float().mean()), bool((same | (first - second < ULPS * ulp)).all())


def meets_half_precision(folder: Path, patch: pytest.MonkeyPatch, tokens: int = 200) -> None:
    """In bf16: logits are those of transformers' eager attention, in one pass and in blocks; and a norm that multiplies
    on the other side of its cast shows."""
    pair = Pair(folder, torch.bfloat16)
    model = tiny.load_target(folder, kernels="eager", dtype=torch.bfloat16)
    ids = tiny.prompt(tokens, model.vocabulary, seed=6)
    wanted = pair.wanted(ids)

    def read(sizes: Sequence[int]) -> tuple[float, bool]:
        return like_the_source(feed(model, opened(model, dtype=torch.bfloat16), ids, sizes), wanted)

    for sizes in ([tokens], [tokens - 60, 7]):
        near, agrees = read(sizes)
        assert near >= 0.99 and agrees, (sizes, near, agrees)

    def swapped(self: Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if weight.dtype == x.dtype:
            return (normed * weight.float()).to(x.dtype)
        return normed.to(x.dtype) * weight.to(x.dtype)

    patch.setattr(Kernels, "rms_norm", swapped)
    assert read([tokens])[0] < 0.9
