"""The journal for the event loop: one daemon thread performs the calls in order."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, TypeVar

from podwatch.domain.errors import HostError
from podwatch.journal.journal import Journal

P = ParamSpec("P")
R = TypeVar("R")

MAX_WAITING: Final = 10_000
"""Posts beyond this are dropped and counted: a state disk that hangs must not use up the pod's memory."""


class AsyncJournal:
    """Wraps one open Journal; ``close`` closes it too.

    Calls run one after the other in the order they were made, ``post`` and ``run`` alike. ``sync`` is the Journal
    itself, for threads of other parts: it has its own lock.
    """

    def __init__(self, journal: Journal) -> None:
        self.sync = journal
        self.dropped = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="podwatch-journal", daemon=True)
        self._thread.start()

    async def run(self, method: Callable[Concatenate[Journal, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``await journal.run(Journal.add_event, event)``. Cancelling the caller does not undo the call."""
        if self._closed:
            raise HostError("the journal is closed", fix="podwatch is stopping")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()

        def deliver(result: R | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]  # None only where R allows it

        def job() -> None:
            result: R | None = None
            failure: BaseException | None = None
            try:
                result = method(self.sync, *args, **kwargs)
            except BaseException as error:
                failure = error
            try:
                loop.call_soon_threadsafe(deliver, result, failure)
            except RuntimeError:
                return  # the loop is closed; the call is done anyway

        self._jobs.put(job)
        return await answer

    def post(self, method: Callable[Concatenate[Journal, P], R], *args: P.args, **kwargs: P.kwargs) -> None:
        """Fire and forget, in order with the other calls. Never raises; a failed write is counted."""
        if self._closed or self._jobs.qsize() > MAX_WAITING:
            self.dropped += 1
            return

        def job() -> None:
            try:
                method(self.sync, *args, **kwargs)
            except Exception:
                self.dropped += 1

        self._jobs.put(job)

    async def close(self, timeout: float = 10.0) -> None:
        """Finish the pending calls, at most ``timeout`` seconds, then close the Journal. Idempotent."""
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def last() -> None:
            self.sync.close()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        self._jobs.put(last)
        self._jobs.put(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), timeout)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
