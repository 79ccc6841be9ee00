"""Preemption: this machine is taken away within seconds (docs/pods.md).

Steps, each with its own deadline: write the heartbeat ``preempted``, so that a replacement does not wait; finish the
upload in progress if there is time; request training to end; store what it saves until it ends. All within ``[recovery]
preempt_grace``, because an unannounced SIGKILL follows.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING

from podwatch.app.lost_saves import to_wait_for
from podwatch.app.shutdown import briefly
from podwatch.domain.errors import ConfigurationError, HostError, PodwatchError, is_refusal
from podwatch.domain.lease import HolderState, LeaseAction
from podwatch.recovery.perform import tell_to_end
from podwatch.trainer.trainer_handle import TrainerHandle

if TYPE_CHECKING:
    from podwatch.app.backup.backup import Backup
    from podwatch.app.build import Components
    from podwatch.app.store_jobs import StoreJobs

BOOTED = Path("/run/systemd/system")
ASK_SECONDS = 0.5
"""Timeout of systemd's answer, which normally takes milliseconds."""
BEAT_SECONDS = 2.0
"""How long the heartbeat ``preempted`` of a job waits for training to end: another pod trains at once when it reads
it."""
STOP_SECONDS = 0.5
"""For stopping sync, at the end of the grace: half of the reserve."""
LOOK_AGAIN_SECONDS = 0.1
"""Pause between two looks at the end of training and at its last checkpoint."""
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


async def why_preempted(under_init: str) -> str:
    """Why a SIGTERM also ends training; empty if only podwatch exits. ``under_init``: the value of UNDER_INIT."""
    if under_init == "job":
        return "the engine ended the job"
    if under_init == "pid1":
        return "the container is being stopped"
    return "the machine is being shut down" if await system_is_stopping(booted=BOOTED) else ""


class Preemption:
    """What a preempted daemon does last. Each step may hang; none can block the next."""

    def __init__(self, parts: "Components", store_jobs: "StoreJobs", why: str, *, job: bool) -> None:
        """``job``: an engine ends the job. It may take less time than it allows, so training is ended first; elsewhere
        the upload in progress gets half of the grace before that."""
        self._parts, self._store_jobs, self._why, self._job = parts, store_jobs, why, job

    async def run(self, budget: Budget, record: Awaitable[None]) -> None:
        """All steps, and ``record``, which records a job's verdict, at the same time: the steps can take all of the
        grace, and an attempt without a record counts as one that failed."""
        recorded = asyncio.ensure_future(briefly(record, budget.before_reserve()))
        backup, said = self._parts.backup, None
        if backup is not None and not self._job:
            half = budget.half()
            said = asyncio.ensure_future(briefly(self.beat(), budget.before_reserve()))
            await upload_if_it_fits(backup, half)
            await asyncio.wait([said], timeout=half.before_reserve())
        await briefly(self.end_training(), budget.seconds(RESERVE_SECONDS))
        ended = asyncio.ensure_future(briefly(self.training_ended(), budget.before_reserve()))
        if backup is not None and said is None:
            await asyncio.wait([ended], timeout=min(BEAT_SECONDS, budget.before_reserve() / 2))
            said = asyncio.ensure_future(briefly(self.beat(), budget.before_reserve()))
        await ended
        if backup is not None:
            await briefly(self.last_checkpoint(), budget.before_reserve())
            if said is not None:
                await asyncio.wait([said])  # it uses sync's thread
            await briefly(backup.stop(), budget.seconds(STOP_SECONDS))
        await recorded

    async def beat(self) -> None:
        """Write the heartbeat ``preempted``."""
        await self._store_jobs.say(HolderState.PREEMPTED)

    async def end_training(self) -> None:
        """Request training to end; it can save before it does."""
        recovery = self._parts.recovery
        await tell_to_end(recovery.context.tools, recovery.handle, self._why)

    async def training_ended(self) -> None:
        """Returns once nothing of training is left, and each checkpoint that can be complete was found to be."""
        parts, handle = self._parts, self._parts.recovery.handle
        while handle is not None and not await _ended(handle):
            await parts.run.clock.sleep(LOOK_AGAIN_SECONDS)
        # Other nodes can still write into the same directory.
        writers_ended = handle is not None and parts.gang is None
        while True:
            sets = await parts.checkpoints.rescans.rescan(writers_ended=writers_ended)
            if parts.backup is None or to_wait_for(sets, None, settled=True) is None:
                return
            await parts.run.clock.sleep(LOOK_AGAIN_SECONDS)

    async def last_checkpoint(self) -> None:
        """Returns once the newest complete checkpoint is in the store, or it is certain that it cannot be stored."""
        backup = self._parts.backup
        while backup is not None and backup.lease.decision.act in (LeaseAction.HOLD, LeaseAction.SETTLE):
            try:
                await backup.sync_now()
                return
            except (HostError, ConfigurationError):
                return  # nothing to store, or podwatch must not publish
            except PodwatchError as error:
                if is_refusal(error):
                    return
            await self._parts.run.clock.sleep(LOOK_AGAIN_SECONDS)


async def _ended(handle: TrainerHandle) -> bool:
    """Whether all processes of a trainer were seen to end. A search of /proc for each look would cost a core."""
    found = await handle.tree()
    if not found.ok or found.value:
        return False
    found = await handle.tree(sweep=True)
    return found.ok and not found.value
