"""The daemon's side of an upload: start a child process (in a systemd unit of its own where that is possible), give it
its job, relay its messages, kill it.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.domain.errors import HostError, InternalError, PodwatchError, RemoteError
from podwatch.stores.base import ChildCalls, Progress
from podwatch.stores.credentials import Credentials
from podwatch.stores.open_store import parse_store_url
from podwatch.sync.child_protocol import parse_line
from podwatch.sync.upload.child_job import UploadJob
from podwatch.system import procfs
from podwatch.system.child import give, run_child
from podwatch.system.environment_without_secrets import scrubbed_environment
from podwatch.system.pinned_directories import RootReplaced

# -- systemd unit of the child ---------------------------------------------------------------------------------------
# With a cgroup for each service, nice and autogroup no longer count between services: a child in podwatch's own
# cgroup would get as much of a busy machine as training. A scope keeps what the child needs: its pipes, its parent,
# the sandbox. Where systemd refuses, and everywhere else, session, autogroup and nice value are used.

CPU_WEIGHT = 2
"""Every other unit has 100: measured 95:5 against a busy neighbour. Idle cores are used fully anyway."""
IO_WEIGHT = CPU_WEIGHT
"""The same for disks whose scheduler supports weights. The idle class is not used: it starves."""
PROBE_SECONDS = 5.0
_NAME = "--unit="


def unit_of(prefix: tuple[str, ...]) -> str:
    """The unit that ``prefix`` creates; empty for none."""
    return next((f"{word.removeprefix(_NAME)}.scope" for word in prefix if word.startswith(_NAME)), "")


class OwnUnit:
    """``prefix`` goes before the child's command. Tried once per process; ``refused`` after a failure gives it up."""

    def __init__(self, environ: Mapping[str, str] | None = None, running: Path = Path("/run/systemd/system")) -> None:
        self._environ = os.environ if environ is None else environ
        self._running = running
        self._works: bool | None = None
        self._numbers = itertools.count(1)

    async def prefix(self) -> tuple[str, ...]:
        """Empty where no unit can be created."""
        program = shutil.which("systemd-run", path=self._environ.get("PATH"))
        if self._works is None:
            service = "INVOCATION_ID" in self._environ and os.geteuid() == 0 and self._running.is_dir()
            self._works = program is not None and service and await self._try(program)
        return self._command(program) if self._works and program is not None else ()

    def refused(self) -> None:
        """The child did not start in the unit."""
        self._works = False

    async def _try(self, program: str) -> bool:
        try:
            return (await run_child([*self._command(program), "true"], timeout=PROBE_SECONDS)).ok
        except HostError:
            return False

    def _command(self, program: str) -> tuple[str, ...]:
        name = f"podwatch-upload-{os.getpid()}-{next(self._numbers)}"
        return (
            program, "--scope", "--quiet", "--collect", f"{_NAME}{name}", f"--property=CPUWeight={CPU_WEIGHT}",
            f"--property=IOWeight={IO_WEIGHT}", "--",
        )  # fmt: skip


# -- child started ahead ---------------------------------------------------------------------------------------------
# Loading Python and the SDK takes almost half a second. One child is started while a checkpoint is still being
# written, so that the finished checkpoint need not wait.

AT_ONCE = 1 << 16
"""Bytes of child output read at once: some 200 files, a few milliseconds of the loop."""
NICE = 15
"""Autogroup and nice value of an upload that is not urgent: beside one busy neighbour it gets 3 % of a core (sched(7)).
"""


@dataclass(slots=True)
class Child:
    """A running ``podwatch.sync.upload.child_main`` without a job; ``unit``: its own systemd unit, empty for none."""

    process: asyncio.subprocess.Process
    unit: str

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

    async def take(self, nice: int) -> Child:
        """The waiting child, or a new one, with this nice value; the caller owns it from now on."""
        async with self._turn:
            self._expected = False
            child, self._waiting = self._waiting, None
            if child is None or not child.lives:
                child = await self._start()
            give(child.process.pid, nice)
            return child

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
                    self._waiting = await self._start()
            elif not self._expected and child is not None:
                self._waiting = None
                await _end(child)

    async def _start(self) -> Child:
        prefix = await self._unit.prefix() if self._unit is not None else ()
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-P",
            "-m",
            "podwatch.sync.upload.child_main",
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
        return Child(process, unit_of(prefix))


async def _end(child: Child) -> None:
    child.kill()
    await child.process.communicate()


# -- upload ----------------------------------------------------------------------------------------------------------

