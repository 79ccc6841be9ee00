"""The end of the daemon: tasks and steps that end within a deadline, and preemption.

Preemption means that this machine is taken away within seconds (docs/pods.md). Steps, each with its own
deadline: write the heartbeat ``preempted``, so that a replacement does not wait; finish the upload in progress if there
is time; request training to end; store what it saves until it ends. All within ``[recovery] preempt_grace``, because an
unannounced SIGKILL follows.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podwatch.app.lost_saves import to_wait_for
from podwatch.app.notifications import EventBus
from podwatch.app.preemption_grace import RESERVE_SECONDS, Budget, upload_if_it_fits
from podwatch.domain.errors import ConfigurationError, HostError, PodwatchError, is_refusal
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.lease import HolderState, LeaseAction
from podwatch.job.exit_code import Verdict
from podwatch.recovery.perform import tell_to_end
from podwatch.trainer.trainer_handle import TrainerHandle

if TYPE_CHECKING:
    from podwatch.app.backup.backup import Backup
    from podwatch.app.components import Components
    from podwatch.app.loop_wiring import DaemonLoops
    from podwatch.app.store_jobs import StoreJobs

AGAIN_SECONDS = 0.05
LOOK_AGAIN_SECONDS = 0.1
"""At a preemption: pause between two looks at the end of training and at its last checkpoint."""


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
        self.first: int | None = None
        """The code that was asked for first; None while the daemon runs."""
        self.preempted = ""
        """The reason of the preemption; empty without one."""
        self.verdict: Verdict | None = None
        """How the run ended here; None while that is not decided. Set by ``app/end_of_run.py`` only."""
        self.waits_for = ""
        """What the end of a finished run still waits for, as text."""

    def leave(self, code: int) -> None:
        """End the daemon soon with this exit code."""
        if self.first is None:
            self.first = code
            self.code = code
        self._asked.set()

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


class LastWords:
    """What a preempted daemon does last. Each step may hang."""

    def __init__(self, parts: "Components", loops: "DaemonLoops", store_jobs: "StoreJobs", why: str) -> None:
        self._parts, self._loops, self._store_jobs, self._why = parts, loops, store_jobs, why

    @property
    def backup(self) -> "Backup | None":
        return self._parts.backup

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
            sets = await self._loops.guarding.look(writers_ended=writers_ended)
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


async def say_goodbye(budget: Budget, farewell: LastWords) -> None:
    """Write the heartbeat, and finish the upload in progress if half of the grace is enough for it; then request
    training to end, and store what it saves until it ends. None of the steps can block the next."""
    backup, said = farewell.backup, None
    if backup is not None:
        half = budget.half()
        said = asyncio.ensure_future(briefly(farewell.beat(), budget.before_reserve()))
        await upload_if_it_fits(backup, half)
        await asyncio.wait([said], timeout=half.before_reserve())
    await briefly(farewell.end_training(), budget.seconds(RESERVE_SECONDS))
    await briefly(farewell.training_ended(), budget.before_reserve())
    await _store_last(budget, farewell, said)


STOP_SECONDS = 0.5
"""For stopping sync, at the end of the grace: half of the reserve."""


async def beside(goodbye: Awaitable[None], record: Awaitable[None], budget: Budget) -> None:
    """The goodbye, and the record of a job's verdict beside it: the goodbye can take all of the grace, and an attempt
    without a record counts as one that failed."""
    recorded = asyncio.ensure_future(briefly(record, budget.before_reserve()))
    await goodbye
    await recorded


BEAT_SECONDS = 2.0
"""How long the heartbeat ``preempted`` waits for training to end: another pod trains at once when it reads it."""


async def say_goodbye_of_job(budget: Budget, farewell: LastWords) -> None:
    """Let training end and store what it saved in its last seconds, as far as the time goes; the heartbeat comes early,
    because the engine may take less time than it allows."""
    await briefly(farewell.end_training(), budget.seconds(RESERVE_SECONDS))
    ended = asyncio.ensure_future(briefly(farewell.training_ended(), budget.before_reserve()))
    await asyncio.wait([ended], timeout=min(BEAT_SECONDS, budget.before_reserve() / 2))
    said = None
    if farewell.backup is not None:
        said = asyncio.ensure_future(briefly(farewell.beat(), budget.before_reserve()))
    await ended
    await _store_last(budget, farewell, said)


async def _store_last(budget: Budget, farewell: LastWords, said: "asyncio.Future[None] | None") -> None:
    """Store the last checkpoint if there is time, and stop sync once the heartbeat is written or its time is over: it
    uses sync's thread."""
    backup = farewell.backup
    if backup is None:
        return
    await briefly(farewell.last_checkpoint(), budget.before_reserve())
    if said is not None:
        await asyncio.wait([said])
    await briefly(backup.stop(), budget.seconds(STOP_SECONDS))
