"""Preemption: this machine is about to be taken away, and there are seconds for a farewell (DESIGN section 4, "Stop").

In this order, each with a deadline of its own: no upload begins any more, the one in flight finishes if it fits, the
heartbeat says ``preempted`` so that a replacement need not wait, training is told to end. All of it within ``[recovery]
preempt_grace``, because a SIGKILL follows that nobody announces.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from podwatch.daemon.ending import briefly
from podwatch.sync.doors import SyncState

BOOTED = Path("/run/systemd/system")
ASK_SECONDS = 0.5
"""For systemd's answer; it is there within milliseconds, or the machine is too far gone to give one."""
RESERVE_SECONDS = 1.0
"""Of the grace, for telling training and for the journal's last words; a third where the grace is shorter."""
LOOK_SECONDS = 0.6
"""Long enough to see how fast an upload goes: it tells four times a second."""


class Budget:
    """How long a step of leaving may take. Without a ``grace`` each step has its usual time."""

    def __init__(self, grace: float | None = None) -> None:
        self._end = None if grace is None else time.monotonic() + grace
        self._reserve = 0.0 if grace is None else min(RESERVE_SECONDS, grace / 3)

    def seconds(self, usual: float) -> float:
        """For one step: ``usual``, or what is left if that is less. Never nothing: a file must still be closed."""
        return usual if self._end is None else max(0.05, min(usual, self._end - time.monotonic()))

    def before_reserve(self) -> float:
        """Seconds until training has to be told."""
        return 0.0 if self._end is None else max(0.0, self._end - self._reserve - time.monotonic())


async def system_is_stopping(*, booted: Path = BOOTED, within: float = ASK_SECONDS) -> bool:
    """Whether systemd takes the whole machine down, of which a SIGTERM alone says nothing. It answers ``stopping``
    already while it stops us (facts/systemd.md). False where it is not there or does not answer."""
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
    """Why a SIGTERM means that training ends too; empty where podwatch alone is to leave. ``under_init``: what our own
    init says about itself."""
    if under_init == "pid1":
        return "the container is being stopped"
    return "the machine is being shut down" if await system_is_stopping(booted=BOOTED) else ""


def fits(left_bytes: int, sent_bytes: int, took_seconds: float, left_seconds: float) -> bool:
    """Whether ``left_bytes`` arrive in time at the speed just seen. Nothing sent meanwhile: only if nothing is left (it
    is being verified and published then)."""
    if left_bytes <= 0:
        return True
    return took_seconds > 0 and left_bytes * took_seconds <= left_seconds * sent_bytes


async def upload_if_it_fits(state: Callable[[], SyncState], budget: Budget) -> bool:
    """Wait for the upload in flight if it can be whole in time; whether none is in flight now."""
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
    state: Callable[[], SyncState] | None,
    beat: Callable[[], Awaitable[None]],
    end_sync: Callable[[], Awaitable[None]],
    tell: Callable[[], Awaitable[object]],
) -> None:
    """Upload and heartbeat side by side, then the end of sync, then training; none of them holds up the next."""
    if state is not None:
        said = asyncio.ensure_future(briefly(beat(), budget.before_reserve()))
        await upload_if_it_fits(state, budget)
        await briefly(end_sync() if said.done() else _after(said, end_sync), budget.before_reserve())
    await briefly(tell(), budget.seconds(RESERVE_SECONDS))


async def _after(said: "asyncio.Future[None]", then: Callable[[], Awaitable[None]]) -> None:
    """Sync lends the heartbeat its thread: it goes only once that has been written (or its time is over)."""
    await asyncio.wait([said])
    await then()


async def nothing() -> None:
    """Where there is no sync to end."""


def preempt_handlers(
    preempt: Callable[[str], None], grace: Callable[[], float]
) -> Mapping[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]:
    """What the control socket offers."""

    async def handle(params: dict[str, Any]) -> dict[str, Any]:
        by = str(params.get("by") or "")[:100]
        preempt(f"preempted{f' by {by}' if by else ''}")
        seconds = grace()
        message = f"preempted: podwatch requests training to end and exits, within {seconds:g} s"
        return {"message": message, "grace_seconds": seconds}

    return {"preempt": handle}
