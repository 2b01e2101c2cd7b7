"""Loading safetensors: values, casts, several shards, names, and the memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import measure_load
import native
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from foldspec.checkpoints import weights as W
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.linear import panels
from foldspec.models.layers import Linear, RMSNorm, Stack, layouts, matrices


class Net(nn.Module):
    """Two parameters, a persistent buffer of ids and one that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("d2t", torch.zeros(4, dtype=torch.int64))


def meta() -> Net:
    with torch.device("meta"):
        return Net()


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "inner.weight": torch.randn(5, 3, generator=generator).to(dtype),
        "inner.bias": torch.randn(5, generator=generator).to(dtype),
        "scale": torch.tensor(2.0, dtype=dtype),
        "d2t": torch.arange(4),
    }


def test_matrices_may_be_held_narrower_than_the_rest(tmp_path):
    saved = tensors()
    save_file(saved, tmp_path / "model.safetensors")
    net = meta()
    W.load_into(
        net,
        W.read_headers(tmp_path),
        dtype=torch.float32,
        device="cpu",
        held=torch.bfloat16,
        matrices={"inner.weight"},
        integer={"d2t"},
    )
    assert torch.equal(net.inner.weight, saved["inner.weight"].bfloat16())
    assert torch.equal(net.inner.bias, saved["inner.bias"]) and torch.equal(net.scale, saved["scale"])


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_every_value_arrives_cast(tmp_path, kept, held):
    saved = tensors(kept)
    save_file(saved, tmp_path / "model.safetensors")
    net, steps = meta(), []
    W.load_into(
        net,
        W.read_headers(tmp_path),
        dtype=held,
        device="cpu",
        integer={"d2t"},
        progress=lambda *step: steps.append(step),
    )
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, saved[key] if key == "d2t" else saved[key].to(held))
    assert isinstance(net.inner.weight, nn.Parameter) and not net.inner.weight.requires_grad
    size = sum(t.nbytes for t in saved.values())
    assert steps[0] == ("load", 0, size) and steps[-1] == ("load", size, size)
    net.inner(torch.zeros(1, 3, dtype=held))


def test_tensors_larger_than_a_read(tmp_path, monkeypatch):
    monkeypatch.setattr(W, "_CACHED", 16)
    saved = tensors(torch.bfloat16)
    save_file(saved, tmp_path / "model.safetensors")
    net = meta()
    W.load_into(net, W.read_headers(tmp_path), dtype=torch.float32, device="cpu", integer={"d2t"})
    assert torch.equal(net.inner.weight, saved["inner.weight"].float())


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("chunk", [1, 2000, 1 << 20])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_matrices_are_packed_as_they_are_read(tmp_path, monkeypatch, held, kept, chunk, kernels):
    """Into their part of a stack (q, k) and into a place of their own, whose last panel is narrow (o)."""
    monkeypatch.setattr(W, "_CACHED", chunk)
    draw = torch.Generator().manual_seed(0)
    shapes = {"q": (64, 37), "k": (32, 37), "o": (37, 60)}
    saved = {name: torch.randn(*shape, generator=draw).to(kept) for name, shape in shapes.items()}
    save_file({f"{name}.weight": tensor for name, tensor in saved.items()}, tmp_path / "model.safetensors")
    operators = Kernels(kernels, native.library("portable"))
    net = nn.ModuleDict({name: Linear(width, out, operators) for name, (out, width) in shapes.items()})
    Stack(net["q"], net["k"]).join(held, torch.float32, "cpu")
    steps = []
    W.load_into(
        net,
        W.read_headers(tmp_path),
        dtype=torch.float32,
        device="cpu",
        held=held,
        matrices=matrices(net),
        layouts=dict.fromkeys(matrices(net), W.Layout(16, operators.pack)),
        progress=lambda *step: steps.append(step),
    )
    for name, tensor in saved.items():
        weight = net[name].weight
        assert weight.dtype == held and weight.shape == tensor.shape
        assert torch.equal(panels.rows(weight, torch.arange(len(tensor))), tensor.to(held))
    assert net["k"].weight.data_ptr() == net["q"].weight.data_ptr() + 64 * 37 * held.itemsize
    assert steps[-1][1:] == (sum(t.nbytes for t in saved.values()),) * 2


