"""The compiled kernels of ``csrc/`` in this process, or the reason why there are none."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from foldspec.kernels.build import BuildError, build, compiler_command, csrc_path

__all__ = ["Library", "instruction_sets", "longs", "refusal"]

# as csrc/common.h numbers them; in order of preference
INSTRUCTION_SETS = {"avx512": 2, "avx2": 1, "neon": 3, "portable": 0}


class Library:
    """Built and loaded when it is first asked for; what is found then stays.

    ``folder`` is where built libraries are kept; ``compiler`` names one in place of the first on the path (a value of
    CXX). ``instructions`` forces one of :data:`INSTRUCTION_SETS`; None takes the best that this CPU runs. Without a
    folder there is no library, and every operator runs on torch.
    """

    def __init__(
        self,
        folder: Path | None,
        compiler: str | None = None,
        *,
        instructions: str | None = None,
        csrc: Path | None = None,
    ) -> None:
        self._folder, self._compiler, self._csrc = folder, compiler, csrc or csrc_path()
        self._instructions = instructions
        self._loaded: ctypes.CDLL | None = None
        self._tried = False
        self._reason: str | None = None
        self.isa = 0
        self.notice: str | None = None  # one line for the user, once there is something to tell

    @property
    def reason(self) -> str | None:
        """None if the library is there, else why not, in a few words. The first call may compile."""
        if not self._tried:
            try:
                self._load()
            except BuildError as error:
                self._reason = f"not compiled: {error}"
                if self._folder is not None:
                    self.notice = f"no compiled kernels ({error}); torch does their work, slower; {error.do}"
            self._tried = True  # only now: after an interrupt, the next call tries again
        return self._reason

    def function(self, name: str, arguments: list[Any]) -> Any:
        """The exported function ``foldspec_NAME``, which returns nothing. Only when :attr:`reason` is None."""
        assert self.reason is None and self._loaded is not None
        function = self._loaded[f"foldspec_{name}"]
        function.argtypes, function.restype = arguments, None
        return function

    def _load(self) -> None:
        if self._folder is None:
            raise BuildError("no folder to build in was named")
        command = compiler_command(self._compiler)
        built = None
        try:
            built = build(self._folder, command, self._csrc)
            loaded = _open(built)
        except OSError as error:  # a cache that cannot be written, or that nothing can be run from
            loaded = _in_passing(command, self._csrc, built)
            self.notice = (
                f"compiled kernels cannot be {'kept in' if built is None else 'run from'} {self._folder} "
                f"({error.strerror or error}), so every start {'compiles' if built is None else 'copies'} them; name "
                "a folder you can write to and run programs from in FOLDSPEC_CACHE"
            )
        able = instruction_sets(loaded)
        if self._instructions is not None and self._instructions not in able:
            raise BuildError(f"this CPU does not run {self._instructions}")
        self.isa, self._loaded = INSTRUCTION_SETS[self._instructions or able[0]], loaded


def refusal(device: str, dtype: torch.dtype) -> str | None:
    """Why no compiled kernel serves this device and this arithmetic; None if one may. Compiles nothing."""
    if device != "cpu":
        return f"runs on a CPU, not on {device}"
    if dtype != torch.float32:
        return f"computes in float32, not in {str(dtype).removeprefix('torch.')}"
    return None


@lru_cache(maxsize=256)  # the layers of a forward share them
def longs(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Whole numbers as a kernel takes them."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def instruction_sets(library: ctypes.CDLL) -> list[str]:
    """What this CPU runs of :data:`INSTRUCTION_SETS`, best first."""
    return [name for name, number in INSTRUCTION_SETS.items() if library.foldspec_runs_here(number)]


def _open(path: Path) -> ctypes.CDLL:
    """Load a library and look for what it must have. Raises :class:`OSError` if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "foldspec_runs_here"):
        raise BuildError("the compiler made a library without its functions")
    return library


def _in_passing(command: list[str], csrc: Path, built: Path | None) -> ctypes.CDLL:
    """A library for this process alone, a copy of ``built`` where there is one: its file is gone again as soon as it is
    loaded."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="foldspec-"))
        try:
            path = build(folder, command, csrc) if built is None else Path(shutil.copy(built, folder))
            try:
                return _open(path)
            except OSError as error:
                what = str(error).removeprefix(f"{path}: ")
                raise BuildError(f"what {command[0]} makes cannot be loaded ({what})") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise BuildError(
            f"neither the cache nor a temporary folder will do ({error.strerror or error})",
            do="name a folder you can write to in FOLDSPEC_CACHE",
        ) from None
