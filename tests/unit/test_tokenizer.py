"""The tokenizer of a folder: BOS exactly once, whole prompts, all declared stop ids, one-line refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from foldspec.errors import CheckpointError, UsageError
from foldspec.text.tokenizer import Tokenizer, stop_ids


def core(*, bos: bool = False, eos: bool = False) -> Core:
    """A byte-level BPE; its post-processor frames every text with BOS or EOS if asked."""
    made = Core(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=["<s>", "</s>", "<end>"], show_progress=False
    )
    made.train_from_iterator(["hello world " * 5], trainer)
    if bos or eos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return made


def folder(path: Path, made: Core | None = None, **config: Any) -> Path:
    (made or core()).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def load(path: Path, made: Core | None = None, **config: Any) -> Tokenizer:
    tok = Tokenizer.load(folder(path, made, **config))
    assert tok is not None
    return tok


def test_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None


def test_text_comes_back(tmp_path: Path) -> None:
    tok = load(tmp_path, bos_token="<s>", eos_token={"content": "</s>", "special": True})
    assert (tok.bos_id, tok.eos_id, tok.vocab_size) == (0, 1, core().get_vocab_size())
    for text in ("hello world", "", " ", "👩‍👧 नमस्ते 日本"):
        assert tok.decode(tok.encode(text, special=False)) == text
    assert tok.decode([0, *tok.encode("hi", special=False), 1, 999_999]) == "hi"
    assert tok.decode([0, *tok.encode("hi", special=False)], skip_special=False) == "<s>hi"


@pytest.mark.parametrize("frame", [False, True])
@pytest.mark.parametrize("declared", [None, False, True])
@pytest.mark.parametrize("text", ["hello", "<s>hello", ""])
def test_bos_once_or_not_at_all(tmp_path: Path, frame: bool, declared: bool | None, text: str) -> None:
    config = {} if declared is None else {"add_bos_token": declared}
    tok = load(tmp_path, core(bos=frame), bos_token="<s>", **config)
    adds = frame or declared is True
    assert tok.adds_bos is adds
    assert tok.encode(text, special=True).count(0) == (1 if adds else text.count("<s>"))
    assert tok.encode(text, special=False).count(0) == text.count("<s>"), "a template's own BOS stays alone"
    if text:
        assert tok.encode_prompt(text) == tok.encode(text, special=True)
        assert tok.decode(tok.encode_prompt(text)) == "hello"


@pytest.mark.parametrize("frame", [False, True])
@pytest.mark.parametrize("declared", [None, False, True])
def test_bos_as_transformers_adds_it(tmp_path: Path, frame: bool, declared: bool | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = {} if declared is None else {"add_bos_token": declared}
    tok = load(tmp_path, core(bos=frame), bos_token="<s>", tokenizer_class="PreTrainedTokenizerFast", **config)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    # transformers 4 heeds add_bos_token in its Llama classes (DeepSeek's files rely on that), transformers 5 nowhere
    bos = [0] if declared is True and not frame else []
    assert tok.encode("hello world", special=True) == bos + oracle("hello world").input_ids
    assert tok.encode("hello", special=False) == oracle("hello", add_special_tokens=False).input_ids


def test_bos_known_from_the_post_processor_alone(tmp_path: Path) -> None:
    core(bos=True).save(str(tmp_path / "tokenizer.json"))
    tok = Tokenizer.load(tmp_path)
    assert tok is not None and tok.bos_id == 0 and tok.encode_prompt("") == [0]


def test_empty_prompt(tmp_path: Path) -> None:
    assert load(tmp_path, core(bos=True, eos=True), bos_token="<s>").encode_prompt("") == [0], "BOS alone, no EOS"
    assert load(tmp_path, bos_token="<s>", add_bos_token=True).encode_prompt("") == [0]
    for config in ({}, {"bos_token": "<s>"}, {"bos_token": "<s>", "add_bos_token": False}, {"add_bos_token": True}):
        with pytest.raises(UsageError, match="no BOS"):
            load(tmp_path, **config).encode_prompt("")
    with pytest.raises(UsageError, match="no BOS"):
        load(tmp_path, core(eos=True), eos_token="</s>").encode_prompt("")


def test_prompts_are_never_cut_or_padded(tmp_path: Path) -> None:
    made = core()
    made.enable_truncation(4)
    made.enable_padding(length=64)
    assert load(tmp_path, made).decode(load(tmp_path, made).encode("hello " * 20, special=True)) == "hello " * 20


def test_text_that_is_not_unicode(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="prompt: is not valid Unicode"):
        load(tmp_path).encode_prompt("a\udcff")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b'{"a": 1', b"[" * 100_000])
def test_malformed(tmp_path: Path, name: str, content: bytes) -> None:
    (folder(tmp_path) / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
def test_special_token_outside_the_vocabulary(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} '<nowhere>' is not in the vocabulary"):
        load(tmp_path, None, **{key: "<nowhere>"})
    with pytest.raises(CheckpointError, match=f"{key} must be a string"):
        load(tmp_path, None, **{key: 7})


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, ()),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
        ({"eos_token_id": 7}, {}, (7,)),
        ({"eos_token_id": [9, 7]}, {"eos_token_id": 3}, (3, 7, 9)),
        ({}, {"eos_token_id": [3, 3, 0]}, (0, 3)),
        ({"eos_token_id": 4}, {"text_config": {"eos_token_id": 6, "vocab_size": 10}}, (4, 6)),
    ],
)
def test_stop_ids(tmp_path: Path, generation: Any, config: dict[str, Any], expected: tuple[int, ...]) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_ids(tmp_path, config) == expected
    tok = load(tmp_path, eos_token="<end>")
    assert stop_ids(tmp_path, config) == stop_ids(tmp_path, config, tok) == tuple(sorted({*expected, 2}))


# eos_token_id of generation_config.json, of config.json and of its text_config; the tokenizer's eos; all of them
DECLARED: dict[str, tuple[Any, Any, Any, str, tuple[int, ...]]] = {
    "Llama 3.1: three ids, the base model's among them": ([5, 6, 7], [5, 6, 7], None, "<end>", (2, 5, 6, 7)),
    "Qwen2.5: the end of a text only beside the tokenizer's": ([2, 9], 9, None, "<end>", (2, 9)),
    "Qwen3.5: the end of a turn from the tokenizer alone": (None, None, 9, "<end>", (2, 9)),
    "Gemma 4: the whole list in generation_config.json alone": ([1, 6, 5], [1, 6], 1, "</s>", (1, 5, 6)),
    "Gemma 4 without it": (None, [1, 6], 1, "</s>", (1, 6)),
}


@pytest.mark.parametrize("name", DECLARED)
def test_any_one_place_alone_would_miss_a_stop_id(tmp_path: Path, name: str) -> None:
    generation, top, text, eos, expected = DECLARED[name]
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    inner = {"vocab_size": 10, "eos_token_id": text}
    config = {"eos_token_id": top, **({"vocab_size": 10} if text is None else {"text_config": inner})}
    assert stop_ids(tmp_path, config, load(tmp_path, eos_token=eos)) == expected


@pytest.mark.parametrize("value", [10, -1, [1, 10], "2", True, [None], 1.0, {"a": 1}])
def test_stop_ids_that_are_none(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"/config\.json: .*(EOS id (10|-1)|eos_token_id must be)"):
        stop_ids(tmp_path, {"vocab_size": 10, "eos_token_id": value})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
        stop_ids(tmp_path, {"vocab_size": 10})
