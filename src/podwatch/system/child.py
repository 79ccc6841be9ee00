"""podwatch's child processes: they end with their parent, get a scrubbed environment; and short commands with a time
limit.
"""

import asyncio
import contextlib
import ctypes
import os
import pwd
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.domain.errors import HostError

# -- end with the parent ---------------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Start a new session, and get SIGKILL when ``parent`` (its thread that started us) ends. 0: any parent."""
    with contextlib.suppress(OSError):
        os.setsid()
    end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """Get SIGKILL when ``parent`` (its thread that started us) ends, without a new session."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)  # it died before the request


# -- environment and short commands ----------------------------------------------------------------------------------

_SERVICE = frozenset(
    {"NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY", "JOURNAL_STREAM", "INVOCATION_ID", "MAINPID", "SYSTEMD_EXEC_PID",
     "MANAGERPID", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "CACHE_DIRECTORY", "LOGS_DIRECTORY",
     "CONFIGURATION_DIRECTORY", "FDSTORE"}
)  # fmt: skip
_PREFIXES = ("B2_", "PODWATCH_", "WATCHDOG_", "LISTEN_")
# Set by a virtual environment or our launcher: with them a Python child would import from our environment.
_PYTHON = frozenset({"PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH", "__PYVENV_LAUNCHER__"})


def scrubbed_environment(environ: Mapping[str, str], *, keep_python: bool = True) -> dict[str, str]:
    """``environ`` without the variables that only podwatch may have (docs/architecture.md).

    Store credentials are secrets, podwatch's own settings would configure a podwatch inside training, and a child that
    inherits NOTIFY_SOCKET or WATCHDOG_* sends in podwatch's name (measured: systemctl did). ``keep_python=False`` also
    drops the variables that make a Python child import our packages.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _SERVICE and not name.startswith(_PREFIXES) and (keep_python or name not in _PYTHON)
    }


@dataclass(frozen=True, slots=True)
class Completed:
    """A finished short command. ``code`` is negative for a signal; ``output`` is stdout and stderr together."""

    argv: tuple[str, ...]
    code: int
    output: str
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out


async def run_child(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes = b"",
    limit: int = 1 << 20,
    user: str = "",
) -> Completed:
    """Run a short command in a session of its own and wait at most ``timeout`` seconds, then kill its whole group.

    ``env`` defaults to our own, scrubbed. Output beyond ``limit`` bytes is read and dropped. Raises HostError when the
    program does not exist or cannot be executed, or there is no such ``user``.
    """
    account: dict[str, Any] = {}
    try:
        if user and (entry := pwd.getpwnam(user)).pw_uid != os.geteuid():
            account = {"user": entry.pw_uid, "group": entry.pw_gid}
            account["extra_groups"] = os.getgrouplist(user, entry.pw_gid)
    except KeyError as error:
        raise HostError(f"user {user!r} not found", where="trainer.user", fix="correct it") from error
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=scrubbed_environment(os.environ) if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
            **account,
        )
    except OSError as error:
        raise HostError(
            f"cannot run {argv[0]}: {error.strerror}", where=str(cwd or ""), fix="install it or correct its path"
        ) from error
    output = bytearray()

    async def talk() -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(stdin)
            await process.stdin.drain()
        process.stdin.close()
        while chunk := await process.stdout.read(65_536):
            output.extend(chunk[: max(0, limit - len(output))])
        await process.wait()

    timed_out = False
    try:
        await asyncio.wait_for(talk(), timeout)
    except TimeoutError:
        timed_out = True
    finally:
        if process.returncode is None or timed_out:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 5.0)
        process._transport.close()  # type: ignore[attr-defined]  # a grandchild may still hold the pipe
    code = process.returncode if process.returncode is not None else -signal.SIGKILL
    return Completed(tuple(argv), code, output.decode("utf-8", "replace"), timed_out)
