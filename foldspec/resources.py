"""What all engines over one pair of weights share: modules, pools, and the ids of requests."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from foldspec.acceptance.base import AcceptanceRule
from foldspec.cache.paged import PagedCache, TargetSpec
from foldspec.cache.recurrent import RECORDED
from foldspec.checkpoints.registry import Pair
from foldspec.context import coverage_of, make_method
from foldspec.drafters import make_model_free
from foldspec.drafters.base import Drafter, DrafterNetwork, Footprint, Host, NoDrafter, Room
from foldspec.errors import ResourceError, UsageError
from foldspec.kernels import gate_mul, gated_delta, linear, multi_read_attention, rms_norm, rotate_append, verify
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import FoundPair, Progress
from foldspec.made_up import Numbers
from foldspec.memory import MemoryPlan, make_plan
from foldspec.options import CONTEXT, EngineOptions, MethodOptions
from foldspec.sampling import DraftSampling
from foldspec.schedule.graphs import Graphs, why_not
from foldspec.schedule.prefill import fill, prefill
from foldspec.schedule.scheduler import Turn
from foldspec.schedule.scoring import TextScore, score
from foldspec.schedule.trace import Mark, Stopwatch, unmarked, waiting

__all__ = [
    "Prefix",
    "Resources",
    "choose_operators",
    "filled_in",
    "no_graphs",
    "pick_context",
    "pick_device",
    "pick_dtype",
]

WINDOW, ALPHA, YARN_REF, DRAFTS = 2048, 2.0, 4096, 5  # for a pair that the registry does not know
WHOLE = "full"  # the context method of a drafter that reads everything
CHUNKS = {"cpu": 512, "cuda": 8192}  # prompt tokens a forward
BUDGETS = {"cpu": 12, "cuda": 1024}  # and while other requests decode: about as many as cost what a round costs


@dataclass
class Prefix:
    """A prompt that has been prefilled. Requests that start from it share its pages, read-only.

    ``logits`` [1, vocabulary] of its last token; ``seconds`` that the prefill took, ``draft_seconds`` of them for the
    drafter's part.
    """

    token_ids: tuple[int, ...]
    logits: torch.Tensor
    seconds: float
    draft_seconds: float
    request: int
    _resources: Resources | None = field(repr=False)

    def check(self, resources: Resources) -> None:
        """Raises :class:`UsageError` if it is closed or was made over other weights."""
        if self._resources is not resources:
            raise UsageError("this prefix is closed or belongs to other weights", do="call prefill of this engine")

    @property
    def held(self) -> tuple[int, int]:
        """Entries that target and drafter hold of it: always its length (a drafter may hold none)."""
        assert self._resources is not None, "a closed prefix holds nothing"
        resources = self._resources
        return resources.cache.tables.length(self.request), resources.prefix_drafter.held(self.request)

    def score(self, tokens: Sequence[int]) -> TextScore:
        """How likely the target holds ``tokens`` after this prompt (``schedule/scoring.py``); nothing of it is kept.
        Raises :class:`UsageError` for what does not fit the context, :class:`ResourceError` without a free page."""
        assert self._resources is not None, "a closed prefix scores nothing"
        resources, request = self._resources, self._resources.new_id()
        resources.check_room((*self.token_ids, *tokens[:-1]))
        with resources.turn:
            try:
                resources.cache.fork(self.request, request)
                return score(request, tokens, self.logits, resources.found.model, resources.cache)
            finally:
                resources.cache.close(request)

    def close(self) -> None:
        """Free its pages. Requests that run from it go on."""
        if self._resources is not None:
            with self._resources.turn:
                self._resources.close(self.request, self._resources.prefix_drafter)
            self._resources = None

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Resources:
    """A loaded pair with its pools, and what it takes to run a request in them: caches opened and closed, prefill."""

    def __init__(
        self,
        found: FoundPair,
        options: EngineOptions,
        kernels: Kernels,
        device: torch.device,
        progress: Progress | None,
        method: MethodOptions,
        planned: Callable[[MemoryPlan], None] | None = None,
    ) -> None:
        """``method`` is the one that memory is planned for; any other can run too. ``planned`` hears of the plan before
        anything is allocated. Raises :class:`ResourceError` if there is not enough memory."""
        self.found, self.options, self.kernels, self.device, self.progress = found, options, kernels, device, progress
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.dtype = pick_dtype(options.dtype, device, found)
        self.chunk = options.prefill_chunk or CHUNKS[device.type]
        self.budget = options.prefill_budget or BUDGETS[device.type]
        self.max_context = pick_context(options.max_context, found)
        self.turn = Turn()  # on the caches: whoever opens, closes or steps holds it
        self._ids = itertools.count()
        self._prefix_drafter: Drafter | None = None
        self._block_length = method.block_length  # of what prefixes keep
        self.plan = make_plan(
            found,
            options,
            method,
            dtype=self.dtype,
            device=device,
            kernels=kernels,
            chunk=self.chunk,
            longest=self.max_context,
        )
        if planned is not None:
            planned(self.plan)
        self.cache, self._draft_cache = self._pools()

    def _pools(self) -> tuple[PagedCache, Any]:
        network, options, plan = self.found.network, self.options, self.plan
        spec = self.found.model.cache_spec(self.dtype)
        try:
            cache = PagedCache(
                spec,
                pages=plan.pages,
                page_size=options.page_size,
                requests=plan.target_requests,
                longest_pass=plan.longest_pass,
                longest=plan.longest,
                device=self.device,
            )
            if network is None:
                return cache, None
            draft_cache = network.caches(self.dtype, self._room, plan.draft_pages, self.device)
        except RuntimeError as error:  # torch has no one class for it on all devices
            what = f"no memory for a cache of {plan.target_cache / 1e9:.1f} GB on {self.device}: {plan}"
            raise ResourceError(what, do="lower --max-context or --max-batch") from error
        return cache, draft_cache

    @property
    def _room(self) -> Room:
        return Room(self.options.max_batch, self.plan.longest, self.plan.longest_pass, self.options.page_size)

    def method_memory(self, method: MethodOptions) -> dict[str, int]:
        """Bytes that the drafter keeps by ``method`` in these pools, named as in the memory plan; ``rings`` are the
        drafter's own."""
        network = self.found.network if method.drafter is None and method.draft_tokens != 0 else None
        takes = Footprint(0, 0, 0) if network is None else network.footprint(method, self.dtype, self._room)
        entries = self.plan.draft_pages * self.options.page_size
        return {"draft_cache": entries * takes.entry, "rings": takes.rings, "method_state": takes.state}

    def check_caches(self) -> None:
        """Debug mode: what must hold of the caches whoever uses them."""
        self.cache.check()
        if self._draft_cache is not None:
            self._draft_cache.check()

    @cached_property
    def worker(self) -> ThreadPoolExecutor:
        """The one thread in which steps run for asynchronous callers."""
        return ThreadPoolExecutor(1, thread_name_prefix="foldspec")

    def new_id(self) -> int:
        """An id that no other request over these pools has."""
        return next(self._ids)

    def check_room(self, prompt: Sequence[int]) -> None:
        """Raises :class:`UsageError` for a prompt that leaves no room for a token of output."""
        if len(prompt) >= self.max_context:
            raised = " or raise --max-context" if self.max_context < self.found.model.max_positions else ""
            raise UsageError(
                f"has {len(prompt)} tokens, the context holds {self.max_context} with the output",
                where="prompt",
                do=f"shorten it{raised}",
            )

    def drafter(self, method: MethodOptions, verified: int | None = None) -> Drafter:
        """The drafter that ``method`` names, or the pair's own, which reads its context by ``method`` over the shared
        weights and pools. Without one, or with ``draft_tokens=0``: plain decoding. ``verified``: the request whose
        verification a method may look at, where it is not the drafter's own. Raises :class:`UsageError` for an unknown
        context method or drafter, or one that does not go with the target."""
        network = self.found.network
        make_method(method, (), 1)  # a wrong name is wrong where it is not used too
        named = None if method.drafter is None else make_model_free(method.drafter)
        if method.draft_tokens == 0:
            return NoDrafter()
        if named is not None:
            return named
        if network is None:
            return NoDrafter()
        host = Host(self.found.model, self.cache, self.kernels, verified)
        drafter = network.bind(host, self._draft_cache, method, DraftSampling.of(method))
        most = min(self.plan.longest_pass, RECORDED if self.cache.spec.recurrent else self.plan.longest_pass) - 1
        if drafter.max_drafts > most:
            what = f"the caches were made for drafts of at most {most} tokens, not {drafter.max_drafts}"
            raise UsageError(what, where="draft_tokens", do="ask for fewer")
        return drafter

    def why_not(self, method: MethodOptions, rule: AcceptanceRule) -> str | None:
        """Why rounds do not run on fixed buffers, in a line; None if they do."""
        return no_graphs(self.options, self.device, self.cache.spec, self.found.network, method, rule)

    def graphs(self, drafter: Drafter, rule: AcceptanceRule, drafts: int) -> Graphs:
        """Rounds on fixed buffers, of a drafter of these weights that proposes so many tokens."""
        case = rule.case()
        assert case is not None, "see why_not"
        self.kernels.choose("verify", verify.Facts(self.device.type, self.dtype))  # or is refused, before a first token
        return Graphs(
            self.found.model,
            self.cache,
            drafter,
            self.kernels,
            case,
            drafts=drafts,
            requests=self.options.max_batch,
            longest=self.plan.longest,
            device=self.device,
            pool=self._graph_pool,
        )

    @cached_property
    def _graph_pool(self) -> Any:
        """The memory of all recordings."""
        return torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @property
    def prefix_drafter(self) -> Drafter:
        """The drafter as a keeper of prefixes, which no context method touches."""
        if self._prefix_drafter is None:
            self._prefix_drafter = self.drafter(MethodOptions(context=WHOLE, block_length=self._block_length))
        return self._prefix_drafter

    @contextmanager
    def opened(
        self, request: int, drafter: Drafter, prefix: Prefix | None, longest: int | None = None
    ) -> Iterator[None]:
        """A request of at most ``longest`` tokens in the caches of target and drafter, from nothing or from a prefix;
        its pages are freed after."""
        try:
            if prefix is None:
                self.cache.open(request)
                drafter.open(request, longest)
            else:
                self.cache.fork(prefix.request, request)
                drafter.fork(prefix.request, request, prefix.token_ids, longest)
            yield
        finally:
            self.close(request, drafter)

    def close(self, request: int, drafter: Drafter) -> None:
        """Free what the request holds, if anything: it may have failed before it was wholly open."""
        self.cache.close(request)
        drafter.close(request)

    def filler(self, drafter: Drafter) -> Callable[[int, Sequence[int]], None] | None:
        """What gives an open request a past that is made up, always the same; None where weights are no dummies."""
        if not self.found.dummy:
            return None

        def make_up(request: int, tokens: Sequence[int]) -> None:
            fill(request, tokens, cache=self.cache, drafter=drafter, numbers=Numbers(self.device))

        return make_up

    def run_prompt(self, request: int, prompt: Sequence[int], drafter: Drafter, mark: Mark = unmarked) -> torch.Tensor:
        """Prefill an open request, of dummies its last token alone; the logits [1, vocabulary] of that."""
        progress, filler, first = self.progress, self.filler(drafter), 0
        if filler is not None:
            first = len(prompt) - 1
            filler(request, prompt[:first])
        return prefill(
            request,
            prompt,
            model=self.found.model,
            cache=self.cache,
            drafter=drafter,
            chunk=self.chunk,
            device=self.device,
            first=first,
            progress=None if progress is None else lambda done, total: progress("prefill", done, total),
            mark=mark,
        )

    def prefill(self, prompt: tuple[int, ...]) -> Prefix:
        """Prefill a prompt and keep it."""
        self.check_room(prompt)
        with self.turn:
            clock = waiting(self.device)
            start, watch = clock(), Stopwatch(clock)
            request, drafter = self.new_id(), self.prefix_drafter
            try:
                self.cache.open(request)
                drafter.open_prefix(request)
                logits = self.run_prompt(request, prompt, drafter, watch)
            except BaseException:
                self.close(request, drafter)
                raise
            return Prefix(prompt, logits, clock() - start, watch.seconds["draft"], request, self)


