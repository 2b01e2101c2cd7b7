"""One request as its caller sees it: pieces of text and ids, and the completion that grows with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor

from foldspec.records import Completion, Piece
from foldspec.schedule.request import Request
from foldspec.schedule.scheduler import Job, Origin, Scheduler

__all__ = ["Generation", "pieces"]


class Generation(Iterator[Piece]):
    """The pieces of one request as they are committed; ``completion`` grows with them.

    Iterate, or call :meth:`finish` for the rest at once. :meth:`close`, or throwing it away, cancels: pages are freed,
    and what was generated stays in ``completion``, whose finish reason is then ``cancelled``.
    """

    def __init__(self, scheduler: Scheduler, request: Request, origin: Origin | None) -> None:
        self.completion = Completion(prompt_ids=request.prompt, seed=request.params.seed)
        if request.params.logprobs is not None:
            self.completion.logprobs = []
        self._request, self._scheduler, self._origin = request, scheduler, origin
        self._job: Job | None = None
        self._closed = False

    @property
    def over(self) -> bool:
        """Whether no step will add anything (pieces that nobody took may be left)."""
        return self._closed or (self._job is not None and self._job.over)

    @property
    def ready(self) -> bool:
        """Whether the next piece, or the end, is there without a step."""
        return self.over or (self._job is not None and bool(self._job.news))

    def submit(self) -> None:
        """Join the queue, if it has not. Raises :class:`ResourceError` for a request that is too large."""
        if self._job is None and not self._closed:
            self._job = self._scheduler.submit(self._request, self._origin)
            self._settle()  # another thread may have closed it meanwhile

    def advance(self) -> None:
        """Run one step, unless :attr:`ready`. What it raises ends this request, and no other."""
        try:
            self.submit()
            if self._job is not None:
                self._scheduler.advance(self._job)
        except BaseException:
            self._cancel()
            raise

    def __next__(self) -> Piece:
        while not self.ready:
            self.advance()
        done, request = self.completion, self._request
        if self._job is None or not self._job.news:
            self._end()
            if request.error is not None and not self._closed:
                self._closed = True
                raise request.error
            raise StopIteration
        news = self._job.news.popleft()
        if news.tokens:  # a request that fails may settle text alone
            done.first_time = news.time if done.first_time is None else done.first_time
            done.last_time = news.time
            done.times.append(news.time)
        if news.round is not None:
            done.rounds.append(news.round)
        if done.logprobs is not None:
            done.logprobs += news.logprobs
        done.token_ids, done.text = (*done.token_ids, *news.tokens), done.text + news.text
        if self.over and not self._job.news:
            self._end()
        return Piece(news.text, news.tokens)

    def _end(self) -> None:
        """What the completion says in the end. Text that was held back comes out where a request was cancelled."""
        done, request = self.completion, self._request
        done.finish_reason, done.stopped_by, done.error = request.finish_reason, request.stopped_by, request.error
        if self._closed and not done.finish_reason:  # it never began; or a step runs, and ends it when it is over
            done.finish_reason = "cancelled"
        if len(done.token_ids) == len(request.output):
            done.text = request.text.so_far

    def finish(self) -> Completion:
        """Generate what is left and return the completion."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """Cancel the request, unless it has ended; take what nobody took."""
        self._cancel()
        while self._job is not None and self._job.news:
            next(self)
        self._end()

    def _cancel(self) -> None:
        self._closed = True
        self._settle()

    def _settle(self) -> None:
        if self._closed and self._job is not None and not self._job.over:
            self._scheduler.cancel(self._job)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self._cancel()


async def pieces(generation: Generation, worker: Executor) -> AsyncIterator[Piece]:
    """The pieces of a generation whose steps run in ``worker``; it is closed in the end, however that comes."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            while not generation.ready:
                await loop.run_in_executor(worker, generation.advance)
            piece = next(generation, None)
            if piece is None:
                return
            yield piece
    finally:
        generation.close()
