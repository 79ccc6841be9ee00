"""The daemon's side of an upload: give a child its job, relay its messages, kill it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from podwatch.domain.errors import InternalError, PodwatchError, RemoteError
from podwatch.judgement.upload_priority import Level
from podwatch.stores.calls import ChildCalls
from podwatch.stores.credentials import Credentials
from podwatch.sync.children import AT_ONCE, Child, Children
from podwatch.sync.job import UploadJob
from podwatch.sync.lines import parse_line
from podwatch.system.pinned import RootReplaced

_LINE_LIMIT = 8 << 20
"""Bytes: 10,000 part hashes of one file are about half a megabyte of JSON."""


class SetVoid(PodwatchError):  # noqa: N818
    """The checkpoint on disk is no longer the one that was found complete: it was deleted, replaced or changed."""


class SetForeign(SetVoid):
    """The checkpoint contains a file that is not the training's: nothing of it is sent."""


class UploadStopped(PodwatchError):  # noqa: N818
    """podwatch stopped the upload (``kill``)."""


class ChildReplaced(PodwatchError):  # noqa: N818
    """podwatch ended the child so that another one continues (``replace``)."""


Heard = Callable[[Sequence[dict[str, Any]]], Awaitable[None]]
"""Called, in order, with the child's messages of types ``begun``, ``part`` and ``object``: all that arrived while the
previous batch was written, so that many small files share one commit."""
_TOLD = frozenset({"begun", "part", "object"})


class Upload:
    """One child process. ``run`` returns when all files of the job are in the store; ``kill`` ends it at once."""

    def __init__(self, job: UploadJob, children: Children) -> None:
        self.job, self._children = job, children
        self._process: asyncio.subprocess.Process | None = None
        self._child: Child | None = None
        self._killed = self._replaced = False
        self.total_bytes = sum(f.size for f in job.files)
        self.done_bytes = self.line_bytes = 0
        """Bytes in the store, and bytes sent over the line; the rest was there before."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def step(self) -> int:
        return self.job.step

    @property
    def killed(self) -> bool:
        return self._killed

    def kill(self) -> None:
        self._killed = True
        self._end()

    def replace(self) -> None:
        """End the child: ``run`` raises ChildReplaced, and another child can send what is missing."""
        self._replaced = True
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def give(self, level: Level) -> bool:
        """Set the running child to this level; False where that did not fully work."""
        return self._child is None or await self._children.give(self._child, level)

    async def run(self, credentials: Credentials | None, heard: Heard, on_progress: Callable[[int], None]) -> None:
        """Raises SetVoid, RootReplaced, RemoteError (with ``transient``), UploadStopped after ``kill``, or
        ChildReplaced after ``replace``."""
        child = self._child = await self._children.take()
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
            if self._killed or self._replaced:
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
                        self.done_bytes = int(message["bytes"])
                        self.line_bytes = self.done_bytes - int(message.get("there", 0))
                        on_progress(self.done_bytes)
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
            self._child = None
        if done and code == 0:
            return
        if self._killed:
            raise UploadStopped("the upload was stopped", where=f"step {self.job.step}")
        if failure is not None:
            raise _error(failure)
        if self._replaced:
            raise ChildReplaced("another upload process continues", where=f"step {self.job.step}")
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
