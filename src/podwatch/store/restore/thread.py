"""Restores from the event loop: the worker thread in which a Restorer waits for the store and the disk."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from podwatch.store.inventory import SaveKey, Stored
from podwatch.store.restore.restore import Restored, RestoreProgress, Restorer
from podwatch.system.blocking_calls import Worker

END_SECONDS = 30.0
"""A cancelled restore ends within that: its child is killed, and a rename in progress takes no longer."""


class RestoreThread:
    """One Restorer with its thread. All methods on the event loop; they raise as the Restorer's."""

    def __init__(self, restorer: Restorer, name: str) -> None:
        self._restorer, self._worker = restorer, Worker(name)

    @property
    def fetching(self) -> SaveKey | None:
        """(step, save_id) of the save that is being fetched: retention leaves it alone."""
        return self._restorer.fetching

    async def saves(self, step: int | None = None, *, within: float | None = None) -> tuple[Stored, ...]:
        """What the run can be restored from, the best first. Raises TimeoutError after ``within`` seconds: the store
        itself is asked for minutes."""
        return await self._worker.call(self._restorer.saves, step, timeout=within)

    async def fetch_save(
        self, key: SaveKey, progress: RestoreProgress | None = None, *, doubts: bool = False
    ) -> Restored:
        """Put exactly this save in place. ``progress`` is called on the loop. What was staged stays when it is
        cancelled: the next fetch continues from there."""
        relay = self._relayed(progress)
        return await self._stopped_with(lambda: self._restorer.fetch_save(key, relay, doubts=doubts))

    async def fetch_to(self, to: Path, step: int | None = None) -> Restored:
        """The newest checkpoint, or one of ``step``, into a directory, with its exported weights."""
        return await self._stopped_with(lambda: self._restorer.fetch(step, to=to, exports=True))

    async def _stopped_with(self, call: Callable[[], Restored]) -> Restored:
        task = asyncio.ensure_future(self._worker.call(call))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._restorer.kill()
            await asyncio.wait([task], timeout=END_SECONDS)  # nothing is put in place beside what is decided next
            if task.done() and not task.cancelled():
                task.exception()  # retrieved: otherwise asyncio logs it
            raise

    def _relayed(self, progress: RestoreProgress | None) -> RestoreProgress:
        loop = asyncio.get_running_loop()

        def relay(done: int, total: int) -> None:
            if progress is not None:
                loop.call_soon_threadsafe(progress, done, total)

        return relay
