"""``foldspec check``, ``foldspec models`` and the help: what they say, and what they do not touch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from cli.command import ORACLE, PAIR, ROOT, command, copied, edit, main, pair_words, refused, with_text

import foldspec


def test_check_of_a_pair() -> None:
    done = main("check", *pair_words(), "--json")
    assert done.code == 0 and done.err == "" and done.out.count("\n") == 1
    pair, env = done.json["pair"], done.json["environment"]
    assert pair["target"] == str(PAIR / "target") and pair["drafter"] == str(PAIR / "drafter")
    assert pair["architecture"] == "LlamaForCausalLM" and pair["drafter architecture"] == "DFlashDraftModel"
    assert pair["block"] == 6 and pair["taps"] == [0, 1, 2] and pair["stop ids"] == [2, 3] and pair["context"] == 2048
    assert "made for this target" in pair["verdict"]
    assert env["foldspec"] == foldspec.__version__ and env["kernels"]["multi_read_attention"]["runs"] == "native"
    text = main("check", *pair_words())
    assert text.code == 0 and text.err == ""
    for line in ("environment", "pair", "  block: 6", "  stop ids: [2, 3]", "    multi_read_attention:"):
        assert line in text.out.splitlines(), text.out


def test_check_of_less_than_a_pair() -> None:
    alone = main("check", "--target", PAIR / "target", "--json").json["pair"]
    assert "drafter" not in alone and "verdict" not in alone
    looked = main("check", "--target", PAIR / "target", "--drafter", "lookup", "--json").json["pair"]
    assert looked == {**alone, "drafter": "lookup"}
    assert main("check", "--json").json["pair"] is None
    forced = main("check", "--kernels", "reference", "--json").json["environment"]["kernels"]["multi_read_attention"]
    assert forced["runs"] == "reference" and "asked for" in json.dumps(forced["refused"])
    assert main("check", *pair_words(), "--max-context", 100, "--json").json["pair"]["context"] == 100


def test_check_finds_what_loading_would() -> None:
    words = ["--target", PAIR / "target", "--drafter", ORACLE / "drafter"]
    line = refused(main("check", *words), 3, "is not a drafter for", "made for 3 layers, the target has 4")
    assert refused(main("generate", *words, "--prompt-ids", "5"), 3) == line
    words = [*pair_words(), "--max-context", "999999"]
    line = refused(main("check", *words), 2, "the target holds 2048 positions, not 999999")
    assert refused(main("generate", *words, "--prompt-ids", "5"), 2) == line


def bytes_read() -> int:
    """By this process, so far."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count here")
def test_check_reads_no_weights(tmp_path: Path) -> None:
    """A target of 700 MB, all of it a hole in the file: reading it would show in the kernel's count."""
    folder, config = tmp_path / "large", tiny.changed(tiny.TARGET, vocab_size=500_000, hidden_size=176, head_dim=8)
    tiny.write_target(folder, tiny.changed(config, vocab_size=8))
    shapes = {name: entry.shape for name, entry in tiny.read_headers(folder).entries.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        shape = tuple(500_000 if n == 8 and ("embed" in name or "head" in name) else n for n in shape)
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    edit(folder / "config.json", vocab_size=500_000)
    main("check")  # what is imported and asked once is not counted
    before = bytes_read()
    done = main("check", "--target", folder, "--json")
    assert done.code == 0 and done.json["pair"]["weights"].startswith("0.70")
    assert end > 700e6 and bytes_read() - before < 1e6


def test_a_checkpoint_folder_is_only_read(tmp_path: Path) -> None:
    pair = with_text(copied(tmp_path / "pair"))
    times = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in pair.rglob("*")}
    assert main("check", *pair_words(pair)).code == 0
    assert main("generate", *pair_words(pair), "-p", "w5", "--max-tokens", 3).code == 0
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in pair.rglob("*")} == times


def test_help_and_version() -> None:
    done = main("--help")
    assert done.code == 0 and all(name in done.out for name in ("generate", "check", "models"))
    done = main("generate", "--help")
    for name in ("--prompt-ids", "--context", "--alpha", "--json", "--offline", "--max-context", "--stop-ids"):
        assert name in done.out
    assert main("--version").out == f"foldspec {foldspec.__version__}\n"


LIGHT = """
import sys
from foldspec.cli import main
for words, wanted in (
    ("--help", 0), ("generate --help", 0), ("check --help", 0), ("--version", 0), ("", 2), ("fly", 2),
    ("generate smollm2-135m -p x --alpha 0.5", 2), ("generate smollm2-135m -p x --temperature -1", 2),
    ("generate smollm2-135m", 2), ("generate smollm2-135m --prompt-file /nothing", 2),
):
    try:
        code = main(words.split())
    except SystemExit as end:
        code = end.code
    assert code == wanted, (words, code)
heavy = {"torch", "huggingface_hub", "tokenizers", "numpy", "jinja2"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_and_wrong_options_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr.count("\n") == 6, done.stderr
    assert subprocess.run(command("--help"), capture_output=True, cwd=ROOT).returncode == 0
