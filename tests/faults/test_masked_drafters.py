"""Masked drafters that do not go with their target, whose files lack something, or that are asked for what they cannot
do: one line, from ``generate`` and from ``check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import masked
import pytest
import tiny
from cli.command import main, refused
from safetensors.torch import load_file, save_file


def pair_of(kind: str, at: Path) -> Path:
    """A golden drafter, or our own form, and a target of its vocabulary."""
    if kind == "masked llama":
        tiny.write_target(at / "target")
        masked.write_masked_llama(at / "drafter")
    else:
        tiny.write_target(at / "target", {**tiny.TARGET, "vocab_size": 512})
        masked.golden_folder(kind, at / "drafter")
    return at


def generate(pair: Path, *more: object) -> Any:
    words = ("--target", pair / "target", "--drafter", pair / "drafter", "--threads", 1)
    return main("generate", *words, "--prompt-ids", "1,2,3,4,5", "--max-tokens", 8, "--max-context", 64, *more)


def edit(pair: Path, side: str = "drafter", **changes: Any) -> None:
    path = pair / side / "config.json"
    path.write_text(json.dumps(tiny.changed(json.loads(path.read_text()), **changes)))


def test_pairs_that_fit_say_how_they_drafted(tmp_path: Path) -> None:
    for kind in ("dream", "sdar", "masked llama"):
        pair = pair_of(kind, tmp_path / kind)
        done = generate(pair, "--json", "--steps", 2, "--draft-tokens", 5)
        assert done.code == 0 and done.json["lossless"], done
        settings = done.json["settings"]
        assert settings["steps"] == 2 and settings["order"] == ("entropy" if kind == "dream" else "static")
        assert settings["block_length"] == (None if kind == "dream" else 4)
        assert settings["prefix_cache"] == ("exact" if kind == "dream" else None)
    done = generate(tmp_path / "dream", "--json", "--prefix-cache", "approximate")
    assert done.json["settings"]["prefix_cache"] == "approximate" and done.json["lossless"]
    assert "the drafter's prefix is approximate" in done.err
    done = generate(tmp_path / "sdar", "--json", "--block-length", 7)
    assert done.json["settings"]["block_length"] == 7


BAD: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "mask outside its own ids": ("dream", {"mask_token_id": 512}, ("its mask id 512 is outside its 512 ids",)),
    "mask of our form outside": ("masked llama", {"mask_token_id": -1}, ("mask_token_id must be in 0",)),
    "no mask": ("sdar", {"mask_token_id": None}, ("mask_token_id is missing",)),
    "causal Dream": ("dream", {"full_attn_mask": False}, ("full_attn_mask = False is not supported",)),
    "no block length": ("sdar", {"block_size": None}, ("does not say how long its blocks are", "--block-length")),
    "block length of nothing": ("sdar", {"block_size": 0}, ("block_size must be in 1",)),
    "another target's layers": ("masked llama", {"num_target_layers": 5}, ("made for 5 layers, the target has 4",)),
}


@pytest.mark.parametrize("name", BAD)
def test_configs(name: str, tmp_path: Path) -> None:
    kind, changes, says = BAD[name]
    pair = pair_of(kind, tmp_path)
    edit(pair, **changes)
    line = refused(generate(pair), 2 if "--block-length" in says else 3, *says)
    checked = main("check", "--target", pair / "target", "--drafter", pair / "drafter", "--threads", 1)
    assert refused(checked, 2 if "--block-length" in says else 3) == line


def test_a_block_length_may_be_given(tmp_path: Path) -> None:
    pair = pair_of("sdar", tmp_path)
    edit(pair, block_size=None)
    assert generate(pair, "--block-length", 4, "--json").json["settings"]["block_length"] == 4


def test_a_target_that_has_no_such_id(tmp_path: Path) -> None:
    """The tables may differ by padding, but the mask must be an id of both."""
    pair = pair_of("dream", tmp_path)
    tiny.write_target(pair / "target", {**tiny.TARGET, "vocab_size": 480})
    refused(generate(pair), 3, "is not a drafter for", "its mask id 500 is outside the target's 480 ids")


def test_another_vocabulary_or_width(tmp_path: Path) -> None:
    for kind, shape, says in (
        ("dream", {"vocab_size": 512 + 1025}, "made for 512 ids, the target has 1537"),
        ("masked llama", {"vocab_size": 130}, "made for 128 ids, the target has 130"),
        ("masked llama", {"hidden_size": 64}, "made for hidden size 32, the target has 64"),
    ):
        pair = pair_of(kind, tmp_path / says)
        tiny.write_target(pair / "target", {**tiny.TARGET, **shape})
        refused(generate(pair), 3, "is not a drafter for", says)


def test_tables_of_its_own_need_no_targets_width(tmp_path: Path) -> None:
    pair = pair_of("masked llama", tmp_path)
    masked.write_masked_llama(pair / "drafter", tables=True)
    tiny.write_target(pair / "target", {**tiny.TARGET, "hidden_size": 64, "num_hidden_layers": 2})
    assert generate(pair).code == 0


def test_files_of_our_own_form_that_are_not_whole(tmp_path: Path) -> None:
    pair = pair_of("masked llama", tmp_path)
    path = pair / "drafter" / "model.safetensors"
    whole = load_file(path)
    save_file({name: t for name, t in whole.items() if "mask_embedding" not in name}, path)
    assert generate(pair).code == 0  # then it is the embedding of that id
    edit(pair, mask_token_id=128)
    refused(generate(pair), 3, "its mask id 128 is outside its 128 ids")
    save_file(whole, path)
    assert generate(pair).code == 0  # an embedding of its own needs no id
    save_file({**whole, "lm_head.weight": whole["model.norm.weight"].expand(128, 32).contiguous()}, path)
    refused(generate(pair), 3, "the file has a head and no embedding")
    save_file({name: t for name, t in whole.items() if name != "model.norm.weight"}, path)
    refused(generate(pair), 3, "1 missing tensors", "model.norm.weight")


@pytest.mark.parametrize(
    ("kind", "option", "says"),
    [
        ("dream", ("--block-length", 4), "block_length: "),
        ("sdar", ("--prefix-cache", "approximate"), "prefix_cache: "),
        ("sdar", ("--block-length", 0), "block_length: must be a whole number of at least 1"),
        ("sdar", ("--context", "fold"), "reads its whole context"),
        ("sdar", ("--confidence", 1.5), "confidence: must be"),
    ],
)
def test_options_that_it_has_no_use_for(kind: str, option: tuple[object, ...], says: str, tmp_path: Path) -> None:
    refused(generate(pair_of(kind, tmp_path), *option), 2, says)


def test_options_of_others(tmp_path: Path) -> None:
    tiny.write_target(tmp_path / "target")
    tiny.write_drafter(tmp_path / "drafter", tiny.DEEPSPEC)
    for option in (("--block-length", 4), ("--prefix-cache", "exact")):
        refused(generate(tmp_path, *option), 2, "has no use for it", "leave it out")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json", "tokenizer.json"])
def test_the_mask_of_a_tokenizer(file: str, tmp_path: Path) -> None:
    """SDAR's config does not name it; its tokenizer does, in one of three places."""
    folder = masked.golden_folder("sdar", tmp_path)
    edit(tmp_path.parent, side=tmp_path.name, mask_token_id=None)
    config: dict[str, Any] = {"mask_token": {"content": "<|MASK|>"}}
    if file == "tokenizer_config.json":
        config["added_tokens_decoder"] = {"3": {"content": "<x>"}, "501": {"content": "<|MASK|>"}}
    elif file == "added_tokens.json":
        (folder / file).write_text(json.dumps({"<x>": 3, "<|MASK|>": 501}))
    else:
        vocabulary = {f"w{i}": i for i in range(501)} | {"<|MASK|>": 501}
        words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
        (folder / file).write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert tiny.load_network(folder).facts.mask_id == 501
