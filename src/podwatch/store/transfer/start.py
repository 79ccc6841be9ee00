"""The parent's side of a transfer: start the child, hand on its messages, kill it. Blocking: for a thread."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from podwatch.domain.errors import HostError, IntegrityError, InternalError, PodwatchError, RemoteError, SaveGone
from podwatch.store.objects.errors import StoreOutage, StoreRefused
from podwatch.store.transfer.job import TransferJob
from podwatch.store.transfer.send import SourceChanged, SourceForeign
from podwatch.system.environment_without_secrets import scrubbed_environment

if TYPE_CHECKING:
    from podwatch.store.objects.b2 import B2Access
    from podwatch.store.objects.s3 import S3Access

Message = Callable[[dict[str, Any]], object]
_ERRORS: dict[str, type[PodwatchError]] = {
    "changed": SourceChanged, "foreign": SourceForeign, "gone": SaveGone, "damaged": IntegrityError, "host": HostError,
    "refused": PodwatchError,
}  # fmt: skip


class Transfer:
    """One child process. The job's descriptors must stay open until ``run`` returns."""

    def __init__(self, job: TransferJob) -> None:
        self.job, self._killed = job, False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def kill(self) -> None:
        """End it at once, from any thread. What was sent or staged counts the next time."""
        self._killed = True
        if (process := self._process) is not None:
            process.kill()

    def run(self, access: "B2Access | S3Access | None", on_message: Message) -> None:
        """Until everything is moved. ``on_message`` gets lines of the types ``piece`` and ``progress``. Raises what
        ended it: SourceChanged, SourceForeign, SaveGone, IntegrityError, RemoteError, HostError or OSError."""
        process = self._process = subprocess.Popen(
            [sys.executable, "-I", "-m", "podwatch.store.transfer", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=scrubbed_environment(os.environ),
            cwd="/",
            pass_fds=tuple(set(self.job.roots.values())),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        last: list[str] = []
        drain = threading.Thread(target=_drain, args=(process, last), daemon=True)
        drain.start()
        end: dict[str, Any] = {}
        try:
            if self._killed:
                process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(self.job.to_line(access))
                process.stdin.flush()
            for line in process.stdout:
                message = _message(line)
                if message.get("type") in ("done", "error"):
                    end = message
                on_message(message)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            drain.join(5.0)
        if end.get("type") == "done":
            return
        if end:
            raise _raised(end)
        if self._killed:
            raise HostError("the transfer was stopped", fix="the next one continues from there")
        raise HostError(
            f"the transfer process ended early (killed, perhaps for lack of memory; exit {process.returncode})",
            fix=f"podwatch starts it again{': ' + last[-1][:200] if last else ''}",
        )


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _raised(message: dict[str, Any]) -> BaseException:
    """The error that the child reported."""
    what, where, fix, kind = (str(message.get(name, "")) for name in ("what", "where", "fix", "kind"))
    if kind == "disk":
        return OSError(0, what, where or None)
    if kind == "store" and message.get("transient"):
        return StoreOutage(what, where=where, fix=fix)
    if kind == "store" and message.get("refusal"):
        return StoreRefused(str(message["refusal"]), what, where=where, fix=fix)
    if kind == "store":
        return RemoteError(what, where=where, fix=fix, transient=False)
    if kind in _ERRORS:
        return _ERRORS[kind](what, where=where, fix=fix)
    return InternalError(f"the transfer failed inside podwatch: {what}", fix="please report this")


def _drain(process: subprocess.Popen[bytes], last: list[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        last[:] = [line.decode(errors="replace").strip()]
    process.stderr.close()
