"""The façade: load a pair once, then generate with any context method and rule over the same weights and pools."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, overload

import torch

from foldspec.acceptance import make_rule
from foldspec.cache.paged import PagedCache
from foldspec.cache.side import DraftCache
from foldspec.context import make_method
from foldspec.context.reader import ContextReader
from foldspec.drafters.base import Drafter, NoDrafter
from foldspec.errors import ResourceError, UsageError
from foldspec.kernels.dispatch import Kernels
from foldspec.kernels.multi_read_attention import Facts
from foldspec.loading import FoundPair, Progress, find_pair, load_pair
from foldspec.options import EngineOptions, MethodOptions, SamplingParams
from foldspec.records import Completion, Piece, PointMass
from foldspec.schedule.prefill import prefill
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Rounds
from foldspec.text.chat import need_template
from foldspec.text.stream import TextStream

__all__ = ["Engine", "Generation", "Prefix"]

Messages: TypeAlias = Sequence[Mapping[str, str]]
Prompt: TypeAlias = "str | Sequence[int] | Messages | Prefix"

WINDOW, ALPHA = 2048, 2.0  # FOLD's own, for a pair that the registry does not know
REQUESTS = 2  # full-length requests that the pools hold: one kept prefix, and one that runs


class Engine:
    """A target, its drafter and their caches, with one way of running a round. Make one with :meth:`load`."""

    def __init__(self, shared: _Shared, method: MethodOptions) -> None:
        self._shared = shared
        entry = shared.found.entry
        self.method = dataclasses.replace(
            method,
            window=method.window or (entry.window if entry else None) or WINDOW,
            alpha=method.alpha or (entry.alpha if entry else None) or ALPHA,
        )
        self._rule = make_rule(self.method.accept)
        self._drafter = shared.drafter(self.method)
        self._rounds = Rounds(
            shared.found.model,
            shared.cache,
            self._drafter,
            self._rule,
            device=shared.device,
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
        """Load a pair of ``checkpoints.yaml``, or a target and a drafter (folders or hub ids; ``"none"``: plain decoding).

        ``options`` are the fields of :class:`EngineOptions` and :class:`MethodOptions`. ``progress(stage, done, total)``
        is told about downloads, conversion, loading and prefill. Raises the kinds of :class:`FoldspecError`.
        """
        engine_options, method = _split(options)
        kernels = Kernels(engine_options.kernels)
        device = _device(engine_options.device)
        found = find_pair(pair, target, drafter, options=engine_options, kernels=kernels, progress=progress)
        shared = _Shared(found, engine_options, kernels, device, progress)
        make_rule(method.accept)  # a wrong name is said before the weights are read
        shared.check_method(method)
        load_pair(found, dtype=shared.dtype, device=device, progress=progress)
        return cls(shared, method)

    def using(self, **changes: Any) -> Engine:
        """An engine over the same weights and pools with other fields of :class:`MethodOptions`.

        ``draft_tokens=0`` is plain decoding.
        """
        known = {f.name for f in dataclasses.fields(MethodOptions)}
        for name in changes:
            if name not in known:
                raise UsageError(f"unknown option {name!r}", do=f"known: {', '.join(sorted(known))}")
        return Engine(self._shared, dataclasses.replace(self.method, **changes))

    @property
    def tokenizer(self) -> Any:
        """The target's :class:`foldspec.text.tokenizer.Tokenizer`, or None."""
        return self._shared.found.tokenizer

    @property
    def lossless(self) -> bool:
        """Whether output follows the target's own law."""
        return self._rule.lossless

    def encode(self, prompt: str | Sequence[int] | Messages, **switches: Any) -> tuple[int, ...]:
        """Ids of a prompt: text as it stands, messages through the chat template (``switches`` are its variables), or
        ids themselves. Raises :class:`UsageError` for an empty prompt or an id that the target does not have."""
        found = self._shared.found
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            template = need_template(found.template, str(found.target.folder))
            text = template.render(prompt, **switches)  # type: ignore[arg-type]
            ids = self._need_tokenizer().encode(text, special=False)
        elif isinstance(prompt, str):
            ids = self._need_tokenizer().encode_prompt(prompt)
        else:
            ids = list(prompt)  # type: ignore[arg-type]
        if not ids:
            raise UsageError("is empty", where="prompt", do="give at least one token")
        wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < found.model.vocabulary]
        if wrong:
            raise UsageError(f"{wrong[0]!r} is not one of the target's {found.model.vocabulary} ids", where="prompt")
        return tuple(ids)

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            folder = self._shared.found.target.folder
            raise UsageError("the target has no tokenizer.json", where=str(folder), do="give the prompt as token ids")
        return self.tokenizer

    def prefill(self, prompt: str | Sequence[int] | Messages, progress: Progress | None = None) -> Prefix:
        """Run a prompt once and keep it: ``generate`` and ``stream`` of any engine over the same weights start from it.

        Hold few of these, and :meth:`Prefix.close` them: each keeps its pages.
        """
        return self._shared.prefill(self.encode(prompt), progress or self._shared.progress)

    @overload
    def generate(self, prompt: str | Sequence[int] | Messages | Prefix, params: SamplingParams = ...) -> Completion: ...

    @overload
    def generate(self, prompt: Sequence[Prompt], params: SamplingParams = ...) -> list[Completion]: ...  # type: ignore[overload-cannot-match]

    def generate(self, prompt: Any, params: SamplingParams | None = None) -> Completion | list[Completion]:
        """The completion of one prompt (text, ids, messages or a :class:`Prefix`), or of each of a list of prompts."""
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and not _is_one(prompt):
            return [self.stream(p, params).finish() for p in prompt]
        return self.stream(prompt, params).finish()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Generate piece by piece. Everything that can be wrong with the prompt is raised here."""
        params = params or SamplingParams()
        shared = self._shared
        if isinstance(prompt, Prefix):
            prompt._check(shared)
            ids = prompt.token_ids
        else:
            ids = self.encode(prompt)
        if len(ids) >= shared.max_context:
            raise UsageError(
                f"has {len(ids)} tokens, the context holds {shared.max_context}, output included",
                where="prompt",
                do=f"shorten it{'' if shared.at_limit else ' or raise --max-context'}",
            )
        stops = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else shared.found.stop_ids)
        limit = min(params.max_tokens, shared.max_context - len(ids))
        request = Request(shared.new_id(), ids, limit, stops)
        return Generation(self, request, prompt if isinstance(prompt, Prefix) else None)

    def _run(self, request: Request, prefix: Prefix | None, completion: Completion) -> Iterator[tuple[int, ...]]:
        """Committed ids, commit by commit. The clock runs only in here, so that a slow reader costs no speed."""
        shared = self._shared
        if request.limit == 0:
            request.finish_reason = "length"
            return
        clock = -time.perf_counter()
        with shared.opened(request, self._drafter, prefix):
            if prefix is None:
                logits = shared.run_prompt(request.id, request.prompt, self._drafter, shared.progress)
            else:
                logits, clock = prefix.logits, clock + prefix.seconds
            first = self._rule.decide(logits, [PointMass(())])[0].next_token
            committed = request.commit([first])
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
        shared = self._shared
        found = shared.found
        return {
            "pair": found.entry.name if found.entry else None,
            "target": found.target.source,
            "drafter": found.drafter.source if found.drafter else None,
            **dataclasses.asdict(self.method),
            "device": str(shared.device),
            "dtype": str(shared.dtype).removeprefix("torch."),
            "max_context": shared.max_context,
            "prefill_chunk": shared.chunk,
            "page_size": shared.options.page_size,
        }

    def env(self) -> dict[str, Any]:
        """Where this engine runs: versions, device, threads, and the kernels that were chosen."""
        return environment(self._shared.device, self._shared.kernels)

    def close(self) -> None:
        """Drop weights and caches; engines made by :meth:`using` go with it."""
        self._shared.drop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Generation(Iterator[Piece]):
    """The pieces of one request as they are committed; ``completion`` grows with them.

    Iterate, or call :meth:`finish` for the rest at once. :meth:`close` cancels: pages are freed, what was generated
    stays in ``completion``, whose finish reason is then ``cancelled``.
    """

    def __init__(self, engine: Engine, request: Request, prefix: Prefix | None) -> None:
        self.completion = Completion(prompt_ids=request.prompt, rounds=request.rounds)
        self._request = request
        self._text = TextStream(engine.tokenizer)
        self._runs = engine._run(request, prefix, self.completion)

    def __next__(self) -> Piece:
        done, request = self.completion, self._request
        try:
            committed = next(self._runs)
        except StopIteration:
            done.finish_reason = request.finish_reason
            raise
        except BaseException:
            self.close()
            raise
        # a stop id of the checkpoint is a special token, which text leaves out
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
        self.completion.token_ids = tuple(self._request.output)
        if not self._request.done:
            self._request.finish_reason = "cancelled"
            self.completion.text += self._text.finish()
        self.completion.finish_reason = self._request.finish_reason


class Prefix:
    """A prompt that has been prefilled. Its pages are shared read-only with the requests that start from it."""

    def __init__(self, shared: _Shared, request: int, ids: tuple[int, ...], logits: torch.Tensor, seconds: float) -> None:
        self._shared, self._request = shared, request
        self.token_ids, self.logits, self.seconds = ids, logits, seconds
        self._open = True

    def _check(self, shared: _Shared) -> None:
        if shared is not self._shared or not self._open:
            raise UsageError("this prefix is closed or belongs to other weights", do="call prefill of this engine")

    def close(self) -> None:
        """Free its pages. Requests that run from it go on."""
        if self._open:
            self._shared.close_request(self._request, self._shared.prefix_drafter)
            self._open = False

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Opened:
    """A request in the caches of target and drafter, for the length of a ``with``."""

    def __init__(self, shared: _Shared, request: Request, drafter: Drafter, prefix: Prefix | None) -> None:
        self._shared, self._id, self._drafter, self._prefix = shared, request.id, drafter, prefix

    def __enter__(self) -> None:
        cache, drafter = self._shared.cache, self._drafter
        if self._prefix is None:
            cache.open(self._id)
            drafter.open(self._id)
        else:
            cache.fork(self._prefix._request, self._id)
            drafter.fork(self._prefix._request, self._id)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._shared.close_request(self._id, self._drafter)


class _Shared:
    """What all engines over one pair of weights share: modules, pools, ids."""

    def __init__(
        self, found: FoundPair, options: EngineOptions, kernels: Kernels, device: torch.device, progress: Progress | None
    ) -> None:
        self.found, self.options, self.kernels, self.device, self.progress = found, options, kernels, device, progress
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.dtype = _dtype(options.dtype, device, found)
        self.chunk = options.prefill_chunk or (512 if device.type == "cpu" else 8192)
        limit = found.model.max_positions
        self.max_context = options.max_context or limit
        self.at_limit = self.max_context == limit
        if self.max_context > limit:
            raise UsageError(f"the target holds {limit} positions, not {self.max_context}", where="--max-context")
        block = found.network.block if found.network else 0
        pages = REQUESTS * -(-(self.max_context + block + 1) // options.page_size)
        pool = {"pages": pages, "page_size": options.page_size, "device": device}
        self.draft_cache: DraftCache | None = None
        self._ids = itertools.count()
        try:
            self.cache = PagedCache(found.model.cache_spec(self.dtype), **pool)  # type: ignore[arg-type]
            if found.network is not None:
                spec = found.network.cache_spec(self.dtype)
                self.draft_cache = DraftCache(spec, **pool, max_requests=2 * REQUESTS)  # type: ignore[arg-type]
                found.network.rope = found.network.rope.to(device)
        except RuntimeError as error:
            size = pages * options.page_size * found.model.cache_spec(self.dtype).bytes_per_entry
            raise ResourceError(
                f"no memory for a cache of {size / 1e9:.1f} GB on {device}", do="lower --max-context"
            ) from error
        self._prefix_drafter: Drafter | None = None

    def new_id(self) -> int:
        return next(self._ids)

    def check_method(self, method: MethodOptions) -> None:
        """Raises :class:`UsageError` for a context method that is not known."""
        network = self.found.network
        make_method(method, network.layer_facts if network else (), network.block if network else 1)

    def drafter(self, method: MethodOptions) -> Drafter:
        self.check_method(method)
        network = self.found.network
        if network is None or self.draft_cache is None or method.draft_tokens == 0:
            return NoDrafter()
        context = make_method(method, network.layer_facts, network.block)
        reader = ContextReader(context, self.draft_cache, network.rope, self.kernels, network.scale)
        return network.bind(self.found.model, reader)

    @property
    def prefix_drafter(self) -> Drafter:
        """The drafter as a keeper of prefixes, which no context method touches."""
        if self._prefix_drafter is None:
            self._prefix_drafter = self.drafter(MethodOptions(context="full"))
        return self._prefix_drafter

    def opened(self, request: Request, drafter: Drafter, prefix: Prefix | None) -> _Opened:
        return _Opened(self, request, drafter, prefix)

    def close_request(self, request: int, drafter: Drafter) -> None:
        if self.cache.tables.is_open(request):
            self.cache.close(request)
            drafter.close(request)

    def run_prompt(
        self, request: int, prompt: Sequence[int], drafter: Drafter, progress: Progress | None
    ) -> torch.Tensor:
        return prefill(
            request,
            prompt,
            model=self.found.model,
            cache=self.cache,
            drafter=drafter,
            chunk=self.chunk,
            device=self.device,
            progress=None if progress is None else lambda done, total: progress("prefill", done, total),
        )

    def prefill(self, ids: tuple[int, ...], progress: Progress | None) -> Prefix:
        start, request, drafter = time.perf_counter(), self.new_id(), self.prefix_drafter
        if len(ids) >= self.max_context:
            raise UsageError(f"has {len(ids)} tokens, the context holds {self.max_context}", where="prompt")
        try:
            self.cache.open(request)
            drafter.open_prefix(request)
            logits = self.run_prompt(request, ids, drafter, progress)
        except BaseException:
            self.close_request(request, drafter)
            raise
        return Prefix(self, request, ids, logits, time.perf_counter() - start)

    def drop(self) -> None:
        del self.found, self.cache, self.draft_cache, self._prefix_drafter


def _is_one(prompt: Sequence[Any]) -> bool:
    """Whether a sequence is one prompt, of ids or of messages, and not a list of prompts."""
    return bool(prompt) and isinstance(prompt[0], (int, Mapping))


def _split(options: dict[str, Any]) -> tuple[EngineOptions, MethodOptions]:
    """Sort keyword options into the two dataclasses; the cache folder may come from the environment."""
    parts: list[dict[str, Any]] = [{}, {}]
    kinds = [{f.name for f in dataclasses.fields(kind)} for kind in (EngineOptions, MethodOptions)]
    for name, value in options.items():
        if not any(name in kind for kind in kinds):
            raise UsageError(f"unknown option {name!r}", do=f"known: {', '.join(sorted(kinds[0] | kinds[1]))}")
        parts[0 if name in kinds[0] else 1][name] = value
    parts[0].setdefault("cache_dir", cache_folder())
    return EngineOptions(**parts[0]), MethodOptions(**parts[1])


def cache_folder() -> Path:
    """FOLDSPEC_CACHE, else foldspec in the user's cache folder."""
    if os.environ.get("FOLDSPEC_CACHE"):
        return Path(os.environ["FOLDSPEC_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foldspec"


def _device(name: str) -> torch.device:
    """Raises :class:`ResourceError` if a GPU is asked for and there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ResourceError(f"there are {count} GPUs here", where=f"--device {name}", do="use --device cpu")
    return device


def _dtype(name: str, device: torch.device, found: FoundPair) -> torch.dtype:
    if name == "auto":
        # CPUs without bf16 arithmetic make verification in bf16 slower than the tokens it saves
        declared = found.target.config.values
        name = "float32" if device.type == "cpu" else str(declared.get("dtype") or declared.get("torch_dtype") or "bfloat16")
        if name not in ("float32", "bfloat16", "float16"):
            raise found.target.config.error(f"dtype {name!r} is not supported", do="choose one with --dtype")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def environment(device: torch.device, kernels: Kernels) -> dict[str, Any]:
    """Versions, device, threads and kernel choices, for reports and ``foldspec check``."""
    import platform

    from foldspec import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "foldspec": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": name,
        "threads": torch.get_num_threads(),
        "kernels": {
            choice.operator: {"runs": choice.name, "refused": dict(choice.refused)} for choice in kernels.choices
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()


def kernel_report(device: torch.device, kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    """Have every operator choose for these facts, so that :func:`environment` can tell before anything runs."""
    kernels.choose("multi_read_attention", Facts(device.type, dtype, width, width))
