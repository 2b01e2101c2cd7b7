"""Everything a user can set, as frozen dataclasses. Each value is checked once, here, and nowhere else.

This module imports no torch: ``foldspec --help`` and the checks of a wrong option are instant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from foldspec.errors import UsageError

__all__ = ["EngineOptions", "MethodOptions", "SamplingParams"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("auto", "float32", "bfloat16")
COVERAGES = ("all", "full")
FAR_BOUNDARIES = ("D", "complement")
MOST_THREADS = 1024


def _whole(name: str, value: object, low: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UsageError(f"must be a whole number of at least {low}, not {value!r}", where=name)


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"must be one of {', '.join(known)}, not {value!r}", where=name)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded and where it ends. Decoding is greedy (argmax; ties go to the lowest id).

    ``max_tokens``   tokens to generate at most; 0 gives an empty completion that finished by ``length``
    ``stop_ids``     ids that end the request, beside the ids that the checkpoint declares
    ``ignore_eos``   go on past the checkpoint's own stop ids (``stop_ids`` still count)
    """

    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 0)
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        for token in self.stop_ids:
            _whole("stop_ids", token, 0)


@dataclass(frozen=True)
class MethodOptions:
    """What a round does: how the drafter reads its context, how many drafts are verified, by which rule.

    A method reads the options that it has a use for: ``full`` none, ``window`` the window, ``fold`` all of them.

    ``context``        name of a context method (``foldspec.context.METHODS``)
    ``drafter``        name of a drafter without weights (``foldspec.drafters.MODEL_FREE``) that runs in place of the
                       pair's own; None: the pair's own, or plain decoding where it has none
    ``window``         W of FOLD, in context entries; None takes the pair's own
    ``alpha``          sharpness of FOLD's far read, a real number >= 1; None takes the pair's own
    ``coverage``       ``all``: every drafter layer has the far read; ``full``: only full-attention layers have it; None
                       takes the pair's own
    ``far_boundary``   on sliding layers, far is ``p - j >= D`` (``D``) or all the near read leaves out (``complement``)
    ``accept``         name of an acceptance rule (``foldspec.acceptance.RULES``)
    ``draft_tokens``   drafts verified a round at most; None verifies all that the drafter proposes
    """

    context: str = "fold"
    window: int | None = None
    alpha: float | None = None
    coverage: str | None = None
    far_boundary: str = "D"
    accept: str = "exact"
    draft_tokens: int | None = None
    drafter: str | None = None

    def __post_init__(self) -> None:
        for name in ("context", "accept", "drafter"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name, value) != ("drafter", None):
                raise UsageError(f"must be a name, not {value!r}", where=name)
        _whole("window", self.window, 1, optional=True)
        _whole("draft_tokens", self.draft_tokens, 0, optional=True)
        if self.alpha is not None:
            real = isinstance(self.alpha, (int, float)) and not isinstance(self.alpha, bool)
            if not real or not math.isfinite(self.alpha) or self.alpha < 1:
                raise UsageError(f"must be a finite number of at least 1, not {self.alpha!r}", where="alpha")
        if self.coverage is not None:
            _one_of("coverage", self.coverage, COVERAGES)
        _one_of("far_boundary", self.far_boundary, FAR_BOUNDARIES)

    @classmethod
    def from_pairs(cls, pairs: Mapping[str, str], **known: object) -> MethodOptions:
        """Build from ``--context-opt KEY=VALUE`` strings, beside options that have their own flag (None: not given)."""
        values: dict[str, object] = {k: v for k, v in known.items() if v is not None}
        kinds = {"window": int, "alpha": float, "coverage": str, "far_boundary": str}
        for key, text in pairs.items():
            if key not in kinds:
                raise UsageError(f"unknown key {key!r}", where="--context-opt", do=f"known keys: {', '.join(kinds)}")
            if key in values:
                raise UsageError("given twice", where=f"--{key} and --context-opt {key}=")
            try:
                values[key] = kinds[key](text)
            except ValueError:
                raise UsageError(f"{text!r} is not a number", where=f"--context-opt {key}") from None
        return cls(**values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class EngineOptions:
    """Where and how the weights and caches live; fixed for the life of an engine.

    ``device``         ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``
    ``dtype``          arithmetic; ``auto``: float32 on a CPU, the checkpoint's own on a GPU
    ``weights``        how matrices are held; ``auto``: bfloat16 on a CPU where the checkpoint is bfloat16 and a
                       compiled kernel computes with it in float32; else the arithmetic's own
    ``threads``        CPU threads; None leaves torch's choice
    ``max_context``    tokens a request may hold, prompt and output; None: what the target declares
    ``prefill_chunk``  prompt tokens a forward; None: 512 on a CPU, 8,192 on a GPU
    ``page_size``      cache entries a page, a power of two from 16
    ``max_batch``      requests that run at once; more wait
    ``prefill_budget`` prompt tokens a forward while other requests decode; None: about what a round costs, 16 on a CPU,
                       1,024 on a GPU
    ``cache_tokens``   entries that the caches hold, of all requests together; None: ``max_batch`` times
                       ``max_context``, or what a share of the free memory holds
    ``debug``          check caches and bookkeeping after every step
    ``kernels``        ``auto`` or the name of one implementation to force
    ``offline``        open no socket; what is not on this disk is an error
    ``compiler``       a C++ compiler for the compiled kernels; None: the first of c++, g++, clang++
    ``cache_dir``      where prepared checkpoints and compiled kernels are kept
    """

    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    threads: int | None = None
    max_context: int | None = None
    prefill_chunk: int | None = None
    page_size: int = 256
    max_batch: int = 8
    prefill_budget: int | None = None
    cache_tokens: int | None = None
    debug: bool = False
    kernels: str = "auto"
    offline: bool = False
    compiler: str | None = None
    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "foldspec")

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("weights", self.weights, WEIGHTS)
        _whole("threads", self.threads, 1, optional=True)
        if (self.threads or 1) > MOST_THREADS:  # a number that was not meant ends in a crash of the thread library
            raise UsageError(f"must be at most {MOST_THREADS}, not {self.threads}", where="threads")
        _whole("max_context", self.max_context, 1, optional=True)
        _whole("prefill_chunk", self.prefill_chunk, 1, optional=True)
        _whole("max_batch", self.max_batch, 1)
        _whole("prefill_budget", self.prefill_budget, 1, optional=True)
        _whole("cache_tokens", self.cache_tokens, 1, optional=True)
        _whole("page_size", self.page_size, 16)
        if self.page_size & (self.page_size - 1):
            raise UsageError(f"must be a power of two, not {self.page_size}", where="page_size")
        if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,2})?", self.device):
            raise UsageError(f"must be auto, cpu, cuda or cuda:N, not {self.device!r}", where="device")
        object.__setattr__(self, "cache_dir", Path(self.cache_dir))
