"""The upload's processes: one is started ahead while a save is still being written, and waits for its job.

Loading Python and the SDK takes the better part of half a second: the finished set need not wait for it.
"""

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass

from podwatch.stores.open import parse_store_url
from podwatch.sync.unit import OwnUnit
from podwatch.system import procfs
from podwatch.system.child import scrubbed_environment

AT_ONCE = 1 << 16
"""Bytes of what a child says taken at once: some 200 files, a few milliseconds of the loop."""


@dataclass(frozen=True, slots=True)
class Child:
    """A living ``podwatch.sync.child`` that has not been told anything yet; ``in_unit``: in a unit of its own."""

    process: asyncio.subprocess.Process
    in_unit: bool

    @property
    def lives(self) -> bool:
        """Asked of the kernel: the loop learns of an end a few turns later."""
        stat = procfs.read_stat(self.process.pid) if self.process.returncode is None else None
        return stat is not None and stat.state not in "ZXx"

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class Children:
    """Loop-side object. ``store`` is its URL: what the child loads goes by the kind of store."""

    def __init__(self, store: str, unit: OwnUnit | None = None) -> None:
        self._kind, self._unit = parse_store_url(store).scheme if store else "", unit
        self._waiting: Child | None = None
        self._expected = False
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int | None:
        """PID of the one that waits for its job, if there is one."""
        return self._waiting.process.pid if self._waiting is not None else None

    def expect(self, soon: bool) -> None:
        """A set will soon be ready to be sent, or none will: starts one ahead, or lets it go. Cheap, may be said as
        often as one likes."""
        if soon is not self._expected:
            self._expected = soon
            self._task = asyncio.create_task(self._follow(), name="upload child ahead")

    async def take(self) -> Child:
        """The one that waits, or a new one; it is the caller's from now on."""
        async with self._turn:
            self._expected = False
            child, self._waiting = self._waiting, None
            return child if child is not None and child.lives else await self._start()

    async def close(self) -> None:
        self._expected = False
        await self._follow()

    def refused(self, child: Child) -> None:
        """It ended without a word: if it was in a unit of its own, that is not tried again."""
        if child.in_unit and self._unit is not None:
            self._unit.refused()

    async def _follow(self) -> None:
        async with self._turn:
            child = self._waiting
            if self._expected and child is None:
                with contextlib.suppress(OSError):  # if it still cannot be started then, the upload says so
                    self._waiting = await self._start()
            elif not self._expected and child is not None:
                self._waiting = None
                child.kill()
                await child.process.communicate()

    async def _start(self) -> Child:
        prefix = await self._unit.prefix() if self._unit is not None else ()
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
        )
        return Child(process, bool(prefix))
