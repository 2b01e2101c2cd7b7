"""House rules that no linter holds: who prints, who reads the environment, what imports cost, what the wheel has."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import foldspec

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "foldspec"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 450  # lines a file


def names(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names and plain names that a file uses, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}", node.lineno


def users(used: set[str], but: set[str]) -> list[str]:
    """Where any of these names is used, outside the modules ``but``."""
    others = [path for path in FILES if path.relative_to(PACKAGE).as_posix() not in but]
    return [f"{path.relative_to(ROOT)}:{line} {name}" for path in others for name, line in names(path) if name in used]


def test_only_the_command_line_prints() -> None:
    commands = ("bench", "models", "prompts", "results", "shared")
    those = {"cli.py", "terminal.py", *(f"cli_{name}.py" for name in commands)}
    assert users({"print", "sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}, but=those) == []


def test_only_the_command_line_and_the_engine_read_the_environment() -> None:
    assert users({"os.environ", "os.getenv", "environ", "getenv"}, but={"cli.py", "engine.py"}) == []


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_the_version_is_one() -> None:
    assert foldspec.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


LIGHT = ["", ".bench.metrics", ".bench.settings", ".cli", ".errors", ".options", ".records", ".checkpoints.registry"]
LIGHT += [".bench.throughput", ".text.chat", ".text.stream", ".text.tokenizer"]


@pytest.mark.parametrize("module", [f"foldspec{name}" for name in LIGHT])
def test_import_is_light(module: str) -> None:
    """No torch, no output, and nothing slow: these are imported by ``--help`` and by every wrong option."""
    code = f"import {module}, sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_is_whole(wheel: Path) -> None:
    """Every file of the package, the one copy of checkpoints.yaml and of csrc/, and nothing else."""
    source = {
        path.relative_to(ROOT).as_posix(): path
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    source["foldspec/checkpoints.yaml"] = ROOT / "checkpoints.yaml"
    for path in (ROOT / "csrc").rglob("*"):
        if path.is_file():
            source[f"foldspec/{path.relative_to(ROOT).as_posix()}"] = path
    for name in ("smollm2-135m-dflash", "smollm2-135m-masked"):
        assert f"foldspec/checkpoints/{name}/model.safetensors" in source
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.getinfo(name).file_size for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == {name: path.stat().st_size for name, path in source.items()}


@pytest.mark.slow
def test_the_wheel_runs_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import sys, foldspec; from foldspec.cli import main; print(foldspec.__file__); sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code, "models"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site") in done.stdout and "smollm2-135m" in done.stdout
