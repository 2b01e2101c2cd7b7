"""The foldspec command, run in this process or in one of its own, and tiny checkpoints to run it on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tiny
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from foldspec import cli
from foldspec.engine import cache_folder
from foldspec.kernels.library import Library

ROOT = Path(__file__).parents[2]
PAIR = tiny.PAIRS / "a_llama_zlab"  # B = 6, vocabulary 512, context 2048, stop ids 2 and 3
ORACLE = tiny.PAIRS / "g_llama_oracle"
BOS, EOS = 1, 2
KERNELS = cache_folder() / "kernels"  # looked up before a test names another cache folder


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on the last line of stdout."""
        report: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return report


def lend_kernels(cache: Path) -> None:
    """Put the compiled kernels that all tests share into a cache folder: each would compile them anew, for seconds."""
    if Library(KERNELS).reason is None:
        shutil.copytree(KERNELS, cache / "kernels", dirs_exist_ok=True)


def main(*arguments: object) -> Result:
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as end:  # --help and --version
            code = int(end.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def environment(home: Path, **more: str) -> dict[str, str]:
    """An environment in which everything that foldspec may write lies below ``home``, and no hub can be reached. One
    thread is what tiny models are quickest with."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "FOLDSPEC_", "XDG_", "PIP_", "FORCE_"))}
    own = {"HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return kept | own | more


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "foldspec.cli", *map(str, arguments)]


def start(home: Path, words: Sequence[str], env: Mapping[str, str] | None = None, **how: Any) -> subprocess.Popen[str]:
    """Start a process in an empty folder of its own, its output in pipes unless ``how`` says otherwise."""
    (home / "empty").mkdir(parents=True, exist_ok=True)
    if "FOLDSPEC_CACHE" not in (env or {}):
        lend_kernels(home / ".cache" / "foldspec")
    pipe = subprocess.PIPE
    streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "text": True}
    how = {**streams, "preexec_fn": heed_ctrl_c if os.name == "posix" else None, **how}
    return subprocess.Popen(words, env=environment(home, **(env or {})), cwd=home / "empty", **how)


def heed_ctrl_c() -> None:
    """A job in the background of a script ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def result(process: subprocess.Popen[str], timeout: float = 120) -> Result:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Result(process.returncode, out or "", err or "")


def refused(answer: Result, code: int, *says: str) -> str:
    """Nothing on stdout, one line on stderr with the exit code; returns the line."""
    assert answer.code == code and answer.out == "", answer
    assert answer.err.startswith("foldspec: ") and answer.err.endswith("\n") and answer.err.count("\n") == 1, answer.err
    for words in says:
        assert words in answer.err, answer.err
    return answer.err


def everything(*folders: Path) -> dict[str, int]:
    """Every path below the folders, with its size: what is compared to show that nothing was left behind."""
    found = [path for folder in folders for path in [folder, *folder.rglob("*")] if path.exists()]
    return {str(path): path.stat().st_size if path.is_file() else -1 for path in found}


# Checkpoints


def pair_words(folder: Path = PAIR) -> list[str]:
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]


def generate(*arguments: object, pair: Path = PAIR) -> Result:
    """``foldspec generate`` with a pair, in this process."""
    return main("generate", *pair_words(pair), *arguments)


def copied(folder: Path, pair: Path = PAIR) -> Path:
    """A pair that a test may damage."""
    for side in ("target", "drafter"):
        shutil.copytree(pair / side, folder / side)
    return folder


def edit(path: Path, **changes: Any) -> None:
    """Change values of a JSON file; None takes a key away."""
    path.write_text(json.dumps(tiny.changed(json.loads(path.read_text()), **changes)))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def swap_ids(pair: Path, a: int, b: int) -> Path:
    """Give two ids of the target each other's meaning: where it emitted ``a`` it now emits ``b``."""

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name][[a, b]] = tensors[name][[b, a]]

    edit_tensors(pair / "target", swap)
    return pair


def tie_ids(pair: Path, known: int, other: int) -> Path:
    """Give ``other`` all that the target knows of ``known``: their logits are equal everywhere."""

    def copy(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name][other] = tensors[name][known]

    edit_tensors(pair / "target", copy)
    return pair


def word(i: int) -> str:
    """The text of an id: some are not ASCII, some end a line."""
    named = {0: "<unk>", BOS: "<bos>", EOS: "<eos>", 400: "user", 401: "system", 402: "think"}
    return named.get(i, f"\u00fc{i}\n" if i % 10 == 7 else f"\u00fc{i}" if i % 3 == 0 else f"w{i}")


MESSAGES = "{% for m in messages %} {{ m['role'] }} {{ m['content'] }}{% endfor %}"
TEMPLATE = f"<bos>{MESSAGES}{{% if enable_thinking %}} think{{% endif %}}"


def with_text(pair: Path, *, bos: bool = False, template: str | None = None) -> Path:
    """Give a copied pair's target a tokenizer of one word an id, and perhaps a BOS and a chat template."""
    words = {word(i): i for i in range(512)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<bos>", "<eos>"])
    if bos:
        frame = {"single": "<bos> $A", "special_tokens": [("<bos>", BOS)]}
        core.post_processor = tokenizers.processors.TemplateProcessing(**frame)
    core.save(str(pair / "target" / "tokenizer.json"))
    config = {"eos_token": "<eos>", **({"bos_token": "<bos>"} if bos else {})}
    (pair / "target" / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (pair / "target" / "chat_template.jinja").write_text(template)
    return pair


def tell_bytes_apart(pair: Path) -> None:
    """A tokenizer of one id a byte, in place of one that knows no word of a real text."""
    words = {letter: 4 + i for i, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(words | {"<bos>": BOS, "<eos>": EOS}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.save(str(pair / "target" / "tokenizer.json"))