def test_layouts_are_for_a_compiled_product_alone():
    def asked(kernels: Kernels, dtype: torch.dtype, held: torch.dtype) -> tuple[set[str], bool]:
        net = nn.ModuleDict({"a": Linear(3, 5, kernels), "norm": RMSNorm(3, 1e-5, kernels)})
        return set(layouts(net, held, dtype, "cpu", kernels)), net["a"].packed

    compiled = Kernels("auto", native.library("portable"))
    assert asked(compiled, torch.float32, torch.bfloat16) == ({"a.weight"}, True)
    assert asked(compiled, torch.bfloat16, torch.bfloat16) == (set(), False)
    assert asked(Kernels(), torch.float32, torch.float32) == (set(), False)


def test_shards_linked_as_in_the_hubs_cache(tmp_path):
    saved = tensors()
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "c0ffee"
    blobs.mkdir()
    folder.mkdir(parents=True)
    weight_map = {}
    for i, names in enumerate((["inner.weight"], ["inner.bias", "scale", "d2t"])):
        shard = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: saved[name] for name in names}, blobs / str(i))
        (folder / shard).symlink_to(Path("../../blobs") / str(i))
        weight_map |= dict.fromkeys(names, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    weights = W.read_headers(folder)
    assert weights.shapes == {name: tuple(t.shape) for name, t in saved.items()}
    assert weights.dtypes["d2t"] == "I64"
    net = meta()
    W.load_into(net, weights, dtype=torch.float32, device="cpu", integer={"d2t"})
    assert all(torch.equal(net.state_dict()[name], saved[name]) for name in saved)


def test_names_can_be_changed_and_left_out(tmp_path):
    saved = {f"model.{name}": tensor for name, tensor in tensors().items()} | {"lm_head.weight": torch.ones(2)}
    save_file(saved, tmp_path / "model.safetensors")
    net = meta()

    def rename(name: str) -> str | None:
        return name.removeprefix("model.") if name.startswith("model.") else None

    W.load_into(net, W.read_headers(tmp_path), dtype=torch.float32, device="cpu", rename=rename, integer={"d2t"})
    assert torch.equal(net.scale, saved["model.scale"])


def test_a_buffer_that_nothing_fills_is_a_mistake_of_the_code(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        net = Net()
        net.register_buffer("angles", torch.zeros(3), persistent=False)
    with pytest.raises(RuntimeError, match="never assigned: angles"):
        W.load_into(net, W.read_headers(tmp_path), dtype=torch.float32, device="cpu", integer={"d2t"})


PEAK = """
import sys, torch
from pathlib import Path
from torch import nn
from foldspec.checkpoints.weights import load_into, read_headers
def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
with torch.device("meta"):
    net = nn.ModuleList([nn.Linear(1024, 1024 * n, bias=False) for n in (48, 4, 4, 4, 4)])
weights = read_headers(Path(sys.argv[1]))
torch.zeros(4).copy_(torch.zeros(4, dtype=torch.bfloat16))
before = peak()
load_into(net, weights, dtype=getattr(torch, sys.argv[2]), device="cpu")
print((peak() - before) / sum(p.nbytes for p in net.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(("kept", "held"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_loading_takes_little_more_memory_than_the_weights(tmp_path, kept, held):
    dtype = getattr(torch, kept)
    # one tensor holds three quarters of all weights, so that a second copy of it could not hide
    big = {f"{i}.weight": torch.zeros(1024 * n, 1024, dtype=dtype) for i, n in enumerate((48, 4, 4, 4, 4))}
    save_file(big, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), held],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    print(done.stdout)
    assert 0.9 < float(done.stdout) < 1.15


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("weights", ["auto", "float32"])
def test_a_sharded_checkpoint_as_an_engine_loads_it(tmp_path, weights):
    """1.5 GB in three shards, into panels and stacks. Time is a measurement's business: scripts/measure_load.py."""
    folder = measure_load.write(tmp_path / "bfloat16")
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert 1.45e9 < sum(path.stat().st_size for path in folder.glob("*.safetensors")) < 1.6e9
    found = measure_load.apart("--work", str(tmp_path), "--weights", weights, "--only", "load")
    print(found)
    assert 0.95 < found["peak"] < 1.15
    for path in folder.iterdir():  # pytest keeps the folders of its last runs
        path.unlink()
