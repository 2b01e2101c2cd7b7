"""Checkpoints that cannot be used: one line, exit code 3, before a weight is read and with nothing left behind.

What can be wrong with a safetensors file or a hub is tried in full in test_weights_faults and test_hub; here it is the
command that answers, for the target and for the drafter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from cli.command import (
    ORACLE,
    PAIR,
    copied,
    edit,
    edit_tensors,
    everything,
    generate,
    main,
    pair_words,
    refused,
    with_text,
)
from safetensors.torch import load_file, save_file

NORM = {"target": "model.norm.weight", "drafter": "norm.weight"}
DEEP = '{"a":' + "[" * 100_000
SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Damage = Callable[[Path, str], object]


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are read before the fault is found")

    monkeypatch.setattr("foldspec.loading.load_into", read)
    yield


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return copied(tmp_path / "pair")


def refuse(pair: Path, *says: str, code: int = 3) -> None:
    """``generate`` and ``check`` say the same one line, and the folder stays as it is."""
    before = everything(pair)
    line = refused(generate("--prompt-ids", "5,6,7", pair=pair), code, *says)
    assert refused(main("check", *pair_words(pair)), code) == line
    assert everything(pair) == before and len(line) < 1000, line


def shard(folder: Path, weight_map: Any = None) -> None:
    """Split the weights into two shards, under this index or the right one."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    right = {name: file for file, half in zip(SHARDS, halves, strict=True) for name in half}
    for file, half in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in half}, folder / file)
    write_index(folder, right if weight_map is None else weight_map)


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def remap(folder: Path, shard_name: str) -> None:
    """One tensor is said to lie in this file."""
    shard(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(folder, index | {next(iter(index)): shard_name})


def cut(folder: Path, keep: Callable[[int], int]) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: keep(len(content))])


