"""What loading costs beside reading the files: time, and the most memory that the process ever held.

    python scripts/measure_load.py --work DIR

writes a Llama of 1.5 GB in bf16 (random numbers, three shards) to DIR, if it is not there, and loads it in processes of
their own, in turn with one that reads the same files into fresh memory. Loading casts the weights to the dtype in which
they are held and packs them for the compiled product, as an engine does. Times are the least of all rounds, of the
process's own CPU time and of the wall clock; files come from the system's cache after the first round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foldspec.engine import split_options
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.linear import Facts
from foldspec.loading import find_pair, load_pair
from foldspec.made_up import Numbers
from foldspec.models.base import model_class
from foldspec.models.config import ModelConfig

SHARDS = 3
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 14,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def write(folder: Path, stored: str = "bfloat16") -> Path:
    """A checkpoint of random numbers in a dtype, in shards."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = model_class(ModelConfig(CONFIG, "")).from_config(ModelConfig(CONFIG, ""), (), Kernels())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names, numbers, weight_map = list(shapes), Numbers(), dict[str, str]()
    for i in range(SHARDS):
        shard = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        tensors = {}
        for name in names[len(names) * i // SHARDS : len(names) * (i + 1) // SHARDS]:
            tensors[name] = torch.empty(shapes[name], dtype=getattr(torch, stored))
            numbers.fill(tensors[name], 0.02)
        save_file(tensors, folder / shard)
        weight_map |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"dtype": stored}))
    return folder


def peak() -> int:
    """The most memory that this process ever held, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def read(folder: Path) -> dict[str, float]:
    """Read the files into memory that nobody has touched, as weights find it."""
    start, cpu = time.perf_counter(), time.process_time()
    kept = []
    for path in sorted(folder.glob("*.safetensors")):
        kept.append(torch.empty(path.stat().st_size, dtype=torch.uint8))
        view, done = kept[-1].numpy().data, 0
        with path.open("rb", buffering=0) as file:
            while done < len(view):
                done += file.readinto(view[done : done + (64 << 20)])
    return {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def load(folder: Path, weights: str) -> dict[str, float]:
    """Load the checkpoint as an engine does. ``peak`` is the growth of the process over the weights as held."""
    options, _ = split_options({"weights": weights, "offline": True})
    kernels, device = Kernels.of(options), torch.device("cpu")
    found = find_pair(None, str(folder), "none", options=options, kernels=kernels)
    kernels.compiles("linear", Facts("cpu", torch.float32, torch.bfloat16, packed=True))
    torch.zeros(4).copy_(torch.zeros(4, dtype=torch.bfloat16))
    before = peak()
    start, cpu = time.perf_counter(), time.process_time()
    load_pair(found, dtype=torch.float32, device=device, weights=weights, kernels=kernels)
    end, cpu_end = time.perf_counter(), time.process_time()
    held = sum(p.nbytes for p in found.model.parameters())
    return {
        "seconds": end - start,
        "cpu": cpu_end - cpu,
        "held": held,
        "peak": (peak() - before) / held,
    }


def apart(*words: str) -> dict[str, float]:
    """One measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", metavar="DIR", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--stored", default="bfloat16", choices=("float32", "bfloat16"), help="in the files")
    parser.add_argument("--weights", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--only", choices=("read", "load"), help=argparse.SUPPRESS)  # one measurement, here
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = write(options.work / options.stored, options.stored)
    if options.only:
        print(json.dumps(read(folder) if options.only == "read" else load(folder, options.weights)))
        return
    words = ("--work", str(options.work), "--stored", options.stored, "--weights", options.weights)
    reads, loads = [], []
    for _ in range(options.rounds):
        reads.append(apart(*words, "--only", "read"))
        loads.append(apart(*words, "--only", "load"))
    plain, plain_cpu = (min(each[key] for each in reads) for key in ("seconds", "cpu"))
    best = {key: min(each[key] for each in loads) for key in loads[0]}
    print(f"weights as held: {best['held'] / 1e9:.2f} GB; peak {max(each['peak'] for each in loads):.3f} of that")
    print(f"reading the files: {plain:.2f} s, CPU {plain_cpu:.2f}")
    print(f"loading: {best['seconds']:.2f} s, CPU {best['cpu']:.2f}")
    print(f"times as long: {best['seconds'] / plain:.2f}, CPU {best['cpu'] / plain_cpu:.2f}")


if __name__ == "__main__":
    main()
