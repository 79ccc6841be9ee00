"""The journal for the event loop: one daemon thread performs the calls in order."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from podwatch.domain.errors import HostError
from podwatch.journal.journal import Journal
from podwatch.system.blocking_calls import Worker

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
        self._worker = Worker("journal")
        self._closed = False

    async def run(self, method: Callable[Concatenate[Journal, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``await journal.run(Journal.add_event, event)``. Cancelling the caller does not undo the call."""
        if self._closed:
            raise HostError("the journal is closed", fix="podwatch is stopping")
        return await self._worker.submit(partial(method, self.sync, *args, **kwargs))

    def post(self, method: Callable[Concatenate[Journal, P], R], *args: P.args, **kwargs: P.kwargs) -> None:
        """Fire and forget, in order with the other calls. Never raises; a failed write is counted."""
        if self._closed or self._worker.waiting > MAX_WAITING:
            self.dropped += 1
            return
        self._worker.post(partial(method, self.sync, *args, **kwargs), done=self._count)

    def _count(self, _result: Any, error: BaseException | None) -> None:
        self.dropped += error is not None

    async def close(self, timeout: float = 10.0) -> None:
        """Finish the pending calls, at most ``timeout`` seconds, then close the Journal. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            await self._worker.call(self.sync.close, timeout=timeout)
        self._worker.close()
