"""The grace of a preemption: how much of it is left, and whether the upload in flight can still end within it."""

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podwatch.app.backup.backup import Backup

RESERVE_SECONDS = 1.0
"""Part of the grace for ending training and for the last writes to the journal; at most a third of the grace."""
LOOK_SECONDS = 0.6
"""Time to measure the rate of an upload, which reports progress four times a second."""


class Budget:
    """Time limits of the shutdown steps. Without a ``grace`` each step has its usual limit."""

    def __init__(self, grace: float | None = None) -> None:
        self._end = None if grace is None else time.monotonic() + grace
        self._reserve = 0.0 if grace is None else min(RESERVE_SECONDS, grace / 3)

    def seconds(self, usual: float) -> float:
        """The limit of one step: ``usual``, or the rest of the grace if that is less; at least 0.05 s."""
        return usual if self._end is None else max(0.05, min(usual, self._end - time.monotonic()))

    def half(self) -> "Budget":
        """The half of what is left before the reserve, as a budget of its own without a reserve."""
        part = Budget()
        if self._end is not None:
            part._end = time.monotonic() + self.before_reserve() / 2
        return part

    def before_reserve(self) -> float:
        """Seconds until training must be requested to end."""
        return 0.0 if self._end is None else max(0.0, self._end - self._reserve - time.monotonic())


def fits(left_bytes: int, sent_bytes: int, took_seconds: float, left_seconds: float) -> bool:
    """Whether ``left_bytes`` can be sent within ``left_seconds`` at the rate of ``sent_bytes`` in ``took_seconds``. If
    nothing was sent: only if nothing is left, because the upload is being verified and published then."""
    if left_bytes <= 0:
        return True
    return took_seconds > 0 and left_bytes * took_seconds <= left_seconds * sent_bytes


async def upload_if_it_fits(uploads: "Backup", budget: Budget) -> bool:
    """Wait for the upload in progress if it can finish in time; returns whether none is in progress now."""
    began, before = time.monotonic(), uploads.status()
    step = before.uploading_step
    while uploads.status().uploading_step == step and step is not None:
        now, took = uploads.status(), time.monotonic() - began
        left = budget.before_reserve()
        enough = took >= min(LOOK_SECONDS, left / 2)
        sent = now.uploaded_bytes - before.uploaded_bytes
        if left <= 0 or (enough and not fits(now.total_bytes - now.uploaded_bytes, sent, took, left)):
            return False
        await asyncio.sleep(0.05)
    return True
