"""Builds ``csrc/`` into one shared library, at first use, with the system's C++ compiler; and ``csrc/cuda/`` into
another, with CUDA's.

A library is kept in a cache folder under a name made of everything that decides its contents: sources, compiler,
flags, CPU or kind of GPU. It is compiled beside its final place and moved there in one step, under a lock, so that
processes that start together build it once and none ever sees half of it. It carries a hash of itself: one that was
damaged since (a power cut, a copy that broke off) is built again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["BuildError", "Recipe", "build", "compiler_command", "csrc_path", "for_gpu", "library_name", "nvcc_command"]

COMPILERS = ("c++", "g++", "clang++")
# No -march: every source holds code for each instruction set and picks at run time. Contraction off and no fast-math:
# what a source adds up, and in which order, is what runs.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-w")
# As above: no product and sum become one, so that its numbers are those of the definition. What decides the code is
# apart, for the ahead-of-time gate, which makes no library of it.
GPU_CODE_FLAGS = ("-std=c++17", "-O3", "--fmad=false")
HIDDEN = "-Xcompiler=-fPIC,-fvisibility=hidden"
GPU_FLAGS = (*GPU_CODE_FLAGS, "-shared", "-cudart=static", HIDDEN, "-w")
SECONDS = 300  # a compiler, or another process that holds the lock, gets this long

# What helps where there is no working compiler.
INSTALL = "install g++ or clang++, or name a compiler in CXX"
INSTALL_NVCC = "install CUDA's nvcc, or name its folder in CUDA_HOME"


@dataclass(frozen=True)
class Recipe:
    """How a folder of sources becomes a library. ``sources``: the pattern of those that are compiled, of all that lie
    there; ``machine``: what it is made for, if not this CPU."""

    name: str
    sources: str
    flags: tuple[str, ...]
    machine: str | None = None


FOR_CPU = Recipe("foldspec", "*.cpp", FLAGS)


def for_gpu(architecture: str) -> Recipe:
    """``architecture``: sm_90 and the like."""
    return Recipe("foldspec-cuda", "*.cu", (*GPU_FLAGS, f"-arch={architecture}"), architecture)


class BuildError(Exception):
    """Why there is no library, in a few words; ``do`` is the remedy."""

    def __init__(self, what: str, do: str = INSTALL) -> None:
        super().__init__(what)
        self.do = do


def csrc_path() -> Path:
    """``csrc/``: inside the package when installed from a wheel, else at the top of the checkout."""
    package = Path(__file__).parent.parent
    inside = package / "csrc"
    return inside if inside.exists() else package.parent / "csrc"


def compiler_command(named: str | None) -> list[str]:
    """The compiler and its own arguments: ``named``, else the first that is on the path. Raises :class:`BuildError`."""
    if named:
        try:
            words = shlex.split(named)
        except ValueError:  # a quotation mark that nothing closes
            words = []
        if not words or shutil.which(words[0]) is None:
            raise BuildError(f"the compiler {named!r} was not found")
        return words
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler was found")


def nvcc_command(named: str | None) -> list[str]:
    """CUDA's compiler: ``named``, else the one on the path. Raises :class:`BuildError`."""
    if shutil.which(named or "nvcc") is None:
        raise BuildError(f"{named} was not found" if named else "nvcc was not found on the path", INSTALL_NVCC)
    return [named or "nvcc"]


def library_name(compiler: list[str], csrc: Path, recipe: Recipe = FOR_CPU) -> str:
    """The file name that stands for these sources, this compiler, these flags and this CPU or kind of GPU."""
    digest = hashlib.sha256()
    for source in sorted(csrc.glob("*.[ch]*")):
        digest.update(f"\0{source.name}\0".encode() + source.read_bytes())
    for part in (_run([*compiler, "--version"]), " ".join([*compiler, *recipe.flags]), recipe.machine or _cpu()):
        digest.update(f"\0{part}".encode())
    return f"{recipe.name}-{digest.hexdigest()[:24]}.so"


def build(folder: Path, compiler: list[str], csrc: Path, recipe: Recipe = FOR_CPU) -> Path:
    """The library in ``folder``, compiled if it is not there yet.

    Raises :class:`BuildError` if the compiler fails, :class:`OSError` if the folder cannot be written.
    """
    path = folder / library_name(compiler, csrc, recipe)
    if _whole(path):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f".{path.name}.lock", timeout=SECONDS):
            if not _whole(path):
                unfinished = folder / f".{path.name}.{os.getpid()}"
                try:
                    sources = map(str, sorted(csrc.glob(recipe.sources)))
                    _run([*compiler, *recipe.flags, *sources, "-o", str(unfinished)])
                    if not unfinished.exists():
                        raise BuildError(f"{compiler[0]} made no library")
                    _seal(unfinished)
                    os.replace(unfinished, path)
                finally:
                    unfinished.unlink(missing_ok=True)
    except Timeout:
        raise BuildError(f"another process has been building for {SECONDS} s", do=f"delete {folder}") from None
    return path


def _seal(path: Path) -> None:
    """Append the hash of a file's bytes to it: a loader takes no notice, and :func:`_whole` does."""
    with path.open("r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())
        file.flush()
        os.fsync(file.fileno())


def _whole(path: Path) -> bool:
    """Whether a library is there as it was sealed. Loading one that was cut short would end the process."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    return data[-32:] == hashlib.sha256(data[:-32]).digest()


def _run(command: list[str]) -> str:
    """What a compiler says. Raises :class:`BuildError` with its first complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run ({error})") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        complaint = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it says nothing")
        raise BuildError(f"{command[0]} failed with status {done.returncode} ({complaint[:160]})")
    return done.stdout


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.system()} {platform.machine()} {flags}"
