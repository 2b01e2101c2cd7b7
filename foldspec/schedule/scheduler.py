"""Continuous batching: requests wait, are admitted, prefilled in chunks, decoded together, and leave; between any two
steps they may join, be cancelled, or give up their pages to others.

One :meth:`Scheduler.step`:

1. Room is made for the round of each request that decodes. Where pages run out, the request that was admitted last
   gives up its own and goes back to the front of the queue; later its prompt and output are prefilled again.
2. Waiting requests are admitted in their order, while there is a place in the batch and room in every cache for all
   that they will have stored after their first round. Nobody overtakes.
3. One pass of the target over blocks and prompt chunks (``rounds.py``). While anything decodes, chunks are limited to
   ``budget`` tokens, so that nobody waits for a long prompt; else to ``chunk``.
4. Requests that ended leave, and their pages with them.

Time is counted on a clock that runs during steps alone: who reads a stream slowly loses no speed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from foldspec.errors import FoldspecError, ResourceError
from foldspec.records import Round, TokenLogprobs
from foldspec.schedule.request import Request
from foldspec.schedule.rounds import Chunk, Rounds

__all__ = ["Job", "News", "Origin", "Scheduler", "Step", "Turn"]


@dataclass(frozen=True)
class Origin:
    """A prompt that is in the caches already, as request ``id``: its ``logits`` [1, vocabulary] give the first token.
    The ``seconds`` that it took count as if it had just been run."""

    id: int
    logits: torch.Tensor
    seconds: float


@dataclass(frozen=True)
class News:
    """What one commit adds to a request, its first token (without a round) or a round's: ids, the text that they
    settle, log-probabilities where they were asked for. ``time``: seconds on the request's clock."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    round: Round | None
    time: float


@dataclass(eq=False)
class Job:
    """A request in the scheduler.

    ``since``   the scheduler's clock when it came
    ``news``    commits that nobody has taken yet
    ``over``    no more news will come: it ended, failed or was cancelled
    ``filled``  its entries in the caches
    """

    request: Request
    origin: Origin | None
    since: float
    news: deque[News] = field(default_factory=deque)
    over: bool = False
    filled: int = 0
    preempted: int = 0
    told: tuple[int, int, int] = (0, 0, 0)  # output tokens, characters of text, and rounds that are in the news

    @property
    def total(self) -> int:
        """Entries that the caches hold before the next round: the prompt and, where there is any, the output but for
        its last token, the anchor."""
        return len(self.request.prompt) + max(0, len(self.request.output) - 1)

    @property
    def decodes(self) -> bool:
        """Whether it can run a round: it has an anchor, and the caches hold all that is before it."""
        return bool(self.request.output) and self.filled == self.total

    def tell(self, time: float) -> None:
        """Put what the request has since it was last told into the news."""
        request, (tokens, characters, rounds) = self.request, self.told
        self.told = len(request.output), len(request.text.so_far), len(request.rounds)
        if self.told != (tokens, characters, rounds):
            round_ = request.rounds[-1] if len(request.rounds) > rounds else None
            text = request.text.so_far[characters:]
            self.news.append(News(tuple(request.output[tokens:]), text, tuple(request.logprobs[tokens:]), round_, time))

    def piece(self, count: int) -> Sequence[int]:
        """The next ``count`` ids to prefill."""
        prompt, first, last = self.request.prompt, self.filled, self.filled + count
        if last <= len(prompt):
            return prompt[first:last]
        return (*prompt[first:], *self.request.output[max(0, first - len(prompt)) : last - len(prompt)])


@dataclass(frozen=True)
class Step:
    """What a step did: requests that ran a round, tokens prefilled, requests preempted, and its seconds."""

    decoded: int
    prefilled: int
    preempted: int
    seconds: float


