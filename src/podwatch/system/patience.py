"""Reads /proc while a process of the pod hangs in the kernel."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from podwatch.system import procfs
from podwatch.system.threads import Worker

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds for one read of one process. It takes microseconds; a machine that swaps may need some milliseconds."""


async def patiently(worker: Worker, fn: Callable[..., T], *args: Any, timeout: float, patience: float = PATIENCE) -> T:
    """As ``worker.call``, for a read-only scan: if it hangs at one process, it is restarted in a fresh thread, without
    that process. So an unrelated stuck process never delays a restart. Raises TimeoutError as ``worker.call`` does."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    while True:
        call = asyncio.ensure_future(worker.call(fn, *args, timeout=max(patience, end - loop.time())))
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=patience)
                if not call.done() and procfs.give_up_hung(patience):
                    break
        except asyncio.CancelledError:
            call.cancel()
            raise
        if call.done():
            return call.result()
        call.cancel()
        await asyncio.wait({call})
        worker.renew()
