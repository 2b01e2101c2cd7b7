"""checkpoints.yaml: the file that ships, and what is said of a wrong one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foldspec.checkpoints.registry import Pair, Source, find, load_registry
from foldspec.errors import CheckpointError, UsageError


def test_the_registry_that_ships():
    pair = load_registry()["smollm2-135m"]
    assert pair.target == Source(embedded="smollm2-135m-instruct", repo="HuggingFaceTB/SmolLM2-135M-Instruct")
    assert pair.drafter == Source(embedded="smollm2-135m-dflash")
    assert (pair.window, pair.alpha, pair.coverage, pair.chat) == (256, 2.0, "all", True)
    assert find("smollm2-135m") == pair


def test_an_unknown_pair_lists_the_known_ones():
    with pytest.raises(UsageError) as caught:
        find("smollm3")
    assert str(caught.value) == (
        "no pair is called 'smollm3' (known: smollm2-135m); give a folder or a hub id with --target, and --drafter"
    )


def test_a_hub_pair_and_an_empty_file(tmp_path):
    path = tmp_path / "checkpoints.yaml"
    path.write_text("big:\n  target: {repo: a/b, revision: abc}\n  alpha: 1\n")
    assert load_registry(path) == {"big": Pair("big", Source("a/b", "abc"), alpha=1)}
    path.write_text("# nothing yet\n")
    assert load_registry(path) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("p: {target: {repo: a/b}, windw: 3}", "unknown key 'windw'; did you mean 'window'?"),
        ("p: {target: {repo: a/b}, zzz: 3}", "unknown key 'zzz'; known keys: name, target"),
        ("p: {target: {rep: a/b}}", "p.target: unknown key 'rep'; did you mean 'repo'?"),
        ("p: {target: {revision: abc}}", "needs 'repo' or 'embedded'"),
        ("p: {window: 3}", "has no target"),
        ("p: {target: {repo: a/b}, window: wide}", "window must be of type int, not 'wide'"),
        ("p: {target: {repo: a/b}, window: true}", "window must be of type int, not True"),
        ("p: {target: {repo: a/b}, chat: 1}", "chat must be of type bool, not 1"),
        ("p: {target: a/b}", "expected 'key: value' lines, found 'a/b'"),
        ("p: 3", "expected 'key: value' lines"),
        ("- p", "expected 'key: value' lines"),
        ("p: {target: {repo: a/b}, name: q}", "is not given again"),
        ("p: [", "is not YAML"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, text, says):
    path = tmp_path / "checkpoints.yaml"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load_registry(path)
    assert says in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_registry(tmp_path / "none.yaml")


def test_finding_checkpoints_imports_no_torch():
    code = (
        "import foldspec.checkpoints.registry, foldspec.checkpoints.resolve, foldspec.checkpoints.embedded, sys;"
        "import foldspec.checkpoints.headers; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
