"""Small tokenizers with every kind of decoder, for the tests of text."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

from foldspec.text.tokenizer import Tokenizer

TEXTS = [
    "hello world, hello tokens. Don't you know it's  2 spaces\n\nand lines",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, ❤️‍🔥 heart",
    "नमस्ते दुनिया, क्षत्रिय",
    "日本語のテキスト、漢字かな",
    "naïve café Ærøskøbing",
    " leading and trailing ",
    "\ufffd literal replacement \ufffd",
]


def byte_level() -> Core:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    core.train_from_iterator(TEXTS * 3, trainer)
    # added tokens: outside the byte alphabet, inside it (its one character names a byte), and a plain one with a space
    core.add_tokens(["漢字", AddedToken("é", normalized=False), "a b"])
    return core


def sentencepiece(*tail: decoders.Decoder) -> Core:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    pieces = [*"▁helowrd,.é日", "▁▁", "he", "ll", "▁he", "▁hell", "▁hello", "lo", "▁w", "or", "▁wor", "ld", "\ufffd"]
    for piece in pieces:
        vocab[piece] = len(vocab)
    merges = [("h", "e"), ("l", "l"), ("▁", "he"), ("▁he", "ll"), ("▁hell", "o"), ("l", "o"), ("▁", "w"), ("o", "r")]
    core = Core(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.add_special_tokens(["<s>", "</s>"])
    return core


def pieces(decoder: decoders.Decoder | None) -> Core:
    words = [
        "[UNK]",
        "[CLS]",
        "▁",
        "▁▁",
        "a",
        "▁a",
        "▁the",
        "b",
        "##b",
        "##ing",
        "run",
        ".",
        ",",
        "n't",
        "'s",
        "do",
        "not",
        "é",
    ]
    core = Core(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    core.decoder = decoder
    core.add_special_tokens(["[CLS]"])
    return core


MAKERS = {
    "byte-level": byte_level,
    "llama-2": lambda: sentencepiece(decoders.Strip(" ", 1, 0)),
    "gemma": sentencepiece,
    "strip of two": lambda: sentencepiece(decoders.Strip(" ", 2, 0)),
    "late replace": lambda: sentencepiece(decoders.Replace("lo w", "X")),
    "metaspace": lambda: pieces(decoders.Metaspace()),
    "metaspace never": lambda: pieces(decoders.Metaspace(prepend_scheme="never")),
    "wordpiece": lambda: pieces(decoders.WordPiece()),
    "wordpiece untidied": lambda: pieces(decoders.WordPiece(cleanup=False)),
    "suffix": lambda: pieces(decoders.BPEDecoder(suffix="b")),
    "ctc": lambda: pieces(decoders.CTC(pad_token="a", word_delimiter_token="▁")),
    "no decoder": lambda: pieces(None),
    "sequence of one": lambda: pieces(decoders.Sequence([decoders.Metaspace()])),
}
RULES = {
    "byte-level": "bytes",
    "llama-2": "runs",
    "gemma": "runs",
    "metaspace": "token",
    "metaspace never": "token",
    "wordpiece": "token",
    "wordpiece untidied": "token",
    "no decoder": "token",
    "sequence of one": "token",
}


@cache
def tokenizer(name: str) -> Tokenizer:
    core = MAKERS[name]()
    if core.decoder is None or name.startswith(("meta", "word", "suffix", "ctc", "seq")):
        return Tokenizer(core)
    return Tokenizer(core, {"bos_token": "<s>", "eos_token": "</s>"})


def byte_ids(tok: Tokenizer, data: bytes) -> list[int]:
    """One id a byte."""
    if (tok.decoder or {}).get("type") == "ByteLevel":
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [b for b in range(256) if b not in printable]
        names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    else:
        names = {b: f"<0x{b:02X}>" for b in range(256)}
    return [token_id(tok, names[b]) for b in data]


def token_id(tok: Tokenizer, token: str) -> int:
    found = tok._core.token_to_id(token)
    assert found is not None
    return found