RATE_MESSAGES = 40
"""Progress messages over which the rate is measured: the child sends four a second."""
_LINE_LIMIT = 8 << 20
"""Bytes: 10,000 part hashes of one file are about half a megabyte of JSON."""


class SetVoid(PodwatchError):  # noqa: N818
    """The checkpoint on disk is no longer the one that was found complete: it was deleted, replaced or changed."""


class SetForeign(SetVoid):
    """The checkpoint contains a file that is not the training's: nothing of it is sent."""


class UploadStopped(PodwatchError):  # noqa: N818
    """podwatch stopped the upload (``kill``)."""


Heard = Callable[[Sequence[dict[str, Any]]], Awaitable[None]]
"""Called, in order, with the child's messages of types ``begun``, ``part`` and ``object``: all that arrived while the
previous batch was written, so that many small files share one commit."""
_TOLD = frozenset({"begun", "part", "object"})


class Upload:
    """One child process. ``run`` returns when all files of the job are in the store; ``kill`` ends it at once."""

    def __init__(self, job: UploadJob, children: Children, nice: int = NICE) -> None:
        self.job, self._children, self._nice = job, children, nice
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False
        self._progress: deque[tuple[float, int]] = deque(maxlen=RATE_MESSAGES)
        """(monotonic second, bytes sent over the line) of the last messages."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def rate(self) -> float | None:
        """Bytes per second over the last messages; None before the second one. It falls while none comes."""
        if len(self._progress) < 2:
            return None
        (began, first), (_, last) = self._progress[0], self._progress[-1]
        return (last - first) / max(time.monotonic() - began, 1e-3)

    def kill(self) -> None:
        self._killed = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def run(self, credentials: Credentials | None, heard: Heard, on_progress: Progress) -> None:
        """Raises SetVoid, RootReplaced, RemoteError (with ``transient``), or UploadStopped after ``kill``."""
        child = await self._children.take(self._nice)
        process = self._process = child.process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        tail = bytearray()
        drain = asyncio.ensure_future(_drain(process.stderr, tail))
        failure: dict[str, Any] | None = None
        calls = ChildCalls()
        done = spoke = False
        try:
            if self._killed:
                child.kill()
            with contextlib.suppress(ConnectionError):
                process.stdin.write(self.job.to_line(credentials))
                await process.stdin.drain()
            async for messages in _batches(process.stdout):
                if telling := [m for m in messages if m.get("type") in _TOLD]:
                    await heard(telling)
                spoke = True
                for message in messages:
                    calls.hear(message)
                    if message.get("type") == "progress":
                        done_bytes = int(message["bytes"])
                        self._progress.append((time.monotonic(), done_bytes - int(message.get("there", 0))))
                        on_progress(done_bytes)
                    elif message.get("type") == "error":
                        failure = message
                    elif message.get("type") == "done":
                        done = True
            code = await process.wait()
        finally:
            child.kill()
            await process.wait()
            process.stdin.close()
            await drain
        if done and code == 0:
            return
        if self._killed:
            raise UploadStopped("the upload was stopped", where=f"step {self.job.step}")
        if failure is not None:
            raise _error(failure)
        if not spoke:
            self._children.refused(child)
        last = tail.decode(errors="replace").strip().splitlines()[-1:]
        raise RemoteError(
            f"the upload process ended early ({'killed by signal ' + str(-code) if code < 0 else f'exit {code}'})",
            where=f"step {self.job.step}",
            fix=f"podwatch starts it again{': ' + last[0][:200] if last else ''}",
        )


async def _batches(stream: asyncio.StreamReader) -> AsyncIterator[list[dict[str, Any]]]:
    """All messages since the last batch, until the stream ends."""
    rest = b""
    while chunk := await stream.read(AT_ONCE):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LINE_LIMIT:
            raise InternalError("the upload process sent a line that is too long", fix="please report this")
        yield [parse_line(line) for line in lines]


def _error(message: dict[str, Any]) -> PodwatchError:
    what, where, fix = (str(message.get(name, "")) for name in ("what", "where", "fix"))
    kind = message.get("kind")
    if kind == "changed":
        return SetVoid(what, where=where)
    if kind == "foreign":
        return SetForeign(what, where=where)
    if kind == "replaced":
        return RootReplaced(what, where=where, fix=fix)
    if kind == "internal":
        return InternalError(f"the upload failed inside podwatch: {what}", where=where, fix="please report this")
    return RemoteError(what, where=where, fix=fix, transient=bool(message.get("transient")))


async def _drain(stream: asyncio.StreamReader, tail: bytearray) -> None:
    while data := await stream.read(4096):
        tail += data
        del tail[:-4096]
