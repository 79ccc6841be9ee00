"""The parent's side of a restore: start the child, relay its messages, kill it. Blocking: for a thread."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from podwatch.domain.errors import HostError, IntegrityError, InternalError, PodwatchError, RemoteError, SaveGone
from podwatch.stores.base import ChildCalls
from podwatch.stores.credentials import Credentials
from podwatch.sync.child_protocol import parse_line
from podwatch.sync.restore.child_job import Fetched, FetchJob
from podwatch.system.environment_without_secrets import scrubbed_environment

Told = Callable[[int, int], None]
"""(bytes that are here and verified or in flight, bytes that came over the line)."""


class Fetcher(Protocol):
    def fetch(self, job: FetchJob, told: Told, keep_open: Sequence[int] = ()) -> Fetched:
        """Fetch the job's checkpoint into staging. ``keep_open`` are descriptors (locks) to hold meanwhile. Raises
        IntegrityError, SaveGone, RemoteError, HostError or OSError."""
        ...

    def kill(self) -> None:
        """End it at once, from any thread; staged bytes stay for the next time."""
        ...


class FetchProcess:
    """One child at a time."""

    def __init__(self, credentials: Callable[[], Credentials | None]) -> None:
        self._credentials = credentials
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def kill(self) -> None:
        self._killed = True
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def fetch(self, job: FetchJob, told: Told, keep_open: Sequence[int] = ()) -> Fetched:
        line = job.to_line(self._credentials())
        self._killed = False
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "podwatch.sync.restore.child_main", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=scrubbed_environment(os.environ),
            cwd="/",
            pass_fds=tuple(keep_open),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        last: list[str] = []
        calls = ChildCalls()
        drain = threading.Thread(target=_drain, args=(process, last), daemon=True)
        drain.start()
        done: dict[str, Any] | None = None
        failure: dict[str, Any] | None = None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
            for raw in process.stdout:
                message = parse_line(raw)
                calls.hear(message)
                kind = message.get("type")
                if kind == "progress":
                    told(int(message["bytes"]), int(message["downloaded"]))
                elif kind == "done":
                    done = message
                elif kind == "error":
                    failure = message
        finally:
            self._process = None
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            drain.join(5.0)
        if done is not None:
            return Fetched(tuple(done["staged"]), int(done["downloaded"]))
        if failure is not None:
            raise raised(failure)
        if self._killed:
            raise HostError("the restore was stopped", where=f"step {job.step}", fix="the next one continues there")
        raise HostError(
            f"the restore process ended early (killed, perhaps for lack of memory; exit {process.returncode})",
            where=f"step {job.step}",
            fix=f"restore again, it continues from there{': ' + last[-1][:200] if last else ''}",
        )


def raised(message: dict[str, Any]) -> BaseException:
    """The error that the child reported."""
    what, where, fix = (str(message.get(name, "")) for name in ("what", "where", "fix"))
    kind = message.get("kind")
    if kind == "disk":
        return OSError(0, what, where or None)
    simple: dict[Any, type[PodwatchError]] = {"gone": SaveGone, "damaged": IntegrityError, "host": HostError}
    if kind in simple:
        return simple[kind](what, where=where, fix=fix)
    if kind == "store":
        return RemoteError(what, where=where, fix=fix, transient=bool(message.get("transient")))
    if kind == "refused":
        return PodwatchError(what, where=where, fix=fix)
    return InternalError(f"the restore failed inside podwatch: {what}", where=where, fix="please report this")


def _drain(process: subprocess.Popen[bytes], last: list[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        last[:] = [line.decode(errors="replace").strip()]
    process.stderr.close()
