"""The façade: load a pair once, then generate with any context method and rule over the same weights and pools."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast, overload

from foldspec.acceptance import make_rule
from foldspec.context import make_method
from foldspec.drafters import MODEL_FREE
from foldspec.errors import ResourceError, UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.loading import Progress, find_pair, load_pair
from foldspec.noise import Noise
from foldspec.options import EngineOptions, MethodOptions, SamplingParams
from foldspec.records import Completion, Piece
from foldspec.report import environment
from foldspec.resources import Prefix, Resources, choose_operators, pick_device
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Rounds
from foldspec.schedule.trace import Mark
from foldspec.text.chat import ChatTemplate, need_template
from foldspec.text.stream import TextStream
from foldspec.text.tokenizer import Tokenizer

__all__ = ["Engine", "Generation", "Prefix", "cache_folder", "split_options"]

Messages: TypeAlias = Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | Sequence[int] | Messages  # text, token ids, or chat messages

WINDOW, ALPHA = 2048, 2.0  # FOLD's own, for a pair that the registry does not know


class Engine:
    """A target, its drafter and their caches, with one way of running a round. Make one with :meth:`load`."""

    def __init__(self, resources: Resources, method: MethodOptions) -> None:
        self._resources = resources
        entry = resources.found.entry
        self.method = dataclasses.replace(
            method,
            window=method.window or (entry.window if entry else None) or WINDOW,
            alpha=float(method.alpha or (entry.alpha if entry else None) or ALPHA),
            coverage=method.coverage or (entry.coverage if entry else "all"),
        )
        self._rule = make_rule(self.method.accept)
        self._drafter = resources.drafter(self.method)
        self._rounds = Rounds(
            resources.found.model,
            resources.cache,
            self._drafter,
            self._rule,
            device=resources.device,
            draft_tokens=self.method.draft_tokens,
        )

    @classmethod
    def load(
        cls,
        pair: str | None = None,
        *,
        target: str | None = None,
        drafter: str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Engine:
        """Load a pair of ``checkpoints.yaml``, or a target and a drafter (folders or hub ids; ``"none"``: no drafter;
        ``"lookup"``: prompt lookup, which has no weights).

        ``options`` are the fields of :class:`EngineOptions` and :class:`MethodOptions`. ``progress(stage, done,
        total)`` hears of downloads, conversion, loading and prefill. Raises the kinds of :class:`FoldspecError`.
        """
        engine_options, method = split_options(options)
        if drafter in MODEL_FREE:
            method = dataclasses.replace(method, drafter=drafter)
        kernels, device = Kernels.of(engine_options), pick_device(engine_options.device)
        make_rule(method.accept)  # a wrong name is said before the weights are read
        make_method(method, (), 1)
        found = find_pair(pair, target, drafter, options=engine_options, kernels=kernels, progress=progress)
        resources = Resources(found, engine_options, kernels, device, progress)
        load_pair(
            found,
            dtype=resources.dtype,
            device=device,
            weights=engine_options.weights,
            kernels=kernels,
            progress=progress,
        )
        spec = found.model.cache_spec(resources.dtype)
        choose_operators(
            kernels, device, resources.dtype, found.model.head_weight.dtype, (spec.key_width, spec.value_width)
        )
        return cls(resources, method)

    def using(self, **changes: Any) -> Engine:
        """An engine over the same weights and pools with other fields of :class:`MethodOptions`.

        ``draft_tokens=0`` is plain decoding, ``drafter="lookup"`` prompt lookup in place of the pair's own drafter.
        """
        known = {f.name for f in dataclasses.fields(MethodOptions)}
        for name in changes:
            if name not in known:
                raise UsageError(f"unknown option {name!r}", do=f"known: {', '.join(sorted(known))}")
        return Engine(self._resources, dataclasses.replace(self.method, **changes))

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
        """Whether output follows the target's own law."""
        return self._rule.lossless

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

    def bytes_read(self, n: int) -> int:
        """Bytes of weights and of cached keys and values that a round reads after ``n`` entries, each counted once.
        Embedding tables count where they are the head as well."""
        model, spec = self._resources.found.model, self._resources.cache.spec
        weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
        names = [name for name, p in model.named_parameters() if p is model.head_weight]
        if any("embed_tokens" in name for name in names):
            weights += model.head_weight.nbytes
        return weights + n * spec.bytes_per_entry + self._drafter.bytes_read(n)

    def listen(self, mark: Mark) -> None:
        """Let ``mark`` hear of the end of each part of a round (``schedule/trace.py``)."""
        self._rounds.mark = mark

    def encode(self, prompt: Prompt, **switches: Any) -> tuple[int, ...]:
        """Ids of a prompt: of text as it stands, of messages through the chat template (``switches`` are its
        variables). Raises :class:`UsageError` for an empty prompt or an id that the target does not have."""
        found, folder = self._resources.found, str(self._resources.found.target.folder)
        words = isinstance(prompt, str) or _are_messages(prompt)
        tokenizer = cast(Tokenizer, found.tokenizer)  # for ids, which need none, it may be missing
        if words and tokenizer is None:
            raise UsageError("the target has no tokenizer.json", where=folder, do="give the prompt as token ids")
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

    def prefill(self, prompt: Prompt) -> Prefix:
        """Run a prompt once and keep it: any engine over the same weights generates from it.

        Hold few of these, and close them: each keeps its pages.
        """
        return self._resources.prefill(self.encode(prompt))

    @overload
    def generate(self, prompt: Prompt | Prefix, params: SamplingParams | None = None) -> Completion: ...

    @overload
    def generate(self, prompt: list[Prompt], params: SamplingParams | None = None) -> list[Completion]: ...

    def generate(self, prompt: Any, params: SamplingParams | None = None) -> Completion | list[Completion]:
        """The completion of one prompt (text, ids, messages or a :class:`Prefix`), or of each of a list of prompts."""
        if isinstance(prompt, (str, Prefix)) or _are_messages(prompt) or (prompt and isinstance(prompt[0], int)):
            return self.stream(prompt, params).finish()
        return [self.stream(each, params).finish() for each in prompt]

    def stream(self, prompt: Prompt | Prefix, params: SamplingParams | None = None) -> Generation:
        """Generate piece by piece. Whatever is wrong with the prompt is raised here."""
        params, resources = params or SamplingParams(), self._resources
        prefix = prompt if isinstance(prompt, Prefix) else None
        if isinstance(prompt, Prefix):
            prompt.check(resources)
            ids = prompt.token_ids
        else:
            ids = self.encode(prompt)
            resources.check_room(ids)
        self._check_ids(params.stop_ids, "stop_ids")
        stops = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else resources.found.stop_ids)
        self._check_ids([token for token, _ in params.logit_bias], "logit_bias")
        limit = min(params.max_tokens, resources.max_context - len(ids))
        params = params.seeded()
        noise = Noise(params.seed or 0)  # at temperature 0 only drafts may be drawn, and a fixed seed will do
        return Generation(self, Request(resources.new_id(), ids, limit, stops, params=params, noise=noise), prefix)

    def _run(self, request: Request, prefix: Prefix | None, completion: Completion) -> Iterator[tuple[int, ...]]:
        """Committed ids, commit by commit. The clock stands still outside, so that a slow reader costs no speed."""
        resources = self._resources
        if request.limit == 0:
            request.finish_reason = "length"
            return
        clock = -time.perf_counter()  # seconds on the clock, less the time at which it was last started
        with resources.opened(request.id, self._drafter, prefix):
            if prefix is None:
                logits = resources.run_prompt(request.id, request.prompt, self._drafter)
            else:
                logits, clock = prefix.logits, clock + prefix.seconds  # as if the prompt had just been run
            committed = request.commit([self._rule.first(logits, request, request.noise)])
            completion.first_time = completion.last_time = clock + time.perf_counter()
            while True:
                clock += time.perf_counter()
                yield committed
                clock -= time.perf_counter()
                if request.done:
                    return
                committed = self._rounds.round([request])[0].committed
                completion.last_time = clock + time.perf_counter()

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
            "law": self._rule.law(),
            "max_context": resources.max_context,
            "prefill_chunk": resources.chunk,
            "page_size": resources.options.page_size,
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
        return self._resources.kernels.notices

    def close(self) -> None:
        """Let go of weights and caches. Other engines over them, made by :meth:`using`, keep them alive."""
        del self._resources, self._rounds, self._drafter

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Generation(Iterator[Piece]):
    """The pieces of one request as they are committed; ``completion`` grows with them.

    Iterate, or call :meth:`finish` for the rest at once. :meth:`close` cancels: pages are freed, and what was generated
    stays in ``completion``, whose finish reason is then ``cancelled``.
    """

    def __init__(self, engine: Engine, request: Request, prefix: Prefix | None) -> None:
        self.completion = Completion(prompt_ids=request.prompt, rounds=request.rounds, seed=request.params.seed)
        self._request = request
        self._tokenizer, self._text = engine.tokenizer, TextStream(engine.tokenizer)
        self._runs = engine._run(request, prefix, self.completion)

    def __next__(self) -> Piece:
        done, request = self.completion, self._request
        try:
            committed = next(self._runs)
        except StopIteration:
            done.finish_reason = request.finish_reason
            raise
        text = self._text.push(committed)
        if request.done:
            text += self._text.finish()
        done.token_ids, done.text, done.finish_reason = tuple(request.output), done.text + text, request.finish_reason
        return Piece(text, committed)

    def finish(self) -> Completion:
        """Generate what is left and return the completion."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """Cancel the request, unless it has ended."""
        self._runs.close()  # type: ignore[attr-defined]
        done, request = self.completion, self._request
        if not request.done:
            request.finish_reason = "cancelled"
        done.token_ids, done.finish_reason = tuple(request.output), request.finish_reason
        if self._tokenizer is not None:  # an interrupt may come between a commit and its text, so that is made anew
            done.text = self._tokenizer.decode(request.output)


def _are_messages(prompt: Any) -> bool:
    return not isinstance(prompt, (str, Prefix)) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def split_options(options: dict[str, Any]) -> tuple[EngineOptions, MethodOptions]:
    """Sort keyword options into the two dataclasses. Raises :class:`UsageError` for a name that neither has."""
    engine, method = ({f.name for f in dataclasses.fields(kind)} for kind in (EngineOptions, MethodOptions))
    for name in options:
        if name not in engine | method:
            raise UsageError(f"unknown option {name!r}", do=f"known: {', '.join(sorted(engine | method))}")
    surroundings = {"cache_dir": cache_folder(), "compiler": os.environ.get("CXX") or None}
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
