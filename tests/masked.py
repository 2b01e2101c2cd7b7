"""Masked drafters of the tests: tiny checkpoints, one drafter alone over a cache of NaN, and a target for an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file

from foldspec.cache.rows import Rows
from foldspec.drafters.base import Host
from foldspec.drafters.masked_diffusion import MaskedDiffusion, MaskedNetwork
from foldspec.effort import Effort
from foldspec.models.base import LanguageModel
from foldspec.noise import Noise
from foldspec.options import MethodOptions
from foldspec.sampling import DraftSampling

GOLDEN = tiny.GOLDEN / "tiny"
MASK = {"dream": 500, "sdar": 501}
MASKED_LLAMA: dict[str, Any] = {
    **tiny.TARGET,
    "architectures": ["MaskedLlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "block_length": 4,
    "mask_token_id": 9,
    "tie_word_embeddings": True,
}


def golden_folder(name: str, at: Path, **changes: Any) -> Path:
    """A golden drafter; SDAR's config, as published, leaves the mask to the tokenizer, which the tiny one lacks."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    tensors = load_file(GOLDEN / name / "model.safetensors")
    return tiny.write_checkpoint(at, tiny.changed(config, mask_token_id=MASK[name], **changes), tensors)


def write_masked_llama(at: Path, *, tables: bool = False, seed: int = 7, **changes: Any) -> Path:
    """Our own form: without tables, unless it is to have some, and with a mask's embedding of its own."""
    config = tiny.changed(MASKED_LLAMA, **changes)
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = width // heads * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    shapes = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes |= {"model.norm.weight": (width,), "model.mask_embedding": (width,)}
    if tables:
        shapes["model.embed_tokens.weight"] = (config["vocab_size"], width)
    return tiny.write_checkpoint(at, config, tiny.random_tensors(shapes, seed))


class Bench:
    """A drafter alone, and the (start, ids) of each of its passes. ``drafts``: tokens of a draft; ``like``: over the
    weights and the cache of another."""

    def __init__(
        self,
        folder: Path | None,
        effort: Effort,
        drafts: int,
        *,
        like: Bench | None = None,
        target: LanguageModel | None = None,
        sampling: DraftSampling | None = None,
        **method: Any,
    ) -> None:
        if like is not None:
            network, self.cache, model = like.network, like.cache, like.target
        else:
            assert folder is not None
            loaded = tiny.load_network(folder)
            assert isinstance(loaded, MaskedNetwork)
            network, model = loaded, loaded.language if target is None else target
            self.cache = tiny.paged_cache(network.language, pages=128, page_size=16)
        self.network, self.target = network, model
        host = Host(model, self.cache, tiny.kernels_of("auto"))
        sampling = sampling or DraftSampling(effort=effort)
        options = network.filled(MethodOptions(draft_tokens=drafts, **method))
        drafter = network.bind(host, self.cache, options, sampling)
        assert isinstance(drafter, MaskedDiffusion)
        self.drafter = drafter
        self.passes: list[tuple[int, list[int]]] = []
        run = drafter._forward

        def forward(rows: Rows, tokens: Sequence[int], heads: tuple[int, ...]) -> torch.Tensor:
            self.passes += [(start, list(tokens[packed])) for _, start, packed in rows]
            return run(rows, tokens, heads)

        drafter._forward = forward  # type: ignore[method-assign]

    def absorb(self, ids: Sequence[int], request: int = 0) -> None:
        start = self.drafter.held(request)
        if ids:
            self.drafter.absorb(Rows.of([request], [start], [len(ids)]), ids, ())

    @torch.inference_mode()
    def propose(self, anchor: int, count: int, request: int = 0, noise: Noise | None = None) -> Any:
        n = self.drafter.held(request)
        (proposal,) = self.drafter.propose(Rows.of([request], [n], [1]), [anchor], [count], [noise or Noise(0)])
        return proposal

    def draft(self, ids: Sequence[int], count: int, request: int = 0) -> tuple[int, ...]:
        """Drafts after ids, the last of which is the anchor, of a request that is opened for it."""
        self.drafter.open(request)
        self.absorb(ids[:-1], request)
        self.passes.clear()
        tokens: tuple[int, ...] = self.propose(ids[-1], count, request).tokens
        return tokens
