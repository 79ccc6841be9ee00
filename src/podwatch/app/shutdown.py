"""The end of the daemon: how it is asked for, and tasks and steps that end within a deadline."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any

from podwatch.app.event_bus import EventBus
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.job.exit_code import Verdict

AGAIN_SECONDS = 0.05
"""Pause between two cancellations of the same tasks."""
STEP_SECONDS = 8.0
"""Deadline of one shutdown step."""


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


async def briefly(step: Awaitable[Any], seconds: float = STEP_SECONDS) -> None:
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
