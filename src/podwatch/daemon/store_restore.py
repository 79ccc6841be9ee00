"""Restores for recovery: runs the blocking Restorer in its own worker thread."""

import asyncio
from collections.abc import Callable

from podwatch.policy.resume import RemoteSave
from podwatch.sync.restore.restore import Restorer
from podwatch.system.workers import Worker

LOOK_SECONDS = 4.0
"""How long a restart waits for the store's newest checkpoint while this pod has a complete one: an unreachable store is
retried for minutes, and idle GPUs cost money. B2 answers the four requests within one second."""
ONLY_STORE_SECONDS = 180.0
"""The same while this pod has no complete checkpoint: only the store can provide one."""


class StoreRestore:
    """Implements recovery's RestoreDoor over a Restorer. ``have_local``: whether this pod has a complete checkpoint."""

    def __init__(self, restorer: Restorer, worker: Worker, have_local: Callable[[], bool]) -> None:
        self._restorer, self._worker, self._have_local = restorer, worker, have_local

    async def newest(self, exclude: frozenset[int]) -> RemoteSave | None:
        patience = LOOK_SECONDS if self._have_local() else ONLY_STORE_SECONDS
        found = await self._worker.call(lambda: self._restorer.newest(exclude=exclude), timeout=patience)
        if found is None:
            return None
        seq = found.pointer.seq if found.pointer is not None else 0
        return RemoteSave(found.step, found.save_id, found.manifest.lineage, seq)

    async def fetch(self, step: int | None, progress: Callable[[int, int], None] | None = None) -> int:
        loop = asyncio.get_running_loop()

        def relay(done: int, total: int) -> None:
            if progress is not None:
                loop.call_soon_threadsafe(progress, done, total)

        try:
            report = await self._worker.call(lambda: self._restorer.fetch(step, progress=relay))
        except asyncio.CancelledError:
            self._restorer.kill()  # staged files stay: the next fetch continues from them
            raise
        return report.step
