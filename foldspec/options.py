"""What a user can set, as frozen dataclasses; of a request, in ``sampling_params.py``. Each value is checked once,
there or here, and nowhere else.

This module imports no torch: ``foldspec --help`` and the checks of a wrong option are instant.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foldspec import forcing
from foldspec.effort import Effort
from foldspec.errors import UsageError
from foldspec.sampling_params import SamplingParams
from foldspec.values import by_layer, leniency, one_of, read_pairs, real, several, whole

__all__ = [
    "AT_ZERO",
    "CONTEXT",
    "CONTEXT_FIELDS",
    "DIVERGENCES",
    "RESIDUALS",
    "RULE_FIELDS",
    "EngineOptions",
    "MethodOptions",
    "SamplingParams",
]

CONTEXT = "fold"  # the context method of those who name none
DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("auto", "float32", "bfloat16")
COVERAGES = ("all", "full")
FAR_BOUNDARIES = ("D", "complement")
LAYOUTS = ("single", "paper")
AT_ZERO = ("onehot", "mixture_argmax")
DIVERGENCES = ("taylor", "exact_kl", "modified", "tv", "chi2")
RESIDUALS = ("verifier", "relaxed")
# rule -> from, to, whether the first is left out
LENIENCIES = {"linear": (0.0, 1.0, False), "lenience": (0.0, 1.0, True), "cactus": (0.0, math.inf, False)}
MOST_THREADS = 1024
PREFIX_CACHES = ("exact", "approximate")
DRAFT_NOISES = ("own", "shared")
LOAD_FORMATS = ("auto", "dummy")
GRAPHS = ("auto", "on", "off")
WITHOUT_WEIGHTS = ("lookup", "repeat", "unigram")  # drafters


# the least that a whole number among the options of context methods may be
_LEAST = {
    "window": 1, "draft_window": 1, "sinks": 0, "recents": 1, "yarn_ref": 1, "rerope_len": 2, "infllm_block": 1,
    "infllm_init": 0, "infllm_topk": 1, "infllm_repr": 0, "cmr_chunk": 1, "cmr_topk": 1, "cmr_period": 1,
}  # fmt: skip
# how a method reads its context: option -> what makes its value of a text
CONTEXT_FIELDS: dict[str, Callable[[str], Any]] = {
    "window": int,
    "alpha": float,
    "coverage": str,
    "far_boundary": str,
    "layout": str,
    "layer_window": by_layer(int),
    "layer_alpha": by_layer(float),
    "auto_alphas": by_layer(float),
    **dict.fromkeys(_LEAST, int),
}


# what a rule may take
RULE_FIELDS: dict[str, Callable[[str], object]] = {
    "leniency": leniency,
    "divergence": str,
    "residual": str,
    "at_zero": str,
    "epsilon": float,
    "factor": float,
}


@dataclass(frozen=True)
class MethodOptions:
    """What a round does: how the drafter reads its context, how many drafts are verified, by which rule.

    A method reads the options that it has a use for: ``full`` none, ``window`` the window, ``fold`` also ``alpha``,
    ``coverage`` and ``far_boundary``, ``fold_auto`` its ``auto_alphas`` in place of ``alpha``.

    ``context``        name of a context method (``foldspec.context.METHODS``); None: ``fold``, or ``full`` where
                       the drafter reads its context by no method
    ``drafter``        name of a drafter without weights (``foldspec.drafters.MODEL_FREE``) that runs in place of the
                       pair's own; None: the pair's own, or plain decoding where it has none
    ``window``         W of FOLD, in context entries; None takes the pair's own
    ``alpha``          sharpness of FOLD's far read, a real number >= 1; None takes the pair's own
    ``coverage``       ``all``: the method is at work in every drafter layer; ``full``: in full-attention layers only;
                       None: the pair's own for methods that are for all layers, else ``full``
    ``far_boundary``   on sliding layers, far is ``p - j >= D`` (``D``) or all the near read leaves out (``complement``)
    ``layout``         what methods with a far read of un-rotated keys keep: ``single``, one copy of the context and a
                       ring of rotated keys; ``paper``, two full copies, as FOLD's paper does. The numbers are the same
    ``layer_window``, ``layer_alpha``   W and alpha of each drafter layer, in place of the one for all; () for none
    ``auto_alphas``    sharpnesses that ``fold_auto`` chooses from, 0 for no far read; it begins with the first
    ``draft_window``   entries that ``shared_window`` reads
    ``sinks``, ``recents``   of ``streaming``: the first and the last entries that are kept
    ``yarn_ref``       R of ``yarn``, the length that the drafter was trained for; None takes the pair's own
    ``rerope_len``     L of ``rerope``
    ``infllm_block``, ``infllm_init``, ``infllm_topk``   of ``infllm``: entries a block, entries at the beginning that
                       are always read, blocks that are read
    ``infllm_repr``    entries whose mean key stands for a block; 0: all of them
    ``cmr_chunk``, ``cmr_topk``, ``cmr_period``   of ``cmr``: entries a chunk, chunks that are read, rounds from one
                       choice to the next
    ``accept``         name of an acceptance rule (``foldspec.acceptance.RULES``). Of the next six it takes what it has
                       a use for, and refuses the others; None: its own
    ``leniency``       what a lossy rule lets pass: lambda of ``linear`` in [0, 1], one for all or one a draft of the
                       block (the last for all that follow); l of ``lenience`` in (0, 1]; delta of ``cactus``, from 0
    ``divergence``     of ``cactus``: ``taylor`` (its own), ``exact_kl``, ``modified`` (our reading), ``tv``, ``chi2``
    ``residual``       what replaces a draft that falls: ``verifier``, Norm[p - q]+ (that of ``lenience``), or
                       ``relaxed``, that of the law it was judged by (that of ``cactus``)
    ``at_zero``        ``linear`` at temperature 0: ``onehot`` (its own) or ``mixture_argmax``
    ``epsilon``, ``factor``  of ``typical``: 0.09 and 0.3
    ``draft_tokens``   drafts verified a round at most; None: all that the drafter proposes. Of a language model, which
                       has no block of its own, the length of its drafts; None: the pair's own, or 5
    ``block_length``   positions of a block of the grid that a block diffusion drafter reads; None: its file's own
    ``prefix_cache``   of a drafter that reads everything both ways (Dream): ``exact``, all of it is computed anew in
                       each step; or ``approximate``, the prefix once a round. Either way drafts follow their laws.
                       None: ``exact``
    ``confidence_stop``  in [0, 1]: a block ends before the first draft whose chance to stand is lower by the drafter's
                       own estimate (DSpark's confidence head); 0 takes all
    ``draft_temperature``  0: drafts are the drafter's argmax, and so point masses; else they are drawn at this
                       temperature, in a block independently of one another (with a Markov head from left to right)
    ``draft_top_k``, ``draft_top_p``  as in :class:`SamplingParams`, for drafts that are drawn
    ``steps``, ``confidence``, ``entropy_bound``, ``order``, ``q_mode``  how a diffusion drafter denoises a block, and
                       the law that a draft is judged by: fields of :class:`Effort`
    ``draft_noise``    ``own``; or ``shared``: drawn with the target's noise at that position, for ``match`` alone
    ``force_accept``   in place of a rule, for timing: so many drafts stand in each round (``forcing.parse``); None: the
                       rule decides
    """

    context: str | None = None
    window: int | None = None
    alpha: float | None = None
    coverage: str | None = None
    far_boundary: str = "D"
    layout: str = "single"
    layer_window: tuple[int, ...] = ()
    layer_alpha: tuple[float, ...] = ()
    auto_alphas: tuple[float, ...] = (2.0, 1.0, 4.0, 0.0)
    draft_window: int = 2048
    sinks: int = 4
    recents: int = 2044
    yarn_ref: int | None = None
    rerope_len: int = 4096
    infllm_block: int = 128
    infllm_init: int = 128
    infllm_topk: int = 16
    infllm_repr: int = 4
    cmr_chunk: int = 32
    cmr_topk: int = 64
    cmr_period: int = 8
    accept: str = "exact"
    leniency: float | tuple[float, ...] | None = None
    divergence: str | None = None
    residual: str | None = None
    at_zero: str | None = None
    epsilon: float | None = None
    factor: float | None = None
    draft_tokens: int | None = None
    drafter: str | None = None
    block_length: int | None = None
    prefix_cache: str | None = None
    confidence_stop: float = 0.0
    draft_temperature: float = 0.0
    draft_top_k: int = 0
    draft_top_p: float = 1.0
    draft_noise: str = "own"
    steps: int | None = None
    confidence: float | None = None
    entropy_bound: float | None = None
    order: str | None = None
    q_mode: str = "exact"
    force_accept: str | None = None

    def __post_init__(self) -> None:
        for name in ("context", "accept", "drafter"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name == "accept" or value is not None):
                raise UsageError(f"must be a name, not {value!r}", where=name)
        for name, least in _LEAST.items():
            whole(name, getattr(self, name), least, optional=name in ("window", "yarn_ref"))
        object.__setattr__(self, "layer_window", several("layer_window", self.layer_window))
        object.__setattr__(self, "layer_alpha", several("layer_alpha", self.layer_alpha))
        for window in self.layer_window:
            whole("layer_window", window, 1)
        for alpha in self.layer_alpha:
            real("layer_alpha", alpha, 1, math.inf)
        self._check_arms()
        whole("draft_tokens", self.draft_tokens, 0, optional=True)
        whole("block_length", self.block_length, 1, optional=True)
        if self.prefix_cache is not None:
            one_of("prefix_cache", self.prefix_cache, PREFIX_CACHES)
        if self.alpha is not None:
            real("alpha", self.alpha, 1, math.inf)
        if self.coverage is not None:
            one_of("coverage", self.coverage, COVERAGES)
        one_of("far_boundary", self.far_boundary, FAR_BOUNDARIES)
        one_of("layout", self.layout, LAYOUTS)
        self._check_rule()
        real("confidence_stop", self.confidence_stop, 0, 1)
        real("draft_temperature", self.draft_temperature, 0, math.inf)
        whole("draft_top_k", self.draft_top_k, 0)
        real("draft_top_p", self.draft_top_p, 0, 1, above=True)
        one_of("draft_noise", self.draft_noise, DRAFT_NOISES)
        self.effort  # noqa: B018  (checks its values)
        if self.draft_noise == "shared" and self.accept != "match":  # what is known of a draft would bias the output
            raise UsageError("shared goes with the rule match alone", where="draft_noise")
        if self.force_accept is not None:
            if not isinstance(self.force_accept, str):
                raise UsageError(f"must be text, not {self.force_accept!r}", where="force_accept")
            forcing.parse(self.force_accept)
            if self.accept != "exact":
                raise UsageError("comes in place of a rule", where="force_accept", do="leave the rule out")
        if self.draft_temperature and self.drafter is not None:
            raise UsageError(f"{self.drafter} has no law to draw from", where="draft_temperature", do="leave it out")
        if self.draft_temperature == 0:
            for name, none in (("draft_top_k", 0), ("draft_top_p", 1.0), ("draft_noise", "own")):
                if getattr(self, name) != none:
                    raise UsageError("is for drafts that are drawn", where=name, do="give a draft temperature above 0")

    def _check_arms(self) -> None:
        arms = several("auto_alphas", self.auto_alphas)
        object.__setattr__(self, "auto_alphas", arms)
        for alpha in arms:
            if alpha != 0 or isinstance(alpha, bool):
                real("auto_alphas", alpha, 1, math.inf)
        if not arms or len(set(arms)) < len(arms):
            raise UsageError("must name one at least, and each once", where="auto_alphas", do="for example 2/4/0")

    def _check_rule(self) -> None:
        """The values; whether the rule has a use for them, it says itself."""
        if self.leniency is not None:
            by_position = isinstance(self.leniency, (list, tuple))
            if by_position and self.accept != "linear":
                raise UsageError("one a position is for the rule linear alone", where="leniency")
            values = several("leniency", self.leniency) if by_position else (self.leniency,)
            low, high, above = LENIENCIES.get(self.accept, (0.0, math.inf, False))
            for value in values:
                real("leniency", value, low, high, above=above)
            if not values:
                raise UsageError("is empty", where="leniency", do="give one for each draft of a block")
            if by_position:
                object.__setattr__(self, "leniency", values)
        for name, known in (("divergence", DIVERGENCES), ("residual", RESIDUALS), ("at_zero", AT_ZERO)):
            if getattr(self, name) is not None:
                one_of(name, getattr(self, name), known)
        if self.epsilon is not None:
            real("epsilon", self.epsilon, 0, 1)
        if self.factor is not None:
            real("factor", self.factor, 0, math.inf)

    @property
    def effort(self) -> Effort:
        return Effort(self.steps, self.confidence, self.entropy_bound, self.order, self.q_mode)

    @property
    def rule_options(self) -> dict[str, Any]:
        """The options that are given for the rule."""
        return {name: getattr(self, name) for name in RULE_FIELDS if getattr(self, name) is not None}

    def changed(self, **changes: Any) -> MethodOptions:
        """The same with other values. Of another rule than this, the options are its own."""
        if changes.get("accept", self.accept) != self.accept:
            changes = dict.fromkeys(RULE_FIELDS) | changes
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_pairs(
        cls, of_context: Mapping[str, str], of_rule: Mapping[str, str] | None = None, /, **known: object
    ) -> MethodOptions:
        """Build from the strings of ``--context-opt KEY=VALUE`` and ``--accept-opt KEY=VALUE``, beside options that
        have their own flag (None: not given)."""
        values: dict[str, object] = {k: v for k, v in known.items() if v is not None}
        read_pairs(of_context, CONTEXT_FIELDS, "--context-opt", values)
        read_pairs(of_rule or {}, RULE_FIELDS, "--accept-opt", values)
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
    ``prefill_budget`` prompt tokens a forward while other requests decode; None: about what a round costs, 12 on a CPU,
                       1,024 on a GPU
    ``cache_tokens``   entries that the caches hold, of all requests together; None: ``max_batch`` times
                       ``max_context``, or what a share of the free memory holds
    ``debug``          check caches and bookkeeping after every step
    ``kernels``        ``auto`` or the name of one implementation to force
    ``graphs``         rounds that a GPU records once and replays: ``auto``, ``off``, or ``on``: a CPU runs them so, too
    ``offline``        open no socket; what is not on this disk is an error
    ``compiler``       a C++ compiler for the compiled kernels; None: the first of c++, g++, clang++
    ``nvcc``           CUDA's compiler, for the GPU's compiled kernel; None: the one on the path
    ``cache_dir``      where prepared checkpoints and compiled kernels are kept
    ``load_format``    ``auto``: the checkpoints' own weights; ``dummy``: random ones of the same shapes and dtypes, in
                       place of any file, and contexts that are made up in place of a prefill: for timing
    ``dummy_layers``   the dummies' layers, in place of all; the last ones, which have every kind; None: all
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
    graphs: str = "auto"
    offline: bool = False
    compiler: str | None = None
    nvcc: str | None = None
    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "foldspec")
    load_format: str = "auto"
    dummy_layers: int | None = None

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("weights", self.weights, WEIGHTS)
        one_of("graphs", self.graphs, GRAPHS)
        whole("threads", self.threads, 1, optional=True)
        if (self.threads or 1) > MOST_THREADS:  # a number that was not meant ends in a crash of the thread library
            raise UsageError(f"must be at most {MOST_THREADS}, not {self.threads}", where="threads")
        whole("max_context", self.max_context, 1, optional=True)
        whole("prefill_chunk", self.prefill_chunk, 1, optional=True)
        whole("max_batch", self.max_batch, 1)
        whole("prefill_budget", self.prefill_budget, 1, optional=True)
        whole("cache_tokens", self.cache_tokens, 1, optional=True)
        whole("page_size", self.page_size, 16)
        one_of("load_format", self.load_format, LOAD_FORMATS)
        whole("dummy_layers", self.dummy_layers, 1, optional=True)
        if self.dummy_layers is not None and self.load_format != "dummy":
            raise UsageError("is for dummy weights", where="dummy_layers", do="add --load-format dummy")
        if self.page_size & (self.page_size - 1):
            raise UsageError(f"must be a power of two, not {self.page_size}", where="page_size")
        if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,2})?", self.device):
            raise UsageError(f"must be auto, cpu, cuda or cuda:N, not {self.device!r}", where="device")
        object.__setattr__(self, "cache_dir", Path(self.cache_dir))
