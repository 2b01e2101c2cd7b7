"""The façade: load a pair once, then generate with any context method and rule over the same weights and pools."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast, overload

from foldspec import forcing
from foldspec.acceptance import make_rule
from foldspec.acceptance.on_device import OnDevice
from foldspec.acceptance.recorded import Judged, Recorded
from foldspec.context import make_method
from foldspec.drafters import MODEL_FREE
from foldspec.errors import FoldspecError, ResourceError, UsageError
from foldspec.generation import Generation, pieces
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import Progress, find_pair, load_pair
from foldspec.memory import MemoryPlan
from foldspec.noise import Noise
from foldspec.options import CONTEXT, EngineOptions, MethodOptions, SamplingParams
from foldspec.records import Completion, Piece
from foldspec.report import environment
from foldspec.resources import Prefix, Resources, choose_operators, filled_in, pick_device
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Rounds
from foldspec.schedule.scheduler import Origin, Scheduler
from foldspec.schedule.trace import Mark
from foldspec.text.chat import ChatTemplate, need_template
from foldspec.text.stream import TextStream
from foldspec.text.tokenizer import Tokenizer

__all__ = ["Engine", "Generation", "Prefix", "cache_folder", "forced", "split_options"]

Messages: TypeAlias = Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | Sequence[int] | Messages  # text, token ids, or chat messages


class Engine:
    """A target, its drafter and their caches, with one way of running a round. Make one with :meth:`load`."""

    def __init__(self, resources: Resources, method: MethodOptions) -> None:
        self._resources = resources
        self._asked = method  # what is left to pair and method is filled in anew for each
        self.method = filled_in(method, resources.found)
        how = forced(self.method, resources.found.entry.name if resources.found.entry else None)
        self._rule = make_rule(self.method.accept, how, **self.method.rule_options)
        self._deciding = self._rule
        if resources.device.type != "cpu" and self._rule.case() is not None:
            self._deciding = OnDevice(self._rule, resources.kernels.verify)
        self._drafter = resources.drafter(self.method)
        self._rounds = Rounds(
            resources.found.model,
            resources.cache,
            self._drafter,
            self._deciding,
            device=resources.device,
            draft_tokens=self.method.draft_tokens,
        )
        self._rounds.check_drafts(0 if how is None else how.least_drafts)
        self._why_not = resources.why_not(self.method, self._rule)
        if self._why_not is None:
            self._rounds.graphs = resources.graphs(self._drafter, self._rule, self._rounds.max_drafts)
        progress = resources.progress
        self.scheduler = Scheduler(
            self._rounds,
            max_batch=resources.options.max_batch,
            budget=resources.budget,
            chunk=resources.chunk,
            turn=resources.turn,
            prefilling=None if progress is None else lambda done, total: progress("prefill", done, total),
            fill=resources.filler(self._drafter),
            debug=resources.check_caches if resources.options.debug else None,
        )

    @classmethod
    def load(
        cls,
        pair: str | None = None,
        *,
        target: str | None = None,
        drafter: str | None = None,
        progress: Progress | None = None,
        planned: Callable[[MemoryPlan], None] | None = None,
        **options: Any,
    ) -> Engine:
        """Load a pair of ``checkpoints.yaml``, or a target and a drafter (folders, hub ids or embedded names;
        ``"none"``: no drafter; ``"lookup"``: prompt lookup, which has no weights).

        ``options`` are the fields of :class:`EngineOptions` and :class:`MethodOptions`. ``progress(stage, done,
        total)`` hears of downloads, conversion, loading and prefill, ``planned`` of the memory plan before anything is
        allocated. Raises the kinds of :class:`FoldspecError`.
        """
        engine_options, method = split_options(options)
        if drafter in MODEL_FREE:
            method = dataclasses.replace(method, drafter=drafter)
        kernels, device = Kernels.of(engine_options), pick_device(engine_options.device)
        make_rule(method.accept, **method.rule_options)  # a wrong name is said before the weights are read
        make_method(method, (), 1)
        found = find_pair(pair, target, drafter, options=engine_options, kernels=kernels, progress=progress)
        resources = Resources(
            found, engine_options, kernels, device, progress, filled_in(method, found), planned=planned
        )
        load_pair(
            found,
            dtype=resources.dtype,
            device=device,
            weights=engine_options.weights,
            kernels=kernels,
            progress=progress,
        )
        held = found.model.head_weight.dtype
        choose_operators(kernels, device, resources.dtype, held, resources.cache.spec)
        return cls(resources, method)

    def using(self, **changes: Any) -> Engine:
        """An engine over the same weights and pools with other fields of :class:`MethodOptions`.

        ``draft_tokens=0`` is plain decoding, ``drafter="lookup"`` prompt lookup in place of the pair's own drafter.
        """
        known = {f.name for f in dataclasses.fields(MethodOptions)}
        for name in changes:
            if name not in known:
                raise UsageError(f"unknown option {name!r}", do=f"known: {', '.join(sorted(known))}")
        return Engine(self._resources, self._asked.changed(**changes))

    @property
    def resources(self) -> Resources:
        """What this engine shares with others over the same weights, for measurements that need more than a façade."""
        return self._resources

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer, if it has one."""
        return self._resources.found.tokenizer

    @property
    def chats(self) -> bool:
        """Whether text is best put through the chat template: there is one, and the registry does not say otherwise."""
        found = self._resources.found
        return found.template is not None and found.tokenizer is not None and (found.entry is None or found.entry.chat)

    @property
    def lossless(self) -> bool:
        """Whether output follows the target's own law, whatever the temperature: by the rule, if drafts follow the laws
        that it takes them to have, or because nothing is drafted. Dummy weights have no law."""
        by_rule = self._rule.lossless and not self._biased
        return (by_rule or self._drafter.max_drafts == 0) and not self._resources.found.dummy

    @property
    def _biased(self) -> str:
        """Why drafts mislead the rule; empty if they do not."""
        return self._drafter.biased if self._rule.uses_q else ""

    @property
    def law(self) -> str:
        """The law that output follows, in words."""
        if self._resources.found.dummy:
            return "none: its weights are made up"
        if not self._drafter.max_drafts:
            return "the target's own: nothing is drafted"
        if not self._biased:
            return self._rule.law()
        also = "" if self._rule.lossless else f"; besides, {self._rule.law()}"
        return f"not the target's, if it is sampled from: {self._biased}{also}"

    @property
    def made_up(self) -> str:
        """What is not real of a run, in words: dummy weights, forced acceptance; empty as a rule. Outputs then mean
        nothing: there is no text, and nothing is compared."""
        options, words = self._resources.options, []
        if self._resources.found.dummy:
            words.append("dummy weights")
            if options.dummy_layers is not None:
                words[0] += f" of {self._resources.found.model.layer_count} layers"
        if self.method.force_accept is not None and self._drafter.max_drafts:
            words.append(f"forced acceptance {self.method.force_accept}")
        return ", ".join(words)

    @property
    def template(self) -> ChatTemplate | None:
        """The target's chat template, if it has one."""
        return self._resources.found.template

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids at which the checkpoint itself ends a text."""
        return self._resources.found.stop_ids

    @property
    def vocabulary(self) -> int:
        """The number of the target's ids."""
        return self._resources.found.model.vocabulary

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output that a request may hold."""
        return self._resources.max_context

    @property
    def drafts(self) -> int:
        """Drafts that a round verifies at most."""
        return self._rounds.max_drafts

    def bytes_read(self, n: int) -> int:
        """Bytes of weights and of cached keys and values that a round reads after ``n`` entries, each counted once."""
        resources = self._resources
        return resources.found.model.bytes_read + resources.cache.spec.bytes_read(n) + self._drafter.bytes_read(n)

    @property
    def graphs(self) -> dict[str, Any]:
        """Whether rounds run on fixed buffers (on a GPU: recorded); why not, in a line, where that cannot be."""
        option, ran = self._resources.options.graphs, self._rounds.graphs
        failed = ran.failed if ran is not None else ""
        return {"asked": option, "runs": ran is not None and not failed, "why_not": failed or self._why_not}

    def listen(self, mark: Mark) -> None:
        """Let ``mark`` hear of the end of each part of a round (``schedule/trace.py``)."""
        self._rounds.mark = mark

    def record(self, hear: Callable[[Judged], None] | None) -> None:
        """Let ``hear`` know how each round's drafts were judged (``acceptance/recorded.py``), which takes its time;
        None: nobody."""
        self._rounds.rule = self._deciding if hear is None else Recorded(self._deciding, hear)

    def encode(self, prompt: Prompt, **switches: Any) -> tuple[int, ...]:
        """Ids of a prompt: of text as it stands, of messages through the chat template (``switches`` are its
        variables). Raises :class:`UsageError` for an empty prompt or an id that the target does not have."""
        found, folder = self._resources.found, str(self._resources.found.target.folder)
        words = isinstance(prompt, str) or _are_messages(prompt)
        tokenizer = cast(Tokenizer, found.tokenizer)  # for ids, which need none, it may be missing
        if words and found.tokenizer is None:
            what = "dummy weights come without a tokenizer" if found.dummy else "the target has no tokenizer.json"
            raise UsageError(what, where=folder, do="give the prompt as token ids")
        ids: list[Any]
        if isinstance(prompt, str):
            ids = tokenizer.encode_prompt(prompt)
        elif words:
            messages = cast(Messages, prompt)
            ids = tokenizer.encode(need_template(found.template, folder).render(messages, **switches), special=False)
        else:
            ids = list(prompt)
        if not ids:
            raise UsageError("is empty", where="prompt", do="give at least one token")
        self._check_ids(ids, "prompt")
        return tuple(ids)

    def _check_ids(self, ids: Sequence[Any], where: str) -> None:
        vocabulary = self._resources.found.model.vocabulary
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocabulary:
                raise UsageError(f"{i!r} is not one of the target's {vocabulary} ids", where=where)

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids(params.stop_ids, "stop_ids")
        if params.stop and self.method.force_accept is not None:
            raise UsageError("stop strings need a text, which forced acceptance does not give", where="stop")
        if params.stop and self.tokenizer is None:
            folder = str(self._resources.found.target.folder)
            raise UsageError("stop strings need a tokenizer.json, which is not there", where=folder, do="use stop ids")
        if params.logprobs is not None and params.logprobs > self.vocabulary:
            raise UsageError(f"the target has {self.vocabulary} ids, not {params.logprobs}", where="logprobs")

    def prefill(self, prompt: Prompt) -> Prefix:
        """Run a prompt once and keep it: any engine over the same weights generates from it.

        Hold few of these, and close them: each keeps its pages.
        """
        return self._resources.prefill(self.encode(prompt))

    @overload
    def generate(self, prompt: Prompt | Prefix, params: SamplingParams | None = None) -> Completion: ...

    @overload
    def generate(
        self, prompt: list[Prompt | Prefix], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]: ...

    def generate(self, prompt: Any, params: Any = None) -> Completion | list[Completion]:
        """The completion of one prompt (text, ids, messages or a :class:`Prefix`), or of each of a list of prompts, in
        their order, as :meth:`completions` runs them. What is wrong with a single prompt is raised."""
        if isinstance(prompt, (str, Prefix)) or _are_messages(prompt) or (prompt and isinstance(prompt[0], int)):
            return self.stream(prompt, params).finish()
        done = dict(self.completions(prompt, params))
        return [done[i] for i in range(len(done))]

    def completions(
        self, prompts: Sequence[Prompt | Prefix], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, Completion]]:
        """(index, completion) of each prompt as it completes; ``max_batch`` of them run at a time. ``params`` are for
        all, or one for each. A request that fails has the finish reason ``error``, and the others go on. Who stops
        iterating cancels what is left."""
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else params
        running: dict[int, Generation] = {}
        try:
            for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
                try:
                    running[i] = self.stream(prompt, own)
                    running[i].submit()
                except FoldspecError as error:
                    running.pop(i, None)
                    yield i, Completion((), finish_reason="error", error=error)
            while running:
                for i in [i for i, generation in running.items() if generation.over]:
                    generation = running.pop(i)
                    with contextlib.suppress(FoldspecError):  # the completion has it
                        generation.finish()
                    yield i, generation.completion
                if not self.scheduler.idle:
                    self.scheduler.step()
        finally:
            for generation in running.values():
                generation.close()

    def astream(self, prompt: Prompt | Prefix, params: SamplingParams | None = None) -> AsyncIterator[Piece]:
        """:meth:`stream` for asynchronous callers: steps run in a thread of their own, any number of streams share
        them. Whoever leaves the loop, or is cancelled in it, cancels the request."""
        return pieces(self.stream(prompt, params), self._resources.worker)

    def stream(self, prompt: Prompt | Prefix, params: SamplingParams | None = None) -> Generation:
        """Generate piece by piece. Whatever is wrong with the prompt is raised here. The request begins with the first
        piece that is asked for; each piece runs the steps that it needs, of which other open requests have their part.
        """
        params, resources = params or SamplingParams(), self._resources
        prefix = prompt if isinstance(prompt, Prefix) else None
        if isinstance(prompt, Prefix):
            prompt.check(resources)
            ids = prompt.token_ids
        else:
            ids = self.encode(prompt)
            resources.check_room(ids)
        self._check_params(params)
        stops = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else resources.found.stop_ids)
        if params.min_tokens and len(stops) == self.vocabulary:
            raise UsageError("every id is a stop id", where="min_tokens", do="leave it out, or give fewer stop ids")
        self._check_ids([token for token, _ in params.logit_bias], "logit_bias")
        limit = min(params.max_tokens, resources.max_context - len(ids))
        # at temperature 0 a lossless rule lets no chance into the text: only drafts may be drawn, and any seed will do
        params = params.seeded(chance=not self._rule.lossless and self.method.force_accept is None)
        noise = Noise(params.seed or 0)
        text = TextStream(None if self.made_up else self.tokenizer, params.stop)
        request = Request(resources.new_id(), ids, limit, stops, params, text, noise)
        self.scheduler.check_size(request)
        origin = None if prefix is None else Origin(prefix.request, prefix.logits, prefix.seconds)
        return Generation(self.scheduler, request, origin)

    def settings(self) -> dict[str, Any]:
        """How this engine runs, for a report: names, revisions, options."""
        resources = self._resources
        found = resources.found
        return {
            "pair": found.entry.name if found.entry else None,
            "target": found.target.source,
            **dataclasses.asdict(self.method),
            "drafter": self._drafter_source(),
            "device": str(resources.device),
            "dtype": str(resources.dtype).removeprefix("torch."),
            "weights": str(found.model.head_weight.dtype).removeprefix("torch."),
            "law": self.law,
            "lossless": self.lossless,
            "made_up": self.made_up,
            "load_format": resources.options.load_format,
            "dummy_layers": resources.options.dummy_layers,
            "max_context": resources.max_context,
            "prefill_chunk": resources.chunk,
            "prefill_budget": resources.budget,
            "max_batch": resources.options.max_batch,
            "cache_tokens": resources.options.cache_tokens,
            "page_size": resources.options.page_size,
            "graphs": self.graphs,
        }

    def _drafter_source(self) -> dict[str, str | None] | None:
        """The drafter that runs; None for plain decoding."""
        own = self._resources.found.drafter
        if self.method.draft_tokens == 0:
            return None
        if self.method.drafter is not None:
            return {"name": self.method.drafter, "revision": None}
        return own.source if own else None

    def env(self) -> dict[str, Any]:
        """Where this engine runs: versions, device, threads, and the kernels that were chosen."""
        return environment(self._resources.device, self._resources.kernels)

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should be told about how this engine runs, a line each."""
        own: tuple[str, ...] = ()
        if self.method.prefix_cache == "approximate":
            own = ("the drafter's prefix is approximate: computed once a round, beside a canvas of masks",)
        if self.method.q_mode != self._asked.q_mode:
            what = f"with the order {self.method.order} the drawn tokens decide which step is the last"
            own = (*own, f"q_mode {self._asked.q_mode} became {self.method.q_mode}: {what}")
        if self._rounds.graphs is not None and self._rounds.graphs.failed:
            own = (*own, f"rounds run in the ordinary loop: {self._rounds.graphs.failed}")
        return (*self._resources.found.notices, *self._resources.kernels.notices, *own)

    def close(self) -> None:
        """Cancel what runs, and let go of weights and caches. Other engines over them, made by :meth:`using`, keep them
        alive."""
        self.scheduler.clear()
        del self._resources, self._rounds, self._drafter, self.scheduler

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def forced(method: MethodOptions, pair: str | None) -> forcing.Forcing | None:
    """How acceptance is forced. Raises :class:`UsageError` where a paper's figure is asked for that there is not."""
    if method.force_accept is None or method.draft_tokens == 0:
        return None
    return forcing.parse(method.force_accept) or forcing.published(pair, method.drafter or method.context or CONTEXT)


