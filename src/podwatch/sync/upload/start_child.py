"""The daemon's side of an upload: start a child process, give it its job, relay its messages, kill it."""

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from podwatch.domain.errors import InternalError, PodwatchError, RemoteError
from podwatch.stores.base import ChildCalls, Progress
from podwatch.stores.credentials import Credentials
from podwatch.stores.open_store import parse_store_url
from podwatch.sync.child_protocol import parse_line
from podwatch.sync.upload.child_job import UploadJob
from podwatch.system.environment_without_secrets import scrubbed_environment
from podwatch.system.pinned_directories import RootReplaced

NICE = 15
"""Nice value of an upload that is not urgent: beside one busy neighbour it gets 3 % of a core (sched(7))."""
AT_ONCE = 1 << 16
"""Bytes of child output read at once: some 200 files, a few milliseconds of the loop."""
RATE_MESSAGES = 40
"""Progress messages over which the rate is measured: the child sends four a second."""
_LINE_LIMIT = 8 << 20
"""Bytes: 10,000 part hashes of one file are about half a megabyte of JSON."""


class SetVoid(PodwatchError):  # noqa: N818
    """The checkpoint on disk is no longer the one that was found complete: it was deleted, replaced or changed."""


class SetForeign(SetVoid):
    """The trainer's user cannot read a file of the checkpoint: nothing of it is sent."""


class UploadStopped(PodwatchError):  # noqa: N818
    """podwatch stopped the upload (``kill``)."""


Heard = Callable[[Sequence[dict[str, Any]]], Awaitable[None]]
"""Called, in order, with the child's messages of types ``begun``, ``part`` and ``object``: all that arrived while the
previous batch was written, so that many small files share one commit."""
_TOLD = frozenset({"begun", "part", "object"})


class Upload:
    """One child process. ``run`` returns when all files of the job are in the store; ``kill`` ends it at once."""

    def __init__(self, job: UploadJob, nice: int = NICE) -> None:
        self.job, self._nice = job, nice
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
        process = self._process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        tail = bytearray()
        drain = asyncio.ensure_future(_drain(process.stderr, tail))
        failure: dict[str, Any] | None = None
        calls = ChildCalls()
        done = False
        try:
            if self._killed:
                self.kill()
            with contextlib.suppress(ConnectionError):
                process.stdin.write(self.job.to_line(credentials))
                await process.stdin.drain()
            async for messages in _batches(process.stdout):
                if telling := [m for m in messages if m.get("type") in _TOLD]:
                    await heard(telling)
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
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            process.stdin.close()
            await drain
        if done and code == 0:
            return
        if self._killed:
            raise UploadStopped("the upload was stopped", where=f"step {self.job.step}")
        if failure is not None:
            raise _error(failure)
        last = tail.decode(errors="replace").strip().splitlines()[-1:]
        raise RemoteError(
            f"the upload process ended early ({'killed by signal ' + str(-code) if code < 0 else f'exit {code}'})",
            where=f"step {self.job.step}",
            fix=f"podwatch starts it again{': ' + last[0][:200] if last else ''}",
        )

    async def _start(self) -> asyncio.subprocess.Process:
        kind = parse_store_url(self.job.store).scheme  # what it loads depends on the kind of store
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "podwatch.sync.upload.child_main",
            str(os.getpid()),
            kind,
            str(self._nice),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=scrubbed_environment(os.environ),
            cwd="/",
            limit=AT_ONCE,
            start_new_session=True,
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
