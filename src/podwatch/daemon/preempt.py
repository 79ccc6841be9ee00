"""Preemption: this machine is taken away within seconds (docs/maintenance.md).

Steps, each with its own deadline: start no upload; finish the upload in progress if there is time; write the heartbeat
``preempted``, so that a replacement does not wait; request training to end. All within ``[recovery] preempt_grace``,
because an unannounced SIGKILL follows.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from podwatch.daemon.shutdown import briefly
from podwatch.sync.types import SyncStatus

BOOTED = Path("/run/systemd/system")
ASK_SECONDS = 0.5
"""Timeout of systemd's answer, which normally takes milliseconds."""
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

    def before_reserve(self) -> float:
        """Seconds until training must be requested to end."""
        return 0.0 if self._end is None else max(0.0, self._end - self._reserve - time.monotonic())


async def system_is_stopping(*, booted: Path = BOOTED, within: float = ASK_SECONDS) -> bool:
    """Whether systemd shuts the whole machine down, which a SIGTERM does not show: it reports ``stopping`` while it
    stops podwatch's unit. False without systemd or without an answer."""
    if not os.path.isdir(booted):  # noqa: PTH112, ASYNC240 - one stat of a memory file system
        return False
    process: asyncio.subprocess.Process | None = None
    try:
        async with asyncio.timeout(within):
            process = await asyncio.create_subprocess_exec(
                "systemctl", "is-system-running",
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            said, _ = await process.communicate()
    except OSError:  # a timeout is an OSError
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return False
    return said.strip() == b"stopping"


async def told_by(under_init: str) -> str:
    """Why a SIGTERM also ends training; empty if only podwatch exits. ``under_init``: the value of UNDER_INIT."""
    if under_init == "pid1":
        return "the container is being stopped"
    return "the machine is being shut down" if await system_is_stopping(booted=BOOTED) else ""


def fits(left_bytes: int, sent_bytes: int, took_seconds: float, left_seconds: float) -> bool:
    """Whether ``left_bytes`` can be sent within ``left_seconds`` at the rate of ``sent_bytes`` in ``took_seconds``. If
    nothing was sent: only if nothing is left, because the upload is being verified and published then."""
    if left_bytes <= 0:
        return True
    return took_seconds > 0 and left_bytes * took_seconds <= left_seconds * sent_bytes


async def upload_if_it_fits(state: Callable[[], SyncStatus], budget: Budget) -> bool:
    """Wait for the upload in progress if it can finish in time; returns whether none is in progress now."""
    began, before = time.monotonic(), state()
    step = before.uploading_step
    while state().uploading_step == step and step is not None:
        now, took = state(), time.monotonic() - began
        left = budget.before_reserve()
        enough = took >= min(LOOK_SECONDS, left / 2)
        sent = now.uploaded_bytes - before.uploaded_bytes
        if left <= 0 or (enough and not fits(now.total_bytes - now.uploaded_bytes, sent, took, left)):
            return False
        await asyncio.sleep(0.05)
    return True


async def say_goodbye(
    budget: Budget,
    *,
    state: Callable[[], SyncStatus] | None,
    beat: Callable[[], Awaitable[None]],
    end_sync: Callable[[], Awaitable[None]],
    tell: Callable[[], Awaitable[object]],
) -> None:
    """Finish the upload and write the heartbeat in parallel, then end sync, then request training to end. None of the
    steps can block the next."""
    if state is not None:
        said = asyncio.ensure_future(briefly(beat(), budget.before_reserve()))
        await upload_if_it_fits(state, budget)
        await briefly(end_sync() if said.done() else _after(said, end_sync), budget.before_reserve())
    await briefly(tell(), budget.seconds(RESERVE_SECONDS))


async def _after(said: "asyncio.Future[None]", then: Callable[[], Awaitable[None]]) -> None:
    """Run ``then`` after the heartbeat was written or timed out: it uses sync's thread."""
    await asyncio.wait([said])
    await then()


async def nothing() -> None:
    """Do nothing: there is no sync to end."""


def preempt_handlers(
    preempt: Callable[[str], None], grace: Callable[[], float]
) -> Mapping[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]:
    """The methods of the control socket."""

    async def handle(params: dict[str, Any]) -> dict[str, Any]:
        by = str(params.get("by") or "")[:100]
        preempt(f"preempted{f' by {by}' if by else ''}")
        seconds = grace()
        message = f"preempted: podwatch requests training to end and exits, within {seconds:g} s"
        return {"message": message, "grace_seconds": seconds}

    return {"preempt": handle}