def put(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def change(folder: Path, side: str) -> None:
        key = name or NORM[side]
        edit_tensors(folder, lambda tensors: tensors.update({key: value(tensors[NORM[side]])}))

    return change


def drop(folder: Path, side: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop(NORM[side]))


def append(folder: Path, side: str) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")


FILES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "cut by a byte": (lambda f, s: cut(f, lambda size: size - 1), ("truncated",)),
    "cut in half": (lambda f, s: cut(f, lambda size: size // 2), ("truncated",)),
    "cut in the header": (lambda f, s: cut(f, lambda size: 100), ("truncated",)),
    "empty": (lambda f, s: cut(f, lambda size: 0), ("truncated",)),
    "a byte too many": (append, ("1 trailing bytes",)),
    "no weights": (lambda f, s: (f / "model.safetensors").unlink(), ("holds no model.safetensors",)),
    "weights that are a folder": (
        lambda f, s: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
        ("Is a directory",),
    ),
    "a missing tensor": (drop, ("1 missing tensors", "norm.weight")),
    "a tensor too many": (put("extra.weight", lambda t: t.clone()), ("1 unexpected tensors: extra.weight",)),
    "the wrong shape": (put("", lambda t: t[:-1]), ("wrong shape", "norm.weight [63], not [64]")),
    "transposed": (put("", lambda t: t[None]), ("wrong shape", "[1, 64], not [64]")),
    "int64": (put("", lambda t: t.long()), ("wrong dtype", "norm.weight I64, not a float")),
    "int8": (put("", lambda t: t.to(torch.int8)), ("has the dtype I8",)),
    "float8": (put("", lambda t: t.to(torch.float8_e4m3fn)), ("has the dtype F8_E4M3",)),
    "bool": (put("", lambda t: t > 0), ("has the dtype BOOL",)),
    "a header that nests for ever": (
        lambda f, s: (f / "model.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode()),
        ("malformed safetensors header",),
    ),
    "a missing shard": (lambda f, s: (shard(f), (f / SHARDS[1]).unlink()), (f"the shard {SHARDS[1]} is missing",)),
    "an index that names too much": (
        lambda f, s: (shard(f), remap_extra(f)),
        ("names tensors that their shards do not hold: more.weight",),
    ),
    "a map to above": (lambda f, s: remap(f, "../model.safetensors"), ("points outside the folder",)),
    "a map to the root": (lambda f, s: remap(f, "/etc/passwd"), ("points outside the folder",)),
    "a map to a folder": (lambda f, s: remap(f, "a/b.safetensors"), ("points outside the folder",)),
    "a map to a name too long": (lambda f, s: remap(f, "a" * 5000 + ".safetensors"), ("the shard aaa", "is missing")),
    "a map of nothing": (lambda f, s: shard(f, {}), ("missing tensors",)),
    "a map that is none": (lambda f, s: shard(f, [1]), ("is not an index",)),
    "an index that nests for ever": (
        lambda f, s: (shard(f), (f / "model.safetensors.index.json").write_text(DEEP)),
        ("is not an index",),
    ),
    "no config": (lambda f, s: (f / "config.json").unlink(), ("no config.json",)),
    "a config that is a folder": (
        lambda f, s: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
        ("cannot be read",),
    ),
    "no folder": (lambda f, s: shutil.rmtree(f), ("no such folder",)),
    "a file in its place": (lambda f, s: (shutil.rmtree(f), f.write_text("x")), ("no such folder",)),
    **{
        f"config {text[:8]!r}": (lambda f, s, text=text: (f / "config.json").write_bytes(text), ("config.json",))
        for text in (b"", b"[]", b"{", b"\xff", b"9" * 5000, b"{}", DEEP.encode())
    },
}


def remap_extra(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(folder, index | {"more.weight": SHARDS[0]})


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize("name", FILES)
def test_files(pair: Path, name: str, side: str) -> None:
    damage, says = FILES[name]
    damage(pair / side, side)
    refuse(pair, str(pair / side), *says)


def test_shards_as_they_should_be(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # weights may be read here
    whole = generate("--prompt-ids", "5,6,7", "--max-tokens", 8, "--json", pair=pair).json["token_ids"]
    for side in ("target", "drafter"):
        shard(pair / side)
    done = generate("--prompt-ids", "5,6,7", "--max-tokens", 8, "--json", pair=pair)
    assert done.code == 0 and done.json["token_ids"] == whole


SHAPES = {
    key: (0, -1, 1 << 40, 10**30, 1.5, "64", True, [64])
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
}
NUMBERS = {key: (0, -1.0, float("nan"), float("inf"), 10**400, "1", True) for key in ("rms_norm_eps", "rope_theta")}
BOTH: dict[str, tuple[Any, ...]] = {
    **SHAPES,
    **NUMBERS,
    "architectures": (None, [], "LlamaForCausalLM", [7], ["GPT2LMHeadModel"]),
    "hidden_act": ("gelu",),
    "quantization_config": ({"quant_method": "fp8"},),
    "rope_scaling": (5, {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "llama3"}, {"type": 3}),
    "attention_bias": ("no",),
}
TARGET_ONLY: dict[str, tuple[Any, ...]] = {
    "max_position_embeddings": (None, 0, 1 << 40, "2048"),
    "eos_token_id": ("2", [2, 600], -1, [None]),
    "mlp_bias": (1,),
    "tie_word_embeddings": ("yes",),
    "num_hidden_layers": (None, 3, 5),
    "vocab_size": (None, 511),
}
DRAFTER_ONLY: dict[str, tuple[Any, ...]] = {
    "block_size": (None, 0, 1, 1 << 40, "6"),
    "head_dim": (None, 17),
    "layer_types": (["full_attention"], ["full_attention", "linear"], ["sliding_attention"] * 2, "full", [[], []]),
    "is_causal": ("no",),
    "rope_theta": (None,),
    "num_target_layers": (3, 0),
    "hidden_size": (96,),
    "vocab_size": (513, 504),
    "final_logit_softcapping": (30.0,),
    "dflash_config": (
        None,
        [],
        {"target_layer_ids": [0, 1, 2]},
        {"mask_token_id": 511},
        *(
            {"target_layer_ids": taps, "mask_token_id": mask}
            for taps, mask in (
                ([0, 1, 99], 511),
                ([-1, 0, 1], 511),
                ([0, 1, 3], 511),  # the last layer's output is no tap
                ([2, 1, 0], 511),
                ([0, 0, 1], 511),
                ([0, 1], 511),  # fc is as wide as three taps
                ([], 511),
                ([0, 1, "2"], 511),
                (1, 511),
                ([0, 1, 2], -1),
                ([0, 1, 2], 512),
                ([0, 1, 2], None),
            )
        ),
    ),
}


@pytest.mark.parametrize(
    ("side", "key"),
    [("target", key) for key in {**BOTH, **TARGET_ONLY}] + [("drafter", key) for key in {**BOTH, **DRAFTER_ONLY}],
)
def test_configs(pair: Path, side: str, key: str) -> None:
    """Each value alone in an otherwise right config.json: no default is put in its place, none ends in a traceback."""
    path = pair / side / "config.json"
    right = path.read_text()
    values = (*BOTH.get(key, ()), *(TARGET_ONLY if side == "target" else DRAFTER_ONLY).get(key, ()))
    for value in values:
        edit(path, **{key: value})
        try:
            refuse(pair, str(pair / side))
        except AssertionError as error:
            raise AssertionError(f"{key} = {value!r}: {error}") from None
        path.write_text(right)


def test_unknown_architectures_name_the_known_ones(pair: Path) -> None:
    words = ["--target", pair / "drafter", "--drafter", PAIR / "target", "--prompt-ids", "5"]  # the wrong way round
    refused(main("generate", *words), 3, "unknown target architecture 'DFlashDraftModel'")
    edit(pair / "drafter" / "config.json", architectures=["EagleModel"])
    refuse(pair, "unknown drafter architecture 'EagleModel'", "DFlashDraftModel", "Qwen3DSparkModel")
    edit(pair / "target" / "config.json", architectures=["MambaForCausalLM"])
    refuse(pair, "unknown target architecture 'MambaForCausalLM'", "LlamaForCausalLM")


def test_a_drafter_of_another_target() -> None:
    for target, drafter, says in ((PAIR, ORACLE, "made for 3 layers"), (ORACLE, PAIR, "made for 4 layers")):
        words = ["--target", target / "target", "--drafter", drafter / "drafter"]
        line = refused(main("generate", *words, "--prompt-ids", "5"), 3, "is not a drafter for", says)
        assert refused(main("check", *words), 3) == line


def test_a_restricted_vocabulary_that_maps_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the map is one of the weights
    tiny.write_target(tmp_path / "target")
    folder = tiny.write_drafter(tmp_path / "drafter", tiny.changed(tiny.ZLAB, draft_vocab_size=40), extra=["d2t"])
    words = [*pair_words(tmp_path), "--prompt-ids", "5", "--max-tokens", 3]
    assert main("generate", *words).code == 0
    for shift in (128, -128):
        edit_tensors(folder, lambda tensors, shift=shift: tensors.update(d2t=tensors["d2t"] + shift))
        refused(main("generate", *words), 3, "d2t maps outside the 128 ids")
        edit_tensors(folder, lambda tensors, shift=shift: tensors.update(d2t=tensors["d2t"] - shift))
    edit_tensors(folder, lambda tensors: tensors.update(d2t=tensors["d2t"].float()))
    refused(main("generate", *words), 3, "d2t F32, not an integer")


SIDE_FILES: dict[str, dict[str, str]] = {
    "generation_config.json": {"[]": "no JSON object", "{": "JSON", '{"eos_token_id": 600}': "outside", DEEP: "JSON"},
    "tokenizer.json": {"{}": "is no tokenizer", "": "is no tokenizer", DEEP: "is no tokenizer"},
    "tokenizer_config.json": {"[": "JSON", '{"eos_token": 3}': "string", '{"eos_token": "<none>"}': "not in the voc"},
}


@pytest.mark.parametrize(("file", "text"), [(file, text) for file, texts in SIDE_FILES.items() for text in texts])
def test_files_beside_the_weights(pair: Path, file: str, text: str) -> None:
    with_text(pair)
    (pair / "target" / file).write_text(text)
    refuse(pair, str(pair / "target" / file), SIDE_FILES[file][text])


def test_chat_templates_that_fail(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # a template is rendered when all else is ready
    cases = {
        "{% for %}": (3, "--no-chat"),
        "{{ nothing.at.all }}": (3, "--no-chat"),
        "{{ messages[0].__class__.__mro__ }}": (3, "--no-chat"),
        "{{ raise_exception('only\nFrench') }}": (2, "only French"),
    }
    for template, (code, says) in cases.items():
        with_text(pair, template=template)
        refused(generate("-p", "w5", pair=pair), code, says)
        assert generate("-p", "w5", "--no-chat", "--max-tokens", 1, pair=pair).code == 0
    (pair / "target" / "chat_template.jinja").write_bytes(b"\xff")
    refused(generate("-p", "w5", pair=pair), 3, "chat_template.jinja")


def test_a_context_that_no_memory_holds(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    edit(pair / "target" / "config.json", max_position_embeddings=10_000_000)
    with monkeypatch.context() as patch:  # asked for, of a target that could
        patch.setattr("foldspec.memory.free_memory", lambda device: 4_000_000_000)
        far = copied(pair / "far")
        edit(far / "target" / "config.json", max_position_embeddings=1 << 24)
        says = "cache tokens 10,486,016, weights", "target cache 10.7 GB", "free 4 GB", "--max-context"
        refused(generate("--prompt-ids", "5", "--max-context", "10M", pair=far), 4, *says, "of at most ")
        refused(main("check", *pair_words(far), "--max-context", "10M"), 4, *says)
    with monkeypatch.context() as patch:
        patch.setattr("foldspec.memory.free_memory", lambda device: 4_000_000_000)
        says = "not enough memory on cpu: cache tokens 10,000,384, weights", "target cache 10.2 GB", "free 4 GB"
        refused(generate("--prompt-ids", "5", pair=pair), 4, *says, "--max-context", "--dtype bfloat16")
        refused(main("check", *pair_words(pair)), 4, *says)
        patch.setattr("foldspec.memory.free_memory", lambda device: 1000)  # not even the weights
        refused(generate("--prompt-ids", "5", pair=pair), 4, "free 0.001 MB", "lower --max-batch", "a smaller")
    monkeypatch.setattr("foldspec.memory.free_memory", lambda device: None)  # nobody knows, until it is asked for
    monkeypatch.setattr("foldspec.resources.PagedCache", full)
    refused(generate("--prompt-ids", "5", pair=pair), 4, "no memory for a cache of 81.9 GB", "--max-context")
