"""podwatch's child processes: they end with their parent and get their share of a busy machine. Short commands with a
time limit. And the memory that a process keeps.
"""

import contextlib
import ctypes
import errno
import gc
import os
import pwd
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.domain.errors import HostError
from podwatch.system.environment_without_secrets import scrubbed_environment

# -- end with the parent ---------------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Start a new session, and get SIGKILL when ``parent`` (its thread that started us) ends. 0: any parent."""
    with contextlib.suppress(OSError):
        os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)  # it died before the request


# -- short commands ----------------------------------------------------------------------------------


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


def account_of(user: str) -> dict[str, Any]:
    """The arguments of ``subprocess`` that run a program as ``user``; none for podwatch's own. Raises HostError."""
    try:
        entry = pwd.getpwnam(user) if user else None
    except KeyError as error:
        raise HostError(f"user {user!r} not found", where="user", fix="correct it") from error
    if entry is None or entry.pw_uid == os.geteuid():
        return {}
    groups = os.getgrouplist(user, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


@contextlib.contextmanager
def working_as(user: str) -> Iterator[dict[str, Any]]:
    """``account_of`` around the start of a program. Raises HostError, too, if the system does not let podwatch change
    the user: a container, or a unit of the operator's own, can lack the capabilities."""
    account = account_of(user)
    try:
        yield account
    except PermissionError as error:
        if not account or error.errno != errno.EPERM:
            raise
        own = pwd.getpwuid(os.geteuid()).pw_name
        fix = f'set user = "{own}" in its section, or give podwatch CAP_SETUID and CAP_SETGID (docs/notifications.md)'
        raise HostError(f"podwatch cannot work as user {user}", fix=fix) from error


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
    program does not exist or cannot be executed, or podwatch cannot work as ``user``.
    """
    import asyncio  # not above: the children that move data start a tenth faster without it

    try:
        with working_as(user) as account:
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


# -- memory --------------------------------------------------------------------------------------------------------
# With glibc's defaults each thread keeps an arena, and memory that only the start needed is never returned.

_M_ARENA_MAX = -8
ARENAS = 2
"""The threads mostly wait; two arenas are enough for the others."""


def few_arenas() -> None:
    """Limit the arenas of this process from now on. Does nothing where the C library is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Return freed memory to the system, after one large use. Takes milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def settle() -> None:
    """Call once everything is loaded: the garbage collector then never scans the present objects again."""
    gc.collect()
    gc.freeze()
    give_back()


# -- share of a busy machine -----------------------------------------------------------------------------------------


def give_way(nice: int) -> None:
    """Raise the nice value of this process to ``nice``, and that of its session: between sessions in the root CPU group
    the session's autogroup counts; within one CPU group (a container, a service) the nice value (sched(7))."""
    with contextlib.suppress(OSError):
        if nice > os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            Path("/proc/self/autogroup").write_text(str(nice))
