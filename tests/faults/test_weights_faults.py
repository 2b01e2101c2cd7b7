"""Damaged and wrong safetensors: each is refused in one line that names the file, before any tensor is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from foldspec.checkpoints.weights import check, load_into, read_headers
from foldspec.errors import CheckpointError, ResourceError

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def refused(call: Callable[[], object], says: str, file: Path, kind: type = CheckpointError) -> None:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert says in text and str(file) in text and "\n" not in text, text


def raw(path: Path, header: object, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return path


def entry(start: int, end: int, dtype: str = "F32", shape: list | None = None) -> dict:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(2, 3)}, path)
    return path


@pytest.mark.parametrize("cut", [1, 20, 40, 100, 10_000])
def test_truncated(file, tmp_path, cut):
    content = file.read_bytes()
    file.write_bytes(content[: max(0, len(content) - cut)])
    refused(lambda: read_headers(tmp_path), "truncated", file)


def test_trailing_bytes(file, tmp_path):
    file.write_bytes(file.read_bytes() + b"\0")
    refused(lambda: read_headers(tmp_path), "1 trailing bytes", file)


@pytest.mark.parametrize(
    ("header", "body", "says"),
    [
        (b"{", b"", "malformed"),
        (b"[1]", b"", "malformed"),
        (b"\xff\xfe", b"", "malformed"),
        (b'{"a": {}, "a": {}}', b"", "twice"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "data_offsets"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, b"1234", "not where the tensor before it ends"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, b"x" * 12, "not where the tensor before it ends"),
        ({"a": entry(0, 4, shape=[2])}, b"1234", "its shape and dtype ask for 8"),
        ({"a": entry(0, -4, shape=[-1])}, b"", "no whole numbers"),
        ({"a": entry(0, 4, shape=["1"])}, b"1234", "no whole numbers"),
        ({"a": entry(0, 4, shape=[True])}, b"1234", "no whole numbers"),
        ({"a": entry(0, 4, dtype="I8", shape=[4])}, b"1234", "a has the dtype I8, which is not supported"),
        ({"a": entry(0, 4, dtype="F8_E4M3", shape=[4])}, b"1234", "a has the dtype F8_E4M3, which is not supported"),
        ({"a": entry(0, 4, dtype="BOOL", shape=[4])}, b"1234", "a has the dtype BOOL, which is not supported"),
        ({"a": entry(0, 4, dtype=["F32"])}, b"1234", "malformed"),
    ],
)
def test_malformed(tmp_path, header, body, says):
    path = raw(tmp_path / "model.safetensors", header, body)
    refused(lambda: read_headers(tmp_path), says, path)


def test_a_header_that_claims_to_be_huge(tmp_path):
    path = raw(tmp_path / "model.safetensors", {}, length=1 << 60)
    refused(lambda: read_headers(tmp_path), "truncated or not safetensors", path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_flipped_header_byte_is_refused_in_one_line_or_harmless(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("flip")
    path = raw(folder / "model.safetensors", {"a": entry(0, 16), "b": entry(16, 24)}, b"x" * 24)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 25))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        found = read_headers(folder)
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        assert sum(e.size for e in found.entries.values()) == 24


def test_no_weights(tmp_path):
    refused(lambda: read_headers(tmp_path), "holds no model.safetensors", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    refused(lambda: read_headers(tmp_path), "pickles are not read", tmp_path)


def sharded(folder: Path, weight_map: object, **shards: dict[str, torch.Tensor]) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, folder / {"A": A, "B": B}[name])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "..\\x.safetensors", 3]
)
def test_a_weight_map_that_points_outside(tmp_path, name):
    index = sharded(tmp_path, {"a": name})
    refused(lambda: read_headers(tmp_path), "points outside the folder", index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    refused(lambda: read_headers(tmp_path), "is not an index", index)


def test_shards_and_index_at_odds(tmp_path):
    one, two = {"a": torch.ones(1)}, {"b": torch.ones(1)}
    index = sharded(tmp_path, {"a": A, "b": B}, A=one)
    refused(lambda: read_headers(tmp_path), f"the shard {B} is missing", index)
    sharded(tmp_path, {"a": A, "b": B, "c": B}, A=one, B=two)
    refused(lambda: read_headers(tmp_path), "do not hold: c", index)
    sharded(tmp_path, {"a": A, "b": B}, A=one, B={**two, "d": torch.ones(1)})
    refused(lambda: read_headers(tmp_path), "does not place here: d", tmp_path / B)
    sharded(tmp_path, {"a": A, "b": B}, A=one, B={**two, "a": torch.ones(1)})
    refused(lambda: read_headers(tmp_path), "another shard holds too: a", tmp_path / B)
    sharded(tmp_path, {"a": B, "b": A}, A=one, B=two)
    refused(lambda: read_headers(tmp_path), "does not place here: a", tmp_path / A)


def net() -> nn.Module:
    with torch.device("meta"):
        return nn.ParameterDict({"a": torch.empty(4), "b": torch.empty(2, 3)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"b": None}, "1 missing tensors: b"),
        ({"c": torch.ones(1)}, "1 unexpected tensors: c"),
        ({"a": torch.ones(5)}, "1 tensors of the wrong shape: a [5], not [4]"),
        ({"a": torch.ones(4, dtype=torch.int64)}, "1 tensors of the wrong dtype: a I64, not a float"),
        ({f"x{i}": torch.ones(1) for i in range(9)}, "9 unexpected tensors: x0, x1, x2 and 6 more"),
    ],
)
def test_tensors_that_do_not_fit_the_module(file, tmp_path, change, says):
    tensors = {"a": torch.ones(4), "b": torch.ones(2, 3)} | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    module, weights = net(), read_headers(tmp_path)
    refused(lambda: load_into(module, weights, dtype=torch.float32, device="cpu"), says, tmp_path)
    assert all(p.is_meta for p in module.parameters())  # nothing was read
    refused(lambda: check(weights, {"a": (4,), "b": (2, 3)}), says, tmp_path)


def test_two_names_for_one_parameter_and_ids_that_are_floats(file, tmp_path):
    weights = read_headers(tmp_path)
    refused(lambda: check(weights, {"a": (4,)}, rename=lambda name: "a"), "another tensor fills too: b", file)
    refused(lambda: check(weights, {"a": (4,), "b": (2, 3)}, integer={"a"}), "a F32, not an integer", file)


def test_a_file_that_shrinks_after_its_header_was_read(file, tmp_path):
    weights = read_headers(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    refused(lambda: load_into(net(), weights, dtype=torch.float32, device="cpu"), "became shorter", file)


def test_out_of_memory(file, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    module, weights = net(), read_headers(tmp_path)
    monkeypatch.setattr(torch, "empty", full)
    refused(lambda: load_into(module, weights, dtype=torch.float32, device="cpu"), "no memory", tmp_path, ResourceError)
