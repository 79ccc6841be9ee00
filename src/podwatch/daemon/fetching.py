"""recovery's door to the store: blocking restores, run in a worker of their own."""

import asyncio
from collections.abc import Callable

from podwatch.judgement.choose import RemoteSave
from podwatch.sync.restore import Restorer
from podwatch.system.threads import Worker


class StoreDoor:
    """Implements recovery's RestoreDoor over a Restorer."""

    def __init__(self, restorer: Restorer, worker: Worker) -> None:
        self._restorer, self._worker = restorer, worker

    async def newest(self, exclude: frozenset[int]) -> RemoteSave | None:
        found = await self._worker.call(lambda: self._restorer.newest(exclude=exclude))
        if found is None:
            return None
        seq = found.pointer.seq if found.pointer is not None else 0
        return RemoteSave(found.step, found.save_id, found.manifest.lineage, seq)

    async def fetch(self, step: int | None, progress: Callable[[int, int], None] | None = None) -> int:
        loop = asyncio.get_running_loop()

        def relay(done: int, total: int) -> None:
            if progress is not None:
                loop.call_soon_threadsafe(progress, done, total)

        report = await self._worker.call(lambda: self._restorer.fetch(step, progress=relay))
        return report.step