def _are_messages(prompt: Any) -> bool:
    return not isinstance(prompt, (str, Prefix)) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def split_options(options: dict[str, Any]) -> tuple[EngineOptions, MethodOptions]:
    """Sort keyword options into the two dataclasses. Raises :class:`UsageError` for a name that neither has."""
    engine, method = ({f.name for f in dataclasses.fields(kind)} for kind in (EngineOptions, MethodOptions))
    for name in options:
        if name not in engine | method:
            raise UsageError(f"unknown option {name!r}", do=f"known: {', '.join(sorted(engine | method))}")
    surroundings = {
        "cache_dir": cache_folder(),
        "compiler": os.environ.get("CXX") or None,
        "nvcc": str(Path(os.environ["CUDA_HOME"], "bin", "nvcc")) if os.environ.get("CUDA_HOME") else None,
        "debug": bool(os.environ.get("FOLDSPEC_DEBUG")),
    }
    chosen: dict[str, Any] = surroundings | {k: v for k, v in options.items() if k in engine}
    return EngineOptions(**chosen), MethodOptions(**{k: v for k, v in options.items() if k in method})


def cache_folder() -> Path:
    """Where prepared checkpoints and compiled kernels are kept: FOLDSPEC_CACHE, else foldspec in the user's cache."""
    if os.environ.get("FOLDSPEC_CACHE"):
        return Path(os.environ["FOLDSPEC_CACHE"])
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foldspec"
    except RuntimeError:
        raise ResourceError("there is no home folder to keep a cache in", do="set FOLDSPEC_CACHE to a folder") from None