def no_graphs(
    options: EngineOptions,
    device: torch.device,
    spec: TargetSpec,
    network: DrafterNetwork | None,
    method: MethodOptions,
    rule: AcceptanceRule,
) -> str | None:
    """Why rounds of a pair do not run on fixed buffers (``schedule/graphs.py``), in a line; None if they do."""
    if options.graphs == "off":
        return "switched off (--graphs off)"
    if options.graphs == "auto" and device.type == "cpu":
        return "a CPU records no rounds"
    return why_not(spec, network, method, rule)


def choose_operators(
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    held: torch.dtype,
    spec: TargetSpec | None = None,
) -> None:
    """Let every operator choose now what a target with this cache runs on (None: one like most). An operator would
    choose when it first runs, but that may compile, which belongs to loading and not to the first token's time."""
    for pair in ((64, 64),) if spec is None else spec.widths:
        kernels.choose("multi_read_attention", multi_read_attention.Facts(device.type, dtype, *pair))
    if spec is not None and spec.recurrent:
        kernels.choose("gated_delta", gated_delta.Facts(device.type, dtype))
    packed = linear.Facts(device.type, dtype, held, packed=True)
    kernels.choose("linear", packed._replace(packed=kernels.compiles("linear", packed)))
    kernels.choose("gate_mul", gate_mul.Facts(device.type, dtype))
    kernels.choose("rms_norm", rms_norm.Facts(device.type, dtype))
    kernels.choose("rotate_append", rotate_append.Facts(device.type, dtype, dtype))
    if device.type != "cpu":  # there each rule judges by itself
        kernels.choose("verify", verify.Facts(device.type, dtype))