class Turn:
    """The turn of one thread on the caches, a lock, and the cancelled requests of all schedulers that wait for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._cancelled: deque[tuple[Scheduler, Job]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._sweep()

    def cancel(self, scheduler: Scheduler, job: Job) -> None:
        """End a request: now or, while another thread has its turn or this one runs a step, when that is over. Never
        waits, because a stream may be thrown away anywhere, in a step too."""
        self._cancelled.append((scheduler, job))
        self._sweep()

    def _sweep(self) -> None:
        while self._cancelled and self._lock.acquire(blocking=False):
            try:
                later = []
                while self._cancelled:
                    scheduler, job = self._cancelled.popleft()
                    if not scheduler.end_cancelled(job):
                        later.append((scheduler, job))
                self._cancelled += later
                if later:
                    return
            finally:
                self._lock.release()


class Scheduler:
    """Requests over one target, one drafter and one rule (``rounds``).

    ``max_batch`` requests run at most; ``budget`` and ``chunk`` limit prompt tokens (see the module's head). ``turn``
    is one for all schedulers over the same caches: with it, any thread may call anything. ``prefilling(done, total)``
    hears of each chunk; what it raises ends the step. ``fill(request, tokens)`` gives an open request a past that is
    made up, which then takes the place of a prefill but for the last token. ``debug`` checks the caches after every
    step, which then looks at its own books too. ``watch`` hears of every step.
    """

    def __init__(
        self,
        rounds: Rounds,
        *,
        max_batch: int,
        budget: int,
        chunk: int,
        turn: Turn | None = None,
        prefilling: Callable[[int, int], None] | None = None,
        fill: Callable[[int, Sequence[int]], None] | None = None,
        debug: Callable[[], None] | None = None,
    ) -> None:
        self.rounds, self.max_batch, self.budget, self.chunk = rounds, max_batch, min(budget, chunk), chunk
        self.watch: Callable[[Step], None] | None = None
        self.busy = 0.0  # seconds of all steps
        self.failed = self.preempted = 0  # requests that ended with an error; times that one gave up its pages
        self._turn = Turn() if turn is None else turn
        self._prefilling, self._fill, self._debug = prefilling, fill, debug
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []  # in the order of admission
        self._stepping = False

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    def submit(self, request: Request, origin: Origin | None = None) -> Job:
        """Put a request at the end of the queue. Raises the error of :meth:`check_size`."""
        with self._turn:
            self.check_size(request)
            job = Job(request, origin, self.busy)
            if request.limit == 0:
                request.finish_reason, job.over = "length", True
            else:
                self._waiting.append(job)
            return job

    def check_size(self, request: Request) -> None:
        """Raises :class:`ResourceError` for a request that may come to hold more than the empty caches do."""
        needed, held = len(request.prompt) + request.limit - 1, self.rounds.cache.tables.entries
        if needed > held:
            raise ResourceError(
                f"{len(request.prompt)} tokens and {request.limit} of output need {needed} cache entries, there are "
                f"{held}",
                where="request",
                do="lower --max-tokens or raise --cache-tokens",
            )

    def cancel(self, job: Job) -> None:
        """End a request and free its pages: now or, while a step runs, at the end of that step."""
        self._turn.cancel(self, job)

    def clear(self) -> None:
        """Cancel everything."""
        for job in [*self._waiting, *self._running]:
            self.cancel(job)

    def advance(self, job: Job) -> None:
        """One step, unless the job has news or is over: another caller may have stepped meanwhile."""
        with self._turn:
            if not job.news and not job.over:
                self.step()

    def step(self) -> Step:
        """Advance whatever can be advanced. After an exception, of whatever kind, nothing committed is lost, and what
        ran waits in its old order to be prefilled again."""
        with self._turn:
            assert not self._stepping, "a step inside a step"
            self._stepping = True
            try:
                step = self._step()
            finally:
                self._stepping = False
        if self.watch is not None:
            self.watch(step)
        return step

    def _step(self) -> Step:
        begin, start, before = time.perf_counter(), self.busy, self.preempted
        try:
            decoding = self._make_room()
            if self.preempted == before:
                self._admit()
            chunks = self._chunks(self.budget if decoding else self.chunk)
            if decoding or chunks:
                self.rounds.step([job.request for job in decoding], [chunk for _, chunk in chunks])
            for job in decoding:
                job.filled = job.request.anchor_pos
            self._filled(chunks)
        except BaseException:
            self.busy = start + time.perf_counter() - begin
            for job in self._running:
                job.request.settle()
            self._deliver()
            while self._running:
                self._put_back(self._running[-1])
            raise
        self.busy = start + time.perf_counter() - begin
        self._deliver()
        if self._debug is not None:
            self._debug()
            self._check()
        prefilled = sum(len(chunk.tokens) for _, chunk in chunks)
        return Step(len(decoding), prefilled, self.preempted - before, self.busy - start)

    def _make_room(self) -> list[Job]:
        """The jobs that can run a round, with room in every cache for it. Others may have given up theirs."""
        for job in [job for job in self._running if job.decodes]:
            while job in self._running:
                request = job.request
                try:
                    self._reserve(request, request.anchor_pos)
                    break
                except ResourceError as error:
                    if len(self._running) == 1:
                        self._fail(job, error)
                    else:
                        self.preempted += 1
                        self._running[-1].preempted += 1
                        self._put_back(self._running[-1])
        return [job for job in self._running if job.decodes]

    def _reserve(self, request: Request, entries: int) -> None:
        """Room for a round after ``entries`` entries: the target's block, and all that the drafter may come to hold."""
        after = entries + 1 + self.rounds.budget(request)
        self.rounds.cache.reserve(request.id, after)
        self.rounds.drafter.reserve(request.id, after)

    def _admit(self) -> None:
        """Begin with those whose turn it is and who fit; one who has its prompt already gets its first token."""
        while self._waiting and len(self._running) < self.max_batch:
            job = self._waiting[0]
            try:
                self._open(job)
                # those that run will soon want a page each: better wait than be sent back at once
                if self.rounds.cache.tables.allocator.free_pages < len(self._running):
                    raise ResourceError("all free cache pages are spoken for")
            except BaseException as error:
                self._suspend(job)
                if not isinstance(error, ResourceError):
                    raise
                if self._running:
                    return
                self._waiting.popleft()
                self._fail(job, error)
                continue
            self._running.append(self._waiting.popleft())
            if job.filled and job.origin is not None:
                self.rounds.first(job.request, job.origin.logits)

    def _open(self, job: Job) -> None:
        """Open a job in every cache, with room for what comes before its first round and for that round."""
        cache, drafter, request, origin = self.rounds.cache, self.rounds.drafter, job.request, job.origin
        if origin is not None and not request.output and cache.tables.is_open(origin.id):
            cache.fork(origin.id, request.id)
            drafter.fork(origin.id, request.id, request.prompt, len(request.prompt) + request.limit)
            job.filled = len(request.prompt)
        else:
            if not request.output:
                job.origin = None  # closed meanwhile: its seconds are spent once more, and count once
            cache.open(request.id)
            drafter.open(request.id, len(request.prompt) + request.limit)
        self._reserve(request, job.total)
        if self._fill is not None and not job.filled:
            self._fill(request.id, job.piece(job.total - 1))
            job.filled = job.total - 1

    def _suspend(self, job: Job) -> None:
        """Free what the job holds in the caches, if anything: it may be half open. It may be opened again."""
        self.rounds.cache.close(job.request.id)
        self.rounds.drafter.suspend(job.request.id)
        job.filled = 0

    def _chunks(self, tokens: int) -> list[tuple[Job, Chunk]]:
        """At most so many tokens of prompts, and of preempted output, the first admitted first."""
        chunks = []
        for job in self._running:
            count = min(tokens, job.total - job.filled)
            if count:
                first = not job.request.output and job.filled + count == job.total
                chunks.append((job, Chunk(job.request, job.filled, job.piece(count), first)))
                tokens -= count
        return chunks

    def _filled(self, chunks: Sequence[tuple[Job, Chunk]]) -> None:
        """Count in what was prefilled, before any of it may raise."""
        for job, chunk in chunks:
            job.filled += len(chunk.tokens)
        for _, chunk in chunks:
            if self._prefilling is not None:
                done = chunk.start + len(chunk.tokens)
                self._prefilling(done, max(done, len(chunk.request.prompt)))

    def _deliver(self) -> None:
        """Tell each job what was committed by now; those that ended leave."""
        for job in list(self._running):
            job.tell(self.busy - job.since + (job.origin.seconds if job.origin is not None else 0.0))
            if job.request.done:
                self.failed += job.request.error is not None
                self._end(job)

    def _put_back(self, job: Job) -> None:
        """To the front of the queue, with nothing in the caches."""
        self._running.remove(job)
        self._suspend(job)
        self._waiting.appendleft(job)

    def _fail(self, job: Job, error: FoldspecError) -> None:
        job.request.fail(error)
        self.failed += 1
        self._end(job)

    def _end(self, job: Job) -> None:
        """A job that is done leaves, and frees all it holds."""
        for jobs in (self._running, self._waiting):
            if job in jobs:
                jobs.remove(job)
        self.rounds.cache.close(job.request.id)
        self.rounds.drafter.close(job.request.id)
        job.filled, job.over = 0, True

    def end_cancelled(self, job: Job) -> bool:
        """End a request that was cancelled, unless a step runs: whether it was done. For :class:`Turn` alone."""
        if self._stepping:
            return False
        if not job.over:
            job.request.cancel()
            self._end(job)
        return True

    def _check(self) -> None:
        """Debug mode: the books agree with the caches."""
        cache, drafter = self.rounds.cache, self.rounds.drafter
        for job in self._waiting:
            assert not job.over and not job.request.done and job.filled == 0, "a job that waits holds nothing"
            assert not cache.tables.is_open(job.request.id), "a job that waits has no pages"
        for job in self._running:
            request = job.request
            assert not job.over and not request.done, "a job that is done has left"
            assert 0 <= job.filled <= job.total, "a job has more entries than tokens"
            assert cache.tables.length(request.id) == job.filled, "the target's cache holds what is committed"
            assert drafter.held(request.id) in (0, job.filled), "the drafter holds what is committed, or nothing"
        assert len(self._running) <= self.max_batch
