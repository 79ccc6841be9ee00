"""The end of the daemon: tasks and steps that end within a deadline, and preemption.

Preemption means that this machine is taken away within seconds (docs/maintenance.md). Steps, each with its own
deadline: start no upload; finish the upload in progress if there is time; write the heartbeat ``preempted``, so that a
replacement does not wait; request training to end. All within ``[recovery] preempt_grace``, because an unannounced
SIGKILL follows.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Protocol

from podwatch.daemon.notifications import EventBus
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.policy.exit_code import Verdict
from podwatch.sync.interfaces import SyncStatus

AGAIN = -1
"""Not an exit code: the daemon restarts inside this process, because the state database can be read again."""
AGAIN_SECONDS = 0.05


async def end_tasks(tasks: Iterable["asyncio.Task[Any]"], *, within: float) -> None:
    """Cancel the tasks until they have ended, for at most ``within`` seconds. Their errors are dropped.

    One cancel is not enough: ``wait_for`` of Python 3.11, which libraries use too, swallows a cancellation that arrives
    together with its result, and the task continues.
    """
    left = {task for task in tasks if not task.done()}
    end = asyncio.get_running_loop().time() + within
    while left and asyncio.get_running_loop().time() < end:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio logs nothing


async def briefly(step: Awaitable[Any], seconds: float = 8.0) -> None:
    """Run one shutdown step for at most ``seconds``; a failure or a timeout is ignored, so that the next step runs."""
    try:
        async with asyncio.timeout(seconds):
            await step
    except (TimeoutError, PodwatchError, OSError):
        pass


class Exit:
    """How the daemon is asked to end. Training continues. Construct it on the event loop."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self.code = 0
        """The exit code, or ``AGAIN``."""
        self.first: int | None = None
        """The code that was asked for first; None while the daemon runs."""
        self.preempted = ""
        """The reason of the preemption; empty without one."""
        self.verdict: Verdict | None = None
        """How the run ended here; None while that is not decided. Set by ``daemon/end_of_run.py`` only."""
        self.waits_for = ""
        """What the end of a finished run still waits for, as text."""

    @property
    def again(self) -> bool:
        return self.code == AGAIN

    def leave(self, code: int) -> None:
        """End the daemon soon with this exit code."""
        if self.first is None:
            self.first = code
            self.code = code
        elif self.again:
            self.code = code
        self._asked.set()

    def restart(self) -> None:
        """Restart the daemon inside this process."""
        self.leave(AGAIN)

    def preempt(self, why: str) -> None:
        """End the daemon soon, and request training to end."""
        self.preempted = self.preempted or why
        self.leave(0)

    async def wait(self) -> None:
        await self._asked.wait()


class BackgroundTasks:
    """The tasks of the daemon. One that fails is a bug: it is reported and podwatch exits, so that systemd or init
    starts a new daemon."""

    def __init__(self, emit: EventBus, leaving: Exit) -> None:
        self._emit, self._exit = emit, leaving
        self._tasks: set[asyncio.Task[Any]] = set()

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Keep a reference to a task until it ends. Its errors are its caller's."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self.keep(task)
        task.add_done_callback(self._ended)

    async def end(self, *, within: float) -> None:
        await end_tasks(self._tasks, within=within)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled() or task.exception() is None:
            return
        self._emit.say(
            EventName.DAEMON_STOPPING,
            f"internal error in {task.get_name()}: {task.exception()!r}. podwatch exits, training continues",
            Severity.CRITICAL,
        )
        self._exit.leave(1)


# -- preemption ------------------------------------------------------------------------------------------------------

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
    if under_init == "job":
        return "the engine ended the job"
    if under_init == "pid1":
        return "the container is being stopped"
    return "the machine is being shut down" if await system_is_stopping(booted=BOOTED) else ""


def fits(left_bytes: int, sent_bytes: int, took_seconds: float, left_seconds: float) -> bool:
    """Whether ``left_bytes`` can be sent within ``left_seconds`` at the rate of ``sent_bytes`` in ``took_seconds``. If
    nothing was sent: only if nothing is left, because the upload is being verified and published then."""
    if left_bytes <= 0:
        return True
    return took_seconds > 0 and left_bytes * took_seconds <= left_seconds * sent_bytes


class Uploading(Protocol):
    def status(self) -> SyncStatus: ...


async def upload_if_it_fits(uploads: Uploading, budget: Budget) -> bool:
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


class Farewell(Protocol):
    """What a preempted daemon does last. Each step may hang."""

    @property
    def syncer(self) -> "Ending | None": ...

    async def beat(self) -> None:
        """Write the heartbeat ``preempted``."""
        ...

    async def end_training(self) -> None: ...


class JobFarewell(Farewell, Protocol):
    """In job mode training has been told already, by init, and may save before it ends."""

    async def training_ended(self) -> None:
        """Returns once it has ended and its last checkpoint was looked at."""
        ...

    async def last_checkpoint(self) -> None:
        """Returns once the last checkpoint is in the store."""
        ...


class Ending(Uploading, Protocol):
    async def stop(self) -> None: ...


async def say_goodbye(budget: Budget, farewell: Farewell) -> None:
    """Finish the upload and write the heartbeat in parallel, then end sync, then request training to end. None of the
    steps can block the next."""
    syncer = farewell.syncer
    if syncer is not None:
        said = asyncio.ensure_future(briefly(farewell.beat(), budget.before_reserve()))
        await upload_if_it_fits(syncer, budget)
        await briefly(_stop_after(said, syncer), budget.before_reserve())
    await briefly(farewell.end_training(), budget.seconds(RESERVE_SECONDS))


BEAT_SECONDS = 2.0
"""How long the heartbeat ``preempted`` waits for training to end: another pod trains at once when it reads it."""


async def say_goodbye_of_job(budget: Budget, farewell: JobFarewell) -> None:
    """Let training end and store what it saved in its last seconds, as far as the time goes; the heartbeat comes early,
    because the engine may take less time than it allows."""
    await briefly(farewell.end_training(), budget.seconds(RESERVE_SECONDS))
    ended = asyncio.ensure_future(briefly(farewell.training_ended(), budget.before_reserve()))
    await asyncio.wait([ended], timeout=min(BEAT_SECONDS, budget.before_reserve() / 2))
    syncer = farewell.syncer
    if syncer is not None:
        said = asyncio.ensure_future(briefly(farewell.beat(), budget.before_reserve()))
        await ended
        await briefly(farewell.last_checkpoint(), budget.before_reserve())
        await briefly(_stop_after(said, syncer), budget.before_reserve())
    else:
        await ended


async def _stop_after(said: "asyncio.Future[None]", syncer: Ending) -> None:
    """Stop sync after the heartbeat was written or timed out: it uses sync's thread."""
    if not said.done():
        await asyncio.wait([said])
    await syncer.stop()
