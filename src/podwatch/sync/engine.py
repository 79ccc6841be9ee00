"""The daemon's side of an upload: start the child, relay what it says, kill it."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from podwatch.domain.errors import InternalError, PodwatchError, RemoteError
from podwatch.stores.credentials import Credentials
from podwatch.sync.job import UploadJob
from podwatch.system.child import scrubbed_environment

_LINE_LIMIT = 8 << 20
"""Bytes: 10,000 part hashes of one file are about half a megabyte of JSON."""


class SetVoid(PodwatchError):  # noqa: N818
    """The set on disk is no longer what was found complete: it was deleted, replaced or written to."""


class UploadStopped(PodwatchError):  # noqa: N818
    """We ended it ourselves (``kill``)."""


OnObject = Callable[[dict[str, Any]], Awaitable[None]]


class Upload:
    """One child process. ``run`` returns when everything in the job is in the store; ``kill`` ends it at once."""

    def __init__(self, job: UploadJob) -> None:
        self.job = job
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def kill(self) -> None:
        self._killed = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def run(
        self, credentials: Credentials | None, on_object: OnObject, on_progress: Callable[[int], None]
    ) -> None:
        """Raises SetVoid, RemoteError (with ``transient``), or UploadStopped after ``kill``."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "podwatch.sync.child",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=scrubbed_environment(os.environ),
            cwd="/",
            limit=_LINE_LIMIT,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        tail = bytearray()
        drain = asyncio.ensure_future(_drain(process.stderr, tail))
        failure: dict[str, Any] | None = None
        done = False
        try:
            if self._killed:
                process.kill()
            with contextlib.suppress(ConnectionError):
                process.stdin.write(self.job.to_line(credentials))
                await process.stdin.drain()
            async for line in process.stdout:
                message = _parse(line)
                kind = message.get("type")
                if kind == "object":
                    await on_object(message)
                elif kind == "progress":
                    on_progress(int(message["bytes"]))
                elif kind == "error":
                    failure = message
                elif kind == "done":
                    done = True
            code = await process.wait()
        finally:
            self.kill_process(process)
            await process.wait()
            process.stdin.close()
            await drain
        if done and code == 0:
            return
        if self._killed:
            raise UploadStopped("upload was stopped", where=f"step {self.job.step}")
        if failure is not None:
            raise _error(failure)
        last = tail.decode(errors="replace").strip().splitlines()[-1:]
        raise RemoteError(
            f"upload process ended early ({'killed by signal ' + str(-code) if code < 0 else f'exit {code}'})",
            where=f"step {self.job.step}",
            fix=f"it is started again{': ' + last[0][:200] if last else ''}",
        )

    @staticmethod
    def kill_process(process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _error(message: dict[str, Any]) -> PodwatchError:
    what, where, fix = (str(message.get(name, "")) for name in ("what", "where", "fix"))
    kind = message.get("kind")
    if kind == "changed":
        return SetVoid(what, where=where)
    if kind == "internal":
        return InternalError(f"upload failed inside podwatch: {what}", where=where, fix="please report this")
    return RemoteError(what, where=where, fix=fix, transient=bool(message.get("transient")))


async def _drain(stream: asyncio.StreamReader, tail: bytearray) -> None:
    while data := await stream.read(4096):
        tail += data
        del tail[:-4096]
