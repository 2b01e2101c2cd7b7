"""One GGUF file to a Hugging Face style checkpoint folder: weights, configuration, tokenizer. Imports no torch.

Only what the embedded target needs: a Llama with a tied head and a byte-level BPE tokenizer of the ``smollm`` kind.
The caller gives an empty folder and makes the result visible when all of it is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from foldspec.errors import CheckpointError

__all__ = ["Progress", "convert"]

Progress = Callable[[str, int, int], None]  # stage, done, total (0: not known)

_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = 3  # GGUF's token type of control tokens


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write ``model.safetensors`` (bf16), ``config.json``, ``tokenizer.json`` and their small companions to ``folder``.

    Raises :class:`CheckpointError` where the ``gguf`` package is missing or the file is of another kind; an
    ``OSError`` (disk full) passes through.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            "the package gguf, which reads this checkpoint, is not installed", do="pip install 'foldspec[demo]'"
        ) from None
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"not a readable GGUF file ({error})", where=str(source)) from None

    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    kinds = get("general.architecture"), get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if kinds != ("llama", "gpt2", "smollm"):
        raise CheckpointError(f"expected a llama with a smollm tokenizer, found {kinds}", where=str(source))
    _write_tokenizer(get, folder)
    config = _config(get)
    _dump(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _dump(folder / "generation_config.json", ids)
    _write_weights(reader, config, folder / "model.safetensors", gguf.dequantize, progress)


def _config(get: Callable[..., Any]) -> dict[str, Any]:
    """The GGUF metadata in the words of transformers' LlamaConfig."""
    # GGUF holds float32; the shortest decimal of that float32 is the number that was meant (1e-05, not 9.99999975e-06)
    theta, eps = (
        float(str(np.float32(get(f"llama.{key}")))) for key in ("rope.freq_base", "attention.layer_norm_rms_epsilon")
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": get("llama.vocab_size"),
        "hidden_size": get("llama.embedding_length"),
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": get("llama.attention.head_count"),
        "num_key_value_heads": get("llama.attention.head_count_kv"),
        "head_dim": get("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(get: Callable[..., Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    _dump(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": bool(get("tokenizer.ggml.add_bos_token", False)),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": get("llama.context_length"),
            **{f"{ours}_token": tokens[get(f"tokenizer.ggml.{theirs}_token_id")] for ours, theirs in names.items()},
            "chat_template": get("tokenizer.chat_template"),
        },
    )


def _write_weights(reader: Any, config: dict[str, Any], path: Path, dequantize: Any, progress: Progress) -> None:
    """Stream every tensor, as bfloat16, into one safetensors file; one tensor is in memory at a time.

    The layout is 8 bytes of header length, a JSON header of dtypes, shapes and offsets, then the tensors.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]  # GGUF writes the innermost dimension first
        start, end = end, end + 2 * int(np.prod(shape))
        header[_rename(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, tensor in enumerate(reader.tensors):
            progress("convert", done, len(reader.tensors))
            weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            kind = tensor.name.split(".")[-2]
            if kind in heads:
                weight = _unpermute(weight, heads[kind])
            file.write(_bfloat16(weight).tobytes())
        progress("convert", len(reader.tensors), len(reader.tensors))


def _rename(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _MODULES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_MODULES[parts[2]]}.weight"
    raise CheckpointError(f"the tensor {name!r} is not one of a llama with a tied head")


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection [heads * d, hidden] from llama.cpp's order to Hugging Face's.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ..; Hugging Face rotates row i with row i + d/2.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _bfloat16(weight: np.ndarray) -> np.ndarray:
    """float32 -> the uint16 bits of the nearest bfloat16, ties to even; finite input (a GGUF block holds no NaN)."""
    bits = np.ascontiguousarray(weight).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
