"""Restores from the event loop: the worker thread in which a Restorer waits for the store and the disk."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from podwatch.domain.stored_checkpoint import StoredSave
from podwatch.sync.restore.restore import Restorer, RestoreReport
from podwatch.system.blocking_calls import Worker


class RestoreThread:
    """One Restorer with its thread. All methods on the event loop; they raise as the Restorer's."""

    def __init__(self, restorer: Restorer, name: str) -> None:
        self._restorer, self._worker = restorer, Worker(name)

    async def newest(
        self, exclude: frozenset[int], step: int | None = None, *, within: float | None = None
    ) -> StoredSave | None:
        """The newest checkpoint in the store, or the newest save of ``step``. Raises TimeoutError after ``within``
        seconds: the Restorer itself tries for minutes."""
        return await self._worker.call(lambda: self._restorer.newest(exclude=exclude, step=step), timeout=within)

    async def fetch(
        self,
        step: int | None,
        progress: Callable[[int, int], None] | None = None,
        *,
        to: Path | None = None,
        all_parts: bool = False,
    ) -> RestoreReport:
        """Download, verify and place the checkpoint of ``step`` (None: the newest). ``progress`` is called on the
        loop. Staged files stay when it is cancelled: the next fetch continues from them."""
        loop = asyncio.get_running_loop()

        def relay(done: int, total: int) -> None:
            if progress is not None:
                loop.call_soon_threadsafe(progress, done, total)

        try:
            return await self._worker.call(
                lambda: self._restorer.fetch(step, to=to, progress=relay, all_parts=all_parts)
            )
        except asyncio.CancelledError:
            self._restorer.kill()
            raise
