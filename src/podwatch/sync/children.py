"""The upload's processes: one is started ahead while a checkpoint is still being written, and waits for its job.

Loading Python and the SDK takes almost half a second, for which the finished checkpoint then need not wait.
"""

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass

from podwatch.judgement.upload_priority import Level
from podwatch.stores.open import parse_store_url
from podwatch.sync.unit import CPU_WEIGHT, OwnUnit, unit_of
from podwatch.system import procfs
from podwatch.system.child import scrubbed_environment
from podwatch.system.priority import Given, give

AT_ONCE = 1 << 16
"""Bytes of child output read at once: some 200 files, a few milliseconds of the loop."""
NICE = {Level.LOWEST: 19, Level.RAISED: 10, Level.ORDINARY: 0}
"""Autogroup and nice values. Each step is about a fifth of CPU share: beside one busy neighbour, 19 gets 1.5 % of a
core, 10 gets 10 %, and 0 a fair share (sched(7))."""
WEIGHT = {Level.LOWEST: CPU_WEIGHT, Level.RAISED: 11, Level.ORDINARY: 100}
"""Unit weights; every other unit has 100."""
AUTOGROUP_AGAIN = 0.15
"""Seconds: the kernel accepts one change of an unprivileged process per 0.1 s."""


@dataclass(slots=True)
class Child:
    """A running ``podwatch.sync.child`` without a job; ``unit``: its own systemd unit, empty for none; ``level``: the
    priority that it got."""

    process: asyncio.subprocess.Process
    unit: str
    level: Level

    @property
    def in_unit(self) -> bool:
        return bool(self.unit)

    @property
    def lives(self) -> bool:
        """Asked of the kernel: the event loop learns of an exit a few turns later."""
        stat = procfs.read_stat(self.process.pid) if self.process.returncode is None else None
        return stat is not None and stat.state not in "ZXx"

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class Children:
    """Loop-side object. ``store`` is its URL: what the child loads depends on the kind of store."""

    def __init__(self, store: str, unit: OwnUnit | None = None) -> None:
        self._kind, self._unit = parse_store_url(store).scheme if store else "", unit
        self._waiting: Child | None = None
        self.level = Level.LOWEST
        """The level of the next upload."""
        self._expected = False
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int | None:
        """PID of the child that waits for its job, if there is one."""
        return self._waiting.process.pid if self._waiting is not None else None

    def expect(self, soon: bool) -> None:
        """A checkpoint will soon be ready to send, or none will: start a child ahead, or end it. Cheap: call it
        often."""
        if soon is not self._expected:
            self._expected = soon
            self._task = asyncio.create_task(self._follow(), name="upload child ahead")

    async def take(self) -> Child:
        """The waiting child, or a new one; the caller owns it from now on."""
        async with self._turn:
            self._expected = False
            child, self._waiting = self._waiting, None
            if child is not None and child.lives:
                if await self.give(child, self.level):
                    return child
                await _end(child)  # it had no job yet
            return await self._start(self.level)

    async def give(self, child: Child, level: Level) -> bool:
        """Set a running child to this level. False where that did not fully work: the nice value, which counts inside a
        CPU group, cannot be lowered without CAP_SYS_NICE; or systemd does not change the unit."""
        if child.level is level:
            return True
        child.level = level
        if child.unit and self._unit is not None:  # inside its own unit only the weight counts
            give(child.process.pid, NICE[level])
            return await self._unit.reweigh(child.unit, WEIGHT[level])
        given = await _set(child.process.pid, NICE[level])
        return given.autogroup and given.nice

    async def close(self) -> None:
        self._expected = False
        await self._follow()

    def refused(self, child: Child) -> None:
        """The child ended without a message: if it had its own unit, units are not used again."""
        if child.in_unit and self._unit is not None:
            self._unit.refused()

    async def _follow(self) -> None:
        async with self._turn:
            child = self._waiting
            if self._expected and child is None:
                with contextlib.suppress(OSError):  # if it still fails later, the upload reports it
                    self._waiting = await self._start(self.level)
            elif not self._expected and child is not None:
                self._waiting = None
                await _end(child)

    async def _start(self, level: Level) -> Child:
        prefix = await self._unit.prefix(WEIGHT[level]) if self._unit is not None else ()
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-P",
            "-m",
            "podwatch.sync.child",
            str(os.getpid()),
            self._kind,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=scrubbed_environment(os.environ),
            cwd="/",
            limit=AT_ONCE,
            start_new_session=True,
        )
        await _set(process.pid, NICE[level])
        return Child(process, unit_of(prefix), level)


async def _set(pid: int, value: int) -> Given:
    given = give(pid, value)
    if not given.autogroup:
        await asyncio.sleep(AUTOGROUP_AGAIN)
        given = give(pid, value)
    return given


async def _end(child: Child) -> None:
    child.kill()
    await child.process.communicate()