def filled_in(method: MethodOptions, found: FoundPair) -> MethodOptions:
    """The method with what is left to a pair taken from it, or from FOLD's own where the registry does not know it.
    Raises :class:`UsageError` for what the pair's drafter cannot do."""
    network = found.network if method.drafter is None and method.draft_tokens != 0 else None
    context, drafts = method.context, method.draft_tokens
    if network is not None and not network.reads_context:
        context = context or WHOLE
        if context != WHOLE:
            what = f"{network.facts.where} reads its whole context: it has no use for the method {context!r}"
            raise UsageError(what, where="context", do=f"leave it out, or use {WHOLE}")
    if network is not None and network.block is None and drafts is None:
        drafts = found.entry.block if found.entry is not None and found.entry.block else DRAFTS
    context = context or CONTEXT
    entry, coverage = found.entry, coverage_of(context)
    if entry and coverage == "all":
        coverage = entry.coverage
    if method.confidence_stop and not (found.network and found.network.confident and method.drafter is None):
        raise UsageError("the drafter has no confidence head", where="confidence_stop", do="leave it out")
    method = dataclasses.replace(
        _with_effort(method, network, entry),
        context=context,
        draft_tokens=drafts,
        window=method.window or (entry.window if entry else None) or WINDOW,
        alpha=float(method.alpha or (entry.alpha if entry else None) or ALPHA),
        coverage=method.coverage or coverage,
        yarn_ref=method.yarn_ref or (entry.yarn_reference if entry else None) or YARN_REF,
    )
    return method if network is None else network.filled(method)


