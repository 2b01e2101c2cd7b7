"""The same checkpoint in foldspec and in transformers: what tests of every model family compare."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tiny
import torch
import transformers
from safetensors.torch import load_file

from foldspec import Engine, SamplingParams
from foldspec.cache.paged import PagedCache
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

    @torch.inference_mode()
    def wanted(self, ids: Sequence[int]) -> torch.Tensor:
        """One forward over everything, by transformers."""
        logits: torch.Tensor = self.oracle(torch.tensor([list(ids)])).logits[0]
        return logits

    def layers(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """What every layer of transformers' gives: raw, while its own list has the last one after the final norm."""
        raw: dict[int, torch.Tensor] = {}

        def keep(i: int, out: Any) -> None:
            raw[i] = out[0] if isinstance(out, tuple) else out

        core = self.oracle.model
        layers = getattr(core, "language_model", core).layers
        hooks = [m.register_forward_hook(lambda _m, _a, out, i=i: keep(i, out)) for i, m in enumerate(layers)]
        self.wanted(ids)
        for hook in hooks:
            hook.remove()
        return [raw[i].reshape(len(ids), -1) for i in range(len(layers))]


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
    context = len(ids) - golden["rollback.k0.logits"].shape[1]  # replaced below
    context = len(ids) * 2 // 3

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
