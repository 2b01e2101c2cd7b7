"""The compiled kernels of ``csrc/`` in this process, or the reason why there are none."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from foldspec.kernels.build import (
    FOR_CPU,
    BuildError,
    Recipe,
    build,
    compiler_command,
    csrc_path,
    for_gpu,
    nvcc_command,
)

__all__ = ["GpuLibrary", "Library", "instruction_sets", "longs", "refusal"]

# as csrc/common.h numbers them; in order of preference
INSTRUCTION_SETS = {"avx512": 2, "avx2": 1, "neon": 3, "portable": 0}


class _Compiled:
    """A library that is built and loaded when it is first asked for; what is found then stays."""

    def __init__(self, folder: Path | None, shows: str) -> None:
        """``folder`` is where built libraries are kept; ``shows``: a function that it must have."""
        self._folder, self._shows = folder, shows
        self._loaded: ctypes.CDLL | None = None
        self._tried = False
        self._reason: str | None = None
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
                    self.notice = self._complaint(error)
            self._tried = True  # only now: after an interrupt, the next call tries again
        return self._reason

    @property
    def prepared(self) -> int:
        """How many libraries were built or loaded here so far, or turned out not to be there."""
        return int(self._tried)

    def function(self, name: str, arguments: list[Any], result: Any = None) -> Any:
        """The exported function ``foldspec_NAME``. Only when :attr:`reason` is None."""
        assert self.reason is None and self._loaded is not None
        function = self._loaded[f"foldspec_{name}"]
        function.argtypes, function.restype = arguments, result
        return function

    def _load(self) -> None:
        raise NotImplementedError

    def _complaint(self, error: BuildError) -> str:
        """The notice of a library that cannot be had."""
        raise NotImplementedError

    def _built(self, command: list[str], csrc: Path, recipe: Recipe) -> ctypes.CDLL:
        if self._folder is None:
            raise BuildError("no folder to build in was named")
        built = None
        try:
            built = build(self._folder, command, csrc, recipe)
            loaded = _open(built)
        except OSError as error:  # a cache that cannot be written, or that nothing can be run from
            loaded = _in_passing(command, csrc, recipe, built)
            self.notice = (
                f"compiled kernels cannot be {'kept in' if built is None else 'run from'} {self._folder} "
                f"({error.strerror or error}), so every start {'compiles' if built is None else 'copies'} them; name "
                "a folder you can write to and run programs from in FOLDSPEC_CACHE"
            )
        if not hasattr(loaded, self._shows):
            raise BuildError("the compiler made a library without its functions")
        return loaded


class Library(_Compiled):
    """The compiled kernels for a CPU, and beside them in ``gpu`` those for a GPU.

    ``folder`` is where built libraries are kept; ``compiler`` names one in place of the first on the path (a value of
    CXX), ``nvcc`` CUDA's. ``instructions`` forces one of :data:`INSTRUCTION_SETS`; None takes the best that this CPU
    runs. Without a folder there is no library, and every operator runs on torch.
    """

    def __init__(
        self,
        folder: Path | None,
        compiler: str | None = None,
        *,
        nvcc: str | None = None,
        instructions: str | None = None,
        csrc: Path | None = None,
    ) -> None:
        super().__init__(folder, "foldspec_runs_here")
        self._compiler, self._csrc, self._instructions = compiler, csrc or csrc_path(), instructions
        self.gpu = GpuLibrary(folder, nvcc, self._csrc / "cuda")
        self.isa = 0

    def _load(self) -> None:
        loaded = self._built(compiler_command(self._compiler), self._csrc, FOR_CPU)
        able = instruction_sets(loaded)
        if self._instructions is not None and self._instructions not in able:
            raise BuildError(f"this CPU does not run {self._instructions}")
        self.isa, self._loaded = INSTRUCTION_SETS[self._instructions or able[0]], loaded

    @property
    def prepared(self) -> int:
        return super().prepared + self.gpu.prepared

    def _complaint(self, error: BuildError) -> str:
        return f"no compiled kernels ({error}); torch does their work, slower; {error.do}"


class GpuLibrary(_Compiled):
    """The kernels of ``csrc/cuda/``, for the kind of GPU that torch has as its current one."""

    def __init__(self, folder: Path | None, nvcc: str | None, csrc: Path) -> None:
        super().__init__(folder, "foldspec_verify_room")
        self._nvcc, self._csrc = nvcc, csrc

    def _load(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        self._loaded = self._built(nvcc_command(self._nvcc), self._csrc, for_gpu(f"sm_{major}{minor}"))

    def _complaint(self, error: BuildError) -> str:
        return f"CUDA verification kernel not built ({error})"


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
    """Load a library. Raises :class:`OSError` if it cannot be loaded."""
    return ctypes.CDLL(str(path))


def _in_passing(command: list[str], csrc: Path, recipe: Recipe, built: Path | None) -> ctypes.CDLL:
    """A library for this process alone, a copy of ``built`` where there is one: its file is gone again as soon as it is
    loaded."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="foldspec-"))
        try:
            path = build(folder, command, csrc, recipe) if built is None else Path(shutil.copy(built, folder))
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
