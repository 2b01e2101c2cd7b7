"""Every tensor of a released checkpoint from its config alone: names as in the file, shapes, and the dtype. Imports no
torch and opens no file.

This is what a file is expected to hold: the parts that a text model of foldspec leaves unread (vision, audio, extra
prediction layers) are counted too. Whether the models here accept such a list is asked of them, as of a real file, by
``loading.built_in``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from foldspec.checkpoints.headers import FLOATS, Entry, Weights
from foldspec.errors import CheckpointError

__all__ = ["layer_kinds", "list_tensors", "side_cache"]

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]

# Held wider than the rest in Qwen3.5's released file: with these two its size comes out to the byte.
_WIDE = ("linear_attn.A_log", "linear_attn.norm.weight")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def list_tensors(config: Config, where: str) -> Weights:
    """All tensors of the checkpoint that has this config. ``where`` names it in errors, and stands for its folder.

    Raises :class:`CheckpointError` for an architecture that is not known here or a key that its list needs.
    """
    name = (config.get("architectures") or ["no architecture"])[0]
    if name not in _LISTS:
        raise CheckpointError(f"the tensors of {name} cannot be listed from its config", where=where)
    try:
        shapes = _LISTS[name](config)
        dtype = _DTYPES[_text(config).get("dtype", "bfloat16")]
    except KeyError as error:
        raise CheckpointError(
            f"its config lacks {error}, or has a value for it that is not known", where=where
        ) from None
    folder, start, entries = Path(where), 0, {}
    for tensor, shape in shapes.items():
        own = "F32" if tensor.endswith(_WIDE) else dtype
        size = math.prod(shape) * FLOATS[own]
        entries[tensor] = Entry(folder, own, shape, start, size)
        start += size
    return Weights(folder, entries)


def side_cache(weights: Weights, entries: int, layers: Collection[int] | None = None) -> int:
    """Bytes of FOLD's side cache as its paper lays it out (section B.4): an un-rotated key and a value of every
    committed entry, in bf16, for these drafter ``layers`` (None: all). foldspec keeps fewer copies."""
    rows = 0
    for name, entry in weights.entries.items():
        place, _, kind = name.rpartition(".self_attn.")
        if kind == "k_proj.weight" and (layers is None or int(place.rpartition(".")[2]) in layers):
            rows += entry.shape[0]  # values are as wide as keys, also where one projection serves both
    return entries * 2 * rows * FLOATS["BF16"]


def layer_kinds(config: Config) -> list[str]:
    """The kind of each layer of a text model: as listed or, where no list is given, every so many layers a full one
    after linear ones (Qwen3.5), or every sixth, and the last, after sliding ones (Gemma-4), or all alike."""
    count = config["num_hidden_layers"]
    if config.get("layer_types"):
        return list(config["layer_types"])
    every, other = config.get("full_attention_interval"), "linear_attention"
    if every is None and "global_head_dim" in config:
        every, other = 6, "sliding_attention"
    return [
        "full_attention"
        if not every or (i + 1) % every == 0 or (other == "sliding_attention" and i == count - 1)
        else other
        for i in range(count)
    ]


def _text(config: Config) -> Config:
    part: Config = config.get("text_config") or config
    return part


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _norms(width: int, *names: str) -> Shapes:
    return {f"{name}.weight": (width,) for name in names}


def _attention(c: Config, *, head_norm: bool = False, bias: bool = False, gate: bool = False) -> Shapes:
    """Projections of a layer. ``bias`` on q, k and v, ``gate``: a second half of q for each head."""
    width, heads, groups = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or width // heads
    out = {"q_proj": heads * d * (2 if gate else 1), "k_proj": groups * d, "v_proj": groups * d}
    shapes: Shapes = {f"{name}.weight": (rows, width) for name, rows in out.items()}
    if bias:
        shapes |= {f"{name}.bias": (rows,) for name, rows in out.items()}
    shapes["o_proj.weight"] = (width, heads * d)
    if head_norm:
        shapes |= _norms(d, "q_norm", "k_norm")
    return _under("self_attn.", shapes)


def _mlp(width: int, inner: int, prefix: str = "mlp.", suffix: str = ".weight") -> Shapes:
    ways = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return {f"{prefix}{name}{suffix}": shape for name, shape in ways.items()}


def _layers(count: int, layer: Callable[[int], Shapes], prefix: str = "layers.") -> Shapes:
    shapes: Shapes = {}
    for i in range(count):
        shapes |= _under(f"{prefix}{i}.", layer(i))
    return shapes


def _outside(c: Config) -> Shapes:
    """The embedding table and the last norm."""
    return {"embed_tokens.weight": (c["vocab_size"], c["hidden_size"]), "norm.weight": (c["hidden_size"],)}


def _head(c: Config) -> Shapes:
    return {} if c.get("tie_word_embeddings") else {"lm_head.weight": (c["vocab_size"], c["hidden_size"])}


def _block(c: Config, attention: Shapes) -> Shapes:
    """The layer that Llama, Qwen and DFlash share."""
    width = c["hidden_size"]
    return (
        attention | _mlp(width, c["intermediate_size"]) | _norms(width, "input_layernorm", "post_attention_layernorm")
    )


def _llama(c: Config) -> Shapes:
    """Llama, Qwen2 (biases) and Qwen3 (head norms), and the diffusion models that keep their tensors."""
    name = c["architectures"][0]
    bias, head_norm = name in ("Qwen2ForCausalLM", "DreamModel"), name in ("Qwen3ForCausalLM", "SDARForCausalLM")
    layer = _block(c, _attention(c, head_norm=head_norm, bias=bias))
    return _under("model.", _outside(c) | _layers(c["num_hidden_layers"], lambda _: layer)) | _head(c)


def _qwen3_5(config: Config) -> Shapes:
    """The hybrid's text part, its vision tower (``model.visual``) and one more layer that predicts ahead (``mtp``)."""
    c = _text(config)
    width, full = c["hidden_size"], _block(c, _attention(c, head_norm=True, gate=c["attn_output_gate"]))
    keys, values = (c[f"linear_num_{x}_heads"] * c[f"linear_{x}_head_dim"] for x in ("key", "value"))
    heads, mixed = c["linear_num_value_heads"], 2 * keys + values
    linear: Shapes = {
        "in_proj_qkv.weight": (mixed, width),
        "in_proj_z.weight": (values, width),
        "in_proj_b.weight": (heads, width),
        "in_proj_a.weight": (heads, width),
        "conv1d.weight": (mixed, 1, c["linear_conv_kernel_dim"]),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (c["linear_value_head_dim"],),
        "out_proj.weight": (width, values),
    }
    mixer, kinds = _block(c, _under("linear_attn.", linear)), layer_kinds(c)
    layers = _layers(c["num_hidden_layers"], lambda i: full if kinds[i] == "full_attention" else mixer)
    shapes = _under("model.language_model.", _outside(c) | layers) | _head(c)
    if c.get("mtp_num_hidden_layers"):
        extra = _layers(c["mtp_num_hidden_layers"], lambda _: full)
        extra |= _norms(width, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        shapes |= _under("mtp.", extra | {"fc.weight": (width, 2 * width)})
    return shapes | _under("model.visual.", _qwen_vision(config["vision_config"]))


def _qwen_vision(v: Config) -> Shapes:
    width, inner, merged = v["hidden_size"], v["intermediate_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2

    def linear(name: str, rows: int, columns: int) -> Shapes:
        return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

    def norm(name: str) -> Shapes:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    block = linear("attn.qkv", 3 * width, width) | linear("attn.proj", width, width) | norm("norm1") | norm("norm2")
    block |= linear("mlp.linear_fc1", inner, width) | linear("mlp.linear_fc2", width, inner)
    merger = norm("norm") | linear("linear_fc1", merged, merged) | linear("linear_fc2", v["out_hidden_size"], merged)
    patch = (width, v["in_channels"], v["temporal_patch_size"], v["patch_size"], v["patch_size"])
    shapes: Shapes = {"patch_embed.proj.weight": patch, "patch_embed.proj.bias": (width,)}
    shapes["pos_embed.weight"] = (v["num_position_embeddings"], width)
    return shapes | _layers(v["depth"], lambda _: block, "blocks.") | _under("merger.", merger)


def _gemma_layer(c: Config, *, full: bool) -> Shapes:
    """A layer of Gemma-4. Full layers have geometry of their own, and keys serve as values there."""
    width, geometry = c["hidden_size"], dict(c)
    if full:
        geometry["head_dim"] = c["global_head_dim"]
        geometry["num_key_value_heads"] = c["num_global_key_value_heads"]
    shapes = _attention(geometry, head_norm=True) | _mlp(width, c["intermediate_size"])
    if full and c["attention_k_eq_v"]:
        del shapes["self_attn.v_proj.weight"]
    around = [f"{when}_{what}_layernorm" for when, what in (("post", "attention"), ("pre", "feedforward"))]
    shapes |= _norms(width, "input_layernorm", *around, "post_feedforward_layernorm")
    if c.get("num_experts"):
        experts, inner = c["num_experts"], c["moe_intermediate_size"]
        shapes |= _norms(
            width, *(f"{name}_feedforward_layernorm_{i}" for name, i in (("post", 1), ("post", 2), ("pre", 2)))
        )
        shapes |= {
            "router.proj.weight": (experts, width),
            "router.scale": (width,),
            "router.per_expert_scale": (experts,),
            "experts.gate_up_proj": (experts, 2 * inner, width),
            "experts.down_proj": (experts, width, inner),
        }
    return shapes | {"layer_scalar": (1,)}


def _gemma_text(c: Config) -> Shapes:
    kinds, layer = layer_kinds(c), {full: _gemma_layer(c, full=full) for full in (False, True)}
    return _outside(c) | _layers(len(kinds), lambda i: layer[kinds[i] == "full_attention"])


def _gemma_vision(v: Config, width: int) -> Shapes:
    """The tower, and the projection of what it says to ``width``."""
    own, d = v["hidden_size"], v["head_dim"]
    inner, rows = v["intermediate_size"], v["num_attention_heads"] * d
    layer: Shapes = {f"self_attn.{x}_proj.linear.weight": (rows, own) for x in "qkv"}
    layer |= {"self_attn.o_proj.linear.weight": (own, rows)}
    layer |= _norms(d, "self_attn.q_norm", "self_attn.k_norm") | _mlp(own, inner, suffix=".linear.weight")
    layer |= _norms(own, "input_layernorm", "post_attention_layernorm")
    layer |= _norms(own, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    tower: Shapes = {"patch_embedder.input_proj.weight": (own, 3 * v["patch_size"] ** 2)}
    tower["patch_embedder.position_embedding_table"] = (2, v["position_embedding_size"], own)
    if v["standardize"]:
        tower |= {"std_bias": (own,), "std_scale": (own,)}
    tower |= _layers(v["num_hidden_layers"], lambda _: layer, "encoder.layers.")
    return _under("vision_tower.", tower) | {"embed_vision.embedding_projection.weight": (width, own)}


def _gemma4(config: Config) -> Shapes:
    c = _text(config)
    tower = _gemma_vision(config["vision_config"], c["hidden_size"])
    return _under("model.language_model.", _gemma_text(c)) | _under("model.", tower)


def _gemma4_unified(config: Config) -> Shapes:
    c, v = _text(config), config["vision_config"]
    width, own, patch = c["hidden_size"], v["mm_embed_dim"], 3 * v["model_patch_size"] ** 2
    shapes: Shapes = {"patch_dense.weight": (own, patch), "pos_embedding": (v["mm_posemb_size"], 2, own)}
    sizes = {"patch_ln1": patch, "patch_ln2": own, "pos_norm": own}
    shapes |= {f"{name}.{part}": (size,) for name, size in sizes.items() for part in ("weight", "bias")}
    shapes |= {"patch_dense.bias": (own,)}
    projections: Shapes = {
        "model.embed_vision.embedding_projection.weight": (width, v["output_proj_dims"]),
        "model.embed_audio.embedding_projection.weight": (width, config["audio_config"]["audio_embed_dim"]),
    }
    text = _under("model.language_model.", _gemma_text(c))
    return text | _under("model.vision_embedder.", shapes) | projections


def _diffusion_gemma(config: Config) -> Shapes:
    """Encoder and decoder share all weights but the scalars of their layers."""
    c = _text(config)
    width = c["hidden_size"]
    conditioning = _mlp(width, c["intermediate_size"], prefix="") | _norms(width, "pre_norm")
    scalars: Shapes = {f"language_model.layers.{i}.layer_scalar": (1,) for i in range(c["num_hidden_layers"])}
    encoder = scalars | _gemma_vision(config["vision_config"], width)
    decoder = _gemma_text(c) | _under("self_conditioning.", conditioning)
    return _under("model.decoder.", decoder) | _under("model.encoder.", encoder)


def _dflash(c: Config) -> Shapes:
    """z-lab's file: a drafter of Qwen3's layers without embedding and head."""
    width, taps = c["hidden_size"], (c.get("dflash_config") or c)["target_layer_ids"]
    layer = _block(c, _attention(c, head_norm=True))
    own: Shapes = {"fc.weight": (width, len(taps) * width)} | _norms(width, "hidden_norm", "norm")
    return own | _layers(c["num_hidden_layers"], lambda _: layer)


def _deepspec(c: Config) -> Shapes:
    """What DeepSpec adds: both tables of the vocabulary, and DSpark's two heads where the config has them."""
    vocabulary, width, rank = c["vocab_size"], c["hidden_size"], c["markov_rank"]
    shapes: Shapes = {"embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width)}
    if rank:
        shapes |= {f"markov_head.markov_w{i}.weight": (vocabulary, rank) for i in (1, 2)}
    if c["enable_confidence_head"]:
        read = width + (rank if c["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    return shapes


def _dspark_qwen3(c: Config) -> Shapes:
    return _dflash(c) | _deepspec(c)


def _dspark_gemma4(c: Config) -> Shapes:
    layer = _gemma_layer(c, full=True)
    return _dflash({**c, "num_hidden_layers": 0}) | _layers(c["num_hidden_layers"], lambda _: layer) | _deepspec(c)


_LISTS: dict[str, Callable[[Config], Shapes]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _llama,
    "Qwen3ForCausalLM": _llama,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4_unified,
    "DreamModel": _llama,
    "SDARForCausalLM": _llama,
    "DiffusionGemmaForBlockDiffusion": _diffusion_gemma,
    "DFlashDraftModel": _dflash,
    "Qwen3DSparkModel": _dspark_qwen3,
    "Gemma4DSparkModel": _dspark_gemma4,
}
