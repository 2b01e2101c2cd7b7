"""The compiled library: built once, kept under a name that stands for what it was made of, and always replaceable by
torch. Whatever goes wrong ends in the right answer and at most one line for the user."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch

from foldspec import cli
from foldspec.kernels import build as build_module
from foldspec.kernels import library as library_module
from foldspec.kernels.build import BuildError, build, compiler_command, csrc_path, library_name
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.library import Library
from foldspec.kernels.linear import Facts

# A source that compiles in no time, in place of the real ones.
SMALL = 'extern "C" __attribute__((visibility("default"))) int foldspec_runs_here(int isa) { return isa == 0; }\n'


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "small.cpp").write_text(SMALL)
    return folder


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def product(library: Library) -> str:
    """The name of what ran a product, after looking at its result."""
    kernels = Kernels("auto", library)
    x, weight = torch.randn(3, 40), torch.randn(7, 40)
    facts = Facts("cpu", torch.float32, torch.float32, packed=True)
    held = weight.clone()
    if kernels.compiles("linear", facts):
        kernels.pack(weight, held)
    y = kernels.linear(x, held, packed=kernels.compiles("linear", facts))
    torch.testing.assert_close(y, x @ weight.T, atol=1e-5, rtol=0)
    torch.testing.assert_close(kernels.silu_mul(x, x), torch.nn.functional.silu(x) * x)
    assert len(kernels.notices) <= 1 and all("\n" not in notice for notice in kernels.notices)
    return next(choice.name for choice in kernels.choices if choice.operator == "linear")


def test_the_real_sources_are_found_and_built_and_kept() -> None:
    assert {path.name for path in csrc_path().glob("*.cpp")} == {
        "gated_delta.cpp",
        "linear.cpp",
        "multi_read_attention.cpp",
        "rms_norm.cpp",
        "rotate_append.cpp",
        "gate_mul.cpp",
        "pack.cpp",
    }
    library = tiny.library()
    assert library.reason is None and library.notice is None
    assert product(library) == "native"


def test_nothing_is_built_twice(csrc: Path, tmp_path: Path) -> None:
    compiler = compiler_command(None)
    path = build(tmp_path / "cache", compiler, csrc)
    made = path.stat().st_mtime_ns
    assert build(tmp_path / "cache", compiler, csrc) == path and path.stat().st_mtime_ns == made
    assert [p.name for p in path.parent.iterdir() if not p.name.endswith(".lock")] == [path.name]


def test_a_changed_source_compiler_flag_or_cpu_is_another_library(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = compiler_command(None)
    names = [library_name(compiler, csrc)]
    (csrc / "small.cpp").write_text(SMALL + "// changed\n")
    names.append(library_name(compiler, csrc))
    (csrc / "common.h").write_text("// a header\n")
    names.append(library_name(compiler, csrc))
    names.append(library_name([*compiler, "-g"], csrc))
    other = script(tmp_path / "other", f'[ "$1" = --version ] && echo "another 99.9" && exit; exec {compiler[0]} "$@"')
    names.append(library_name([other], csrc))
    monkeypatch.setattr(build_module, "_cpu", lambda: "another CPU")
    names.append(library_name(compiler, csrc))
    assert len(set(names)) == len(names)


def test_a_stale_library_is_not_used(csrc: Path, tmp_path: Path) -> None:
    """After a change of the source, the old file stays where it is and the new one is loaded."""
    first = build(tmp_path, compiler_command(None), csrc)
    (csrc / "small.cpp").write_text(SMALL.replace("isa == 0", "isa <= 1"))
    library = Library(tmp_path, csrc=csrc)
    assert library.reason is None and library.isa == 1
    assert first.exists()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    library = Library(tmp_path / "cache")
    assert product(library) == "reference"
    assert library.reason == "not compiled: no C++ compiler was found"
    assert library.notice is not None and "install g++ or clang++" in library.notice
    assert product(Library(tmp_path / "cache", "no-such-compiler")) == "reference"


BROKEN = {
    "it fails": ("echo 'small.cpp:1: error: no such luck' >&2; exit 1", "no such luck"),
    "it fails without a word": ("exit 3", "failed with status 3 (it says nothing)"),
    "it makes nothing": ("exit 0", "made no library"),
    "it makes rubbish": (
        'for last; do :; done; [ "$1" = --version ] || echo rubbish > "$last"',
        "makes cannot be loaded",
    ),
    "it is no program": (None, "does not run"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_compiler(kind: str, tmp_path: Path) -> None:
    text, said = BROKEN[kind]
    path = tmp_path / "compiler"
    compiler = script(path, text or "")
    if text is None:
        path.write_bytes(b"\x7fELF nonsense")
    library = Library(tmp_path / "cache", compiler)
    assert product(library) == "reference"
    assert library.notice is not None
    assert said in library.notice
    assert not list((tmp_path / "cache").glob("*.tmp*"))


@pytest.mark.parametrize("kept", [0, 1000, 9000, -1])
def test_a_library_that_was_cut_short_is_built_again(kept: int, csrc: Path, tmp_path: Path) -> None:
    """Loading one that is half there would end the process with a signal and no word."""
    path = build(tmp_path / "cache", compiler_command(None), csrc)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    assert build(tmp_path / "cache", compiler_command(None), csrc) == path
    assert Library(tmp_path / "cache", csrc=csrc).reason is None
    assert len(path.read_bytes()) == len(whole)


def test_a_compiler_name_with_a_quotation_mark_that_nothing_closes(tmp_path: Path) -> None:
    library = Library(tmp_path / "cache", "g++ 'x")
    assert product(library) == "reference"
    assert library.notice is not None and "was not found" in library.notice


def test_a_compiler_whose_library_cannot_be_loaded_runs_once(tmp_path: Path) -> None:
    """A C driver in CXX links without the C++ library: no second try would help."""
    log = tmp_path / "log"
    real = compiler_command(None)[0]
    driver = f'[ "$1" = --version ] || echo built >> {log}; exec {real} "$@" -nodefaultlibs -nostdlib'
    library = Library(tmp_path / "cache", script(tmp_path / "driver", driver))
    assert product(library) == "reference"
    assert library.notice is not None and "makes cannot be loaded" in library.notice
    assert log.read_text().split() == ["built"]


def test_a_cache_that_nothing_can_be_run_from(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is copied and not compiled again."""
    cache, real = tmp_path / "cache", library_module._open

    def opened(path: Path) -> ctypes.CDLL:
        if path.parent == cache:
            raise OSError("failed to map segment from shared object")
        return real(path)

    monkeypatch.setattr(library_module, "_open", opened)
    library = Library(cache, csrc=csrc)
    assert library.reason is None
    assert library.notice is not None and "cannot be run from" in library.notice and "copies" in library.notice