def _with_effort(method: MethodOptions, network: DrafterNetwork | None, entry: Pair | None) -> MethodOptions:
    """The method with the pair's own effort where it gives none, and the order and the ``q_mode`` that run. Raises
    :class:`UsageError` for an effort that means nothing to the drafter; to plain decoding none does, and any goes."""
    takes, effort = network.efforts if network else frozenset(), method.effort
    for name in ("steps", "confidence", "entropy_bound", "order"):
        value = getattr(method, name)
        if value is not None and name not in takes and (name, value) != ("steps", 1) and method.draft_tokens != 0:
            what = network.no_effort if network else "is for a drafter with a network"
            raise UsageError(what, where=name, do="leave it out")
    if network is None or not takes:
        return method
    if entry is not None and not effort.thresholded:
        left = takes & ({"steps", "order"} if effort.steps or effort.order else set(vars(entry.effort)))
        own = {name: vars(entry.effort)[name] for name in left if getattr(effort, name) is None}
        effort = dataclasses.replace(effort, **own)
    if "order" in takes:
        effort = effort.filled(network.order).settled(drawn=method.draft_temperature > 0)
    return dataclasses.replace(method, **vars(effort))


def pick_device(name: str) -> torch.device:
    """Raises :class:`ResourceError` if a GPU is asked for and there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ResourceError(f"there are {count} GPUs here", where=f"--device {name}", do="use --device cpu")
    return device


def pick_context(wanted: int | None, found: FoundPair) -> int:
    """Tokens that a request may hold. Raises :class:`UsageError` for more than the target declares."""
    limit = found.model.max_positions
    if wanted is not None and wanted > limit:
        what = f"the target holds {limit} positions, not {wanted}"
        raise UsageError(what, where="--max-context", do=f"use {limit} at most, or leave it out")
    return wanted or limit


def pick_dtype(name: str, device: torch.device, found: FoundPair) -> torch.dtype:
    """``auto`` is float32 on a CPU, where bf16 arithmetic makes verification slower than the tokens it saves, and the
    checkpoint's own dtype on a GPU. Raises :class:`CheckpointError` if that is no float that foldspec runs in."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else found.target.config.dtype
        if name not in ("float32", "bfloat16", "float16"):
            raise found.target.config.error(f"dtype {name!r} is not supported", do="choose one with --dtype")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