def test_an_interrupt_while_it_compiles_leaves_it_to_be_tried_again(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Path:
        raise KeyboardInterrupt

    library = Library(tmp_path / "cache", csrc=csrc)
    with monkeypatch.context() as patch:
        patch.setattr(library_module, "build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = library.reason
    assert library.reason is None
    assert library.function("runs_here", [ctypes.c_int]) is not None


def test_a_compiler_that_makes_a_library_of_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "csrc"
    empty.mkdir()
    (empty / "nothing.cpp").write_text("")
    library = Library(tmp_path / "cache", csrc=empty)
    assert library.reason is not None and "without its functions" in library.reason
    assert product(library) == "reference"


def test_a_cache_that_cannot_be_written(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled for this process alone, with one line that says so; nothing is left in the temporary folder."""
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    library = Library(tmp_path / "file" / "kernels", csrc=csrc)
    assert library.reason is None
    assert library.notice is not None and "FOLDSPEC_CACHE" in library.notice
    assert list((tmp_path / "temporary").iterdir()) == []


def test_neither_cache_nor_temporary_folder(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    library = Library(tmp_path / "file" / "kernels", csrc=csrc)
    assert product(library) == "reference"
    assert library.notice is not None and "FOLDSPEC_CACHE" in library.notice


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_library_in_a_read_only_cache_is_used(csrc: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    build(cache, compiler_command(None), csrc)
    cache.chmod(0o500)
    try:
        library = Library(cache, csrc=csrc)
        assert library.reason is None and library.notice is None
    finally:
        cache.chmod(0o700)


def test_two_processes_at_once_build_once(csrc: Path, tmp_path: Path) -> None:
    real = compiler_command(None)[0]
    log = tmp_path / "log"
    slow = script(tmp_path / "slow", f'[ "$1" = --version ] || {{ echo built >> {log}; sleep 1; }}; exec {real} "$@"')
    code = (
        "from pathlib import Path; from foldspec.kernels.library import Library;"
        f"l = Library(Path({str(tmp_path / 'cache')!r}), {slow!r}, csrc=Path({str(csrc)!r}));"
        "assert l.reason is None, l.reason; assert l.notice is None"
    )
    root = Path(build_module.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=root) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert log.read_text().split() == ["built"]


def test_one_that_dies_while_building_leaves_nothing_that_is_taken_for_a_library(csrc: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    hang = script(
        tmp_path / "hang",
        f'[ "$1" = --version ] && exit; for last; do :; done; echo half > "$last"; touch {started}; sleep 60',
    )
    code = (
        "from pathlib import Path; from foldspec.kernels.build import build;"
        f"build(Path({str(tmp_path / 'cache')!r}), [{hang!r}], Path({str(csrc)!r}))"
    )
    root = Path(build_module.__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}, cwd=root, start_new_session=True
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, 9)
    process.wait()
    script(tmp_path / "hang", f'[ "$1" = --version ] && exit; exec {compiler_command(None)[0]} "$@"')
    library = Library(tmp_path / "cache", hang, csrc=csrc)
    assert library.reason is None and library.notice is None


def test_the_command_line_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "broken", "exit 1"))
    monkeypatch.setenv("FOLDSPEC_CACHE", str(tmp_path / "cache"))
    pair = tiny.PAIRS / "a_llama_zlab"
    words = ["--target", str(pair / "target"), "--drafter", str(pair / "drafter")]
    case = ["generate", *words, "--prompt-ids", "5,6,7", "--max-tokens", "3", "--json"]
    assert cli.main(case) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "tau" not in line and "tokens" not in line]
    assert len(told) == 1 and told[0].startswith("foldspec: no compiled kernels (") and "CXX" in told[0]
    assert cli.main(["check", *words]) == 0
    out, err = capfd.readouterr()
    assert "not compiled:" in out and len(err.splitlines()) == 1


def test_errors_say_what_to_do() -> None:
    with pytest.raises(BuildError, match="was not found") as caught:
        compiler_command("no-such-compiler -O2")
    assert "CXX" in caught.value.do
