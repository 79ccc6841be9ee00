"""Reads /proc: one process, its children, its open files, its identity.

Every function takes current pids and returns None (or nothing) when the process is gone, and raises OSError when
podwatch is out of descriptors or memory; callers that need *one particular* process compare start ticks (identity).
"Denied" differs from "nothing": without CAP_SYS_PTRACE even root cannot read fd links of a full-capability process.
"""

import asyncio
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from podwatch.domain.errors import PermissionDenied
from podwatch.domain.process import ProcessIdentity
from podwatch.system.blocking_calls import Worker

_OUT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""podwatch's own shortage, not a fact about the process: raised, because a trainer that cannot be examined has not
ended (promise 3)."""
PROC = "/proc"
EXEC_LOOKS, EXEC_PAUSE = 8, 0.01
STAT_BYTES = 4096
"""More than a stat line has: 52 numbers and a name of at most 64 bytes. The kernel returns it in one read."""
KTHREADD = 2
"""The parent of all kernel threads; in a container, where they are invisible, it is at most one process."""
_NVIDIA = re.compile(r"/dev/nvidia(\d+)")


@dataclass(frozen=True, slots=True)
class ProcStat:
    """The fields of ``/proc/PID/stat`` that podwatch needs. ``start_ticks`` are clock ticks since boot."""

    pid: int
    name: str
    state: str
    parent_pid: int
    group: int
    session: int
    tty: int
    start_ticks: int
    foreground: int = -1
    """Process group in the terminal's foreground; -1 without a terminal."""
    cpu_ticks: int = 0
    """CPU ticks used so far: unchanged since the last look means that the process did nothing."""


def parse_stat(text: str) -> ProcStat:
    """Parse one stat line. The name may hold spaces and parentheses: it ends at the *last* ``)``. Raises ValueError."""
    opening, closing = text.index("("), text.rindex(")")
    rest = text[closing + 2 :].split()
    if len(rest) < 20:
        raise ValueError("a stat line with too few fields")
    return ProcStat(
        pid=int(text[:opening]),
        name=text[opening + 1 : closing],
        state=rest[0],
        parent_pid=int(rest[1]),
        group=int(rest[2]),
        session=int(rest[3]),
        tty=int(rest[4]),
        start_ticks=int(rest[19]),
        foreground=int(rest[5]),
        cpu_ticks=int(rest[11]) + int(rest[12]),
    )


def read_stat(pid: int) -> ProcStat | None:
    """None when there is no such process (or it went away while we read)."""
    return stat_of(stat_line(pid))


def stat_line(pid: int) -> bytes:
    """The unparsed line: equal to an earlier one if the process did nothing since. Empty when it is gone."""
    try:
        fd = os.open(f"{PROC}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _raise_if_ours(error)
        return b""
    try:
        return os.read(fd, STAT_BYTES)
    except OSError as error:
        _raise_if_ours(error)
        return b""
    finally:
        os.close(fd)


def stat_of(line: bytes) -> ProcStat | None:
    """Parse what ``stat_line`` returned; None when the process was gone."""
    try:
        return parse_stat(line.decode("utf-8", "replace"))
    except ValueError:
        return None


def all_pids() -> list[int]:
    """Every process of this pid namespace that /proc shows."""
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]  # noqa: PTH208 - cheaper than Path.iterdir


def children(pid: int) -> list[int]:
    """Direct children. From ``/proc/PID/task/*/children``, 5 times cheaper than a scan (measured); a kernel without it
    (CONFIG_PROC_CHILDREN) gets the scan."""
    try:
        threads = os.listdir(f"{PROC}/{pid}/task")  # noqa: PTH208
    except OSError as error:
        _raise_if_ours(error)
        return []
    found: list[int] = []
    seen_file = False
    for thread in threads:
        raw = _read(f"{PROC}/{pid}/task/{thread}/children")
        if raw is not None:
            seen_file = True
            found.extend(int(word) for word in raw.split())
    if seen_file or not threads or Path("/proc/self/task").joinpath(str(os.getpid()), "children").exists():
        return found
    return [p for p in all_pids() if (status := read_stat(p)) is not None and status.parent_pid == pid]


def ancestors(pid: int) -> set[int]:
    """Return its parent, that one's parent, and so on."""
    found: set[int] = set()
    line = read_stat(pid)
    while line is not None and line.parent_pid not in (0, *found):
        found.add(line.parent_pid)
        line = read_stat(line.parent_pid)
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on, in breadth-first order, ``pid`` itself left out."""
    order: list[int] = []
    seen = {pid}
    queue = [pid]
    while queue:
        for child in children(queue.pop(0)):
            if child not in seen:
                seen.add(child)
                order.append(child)
                queue.append(child)
    return order


def command(pid: int, *, wait: bool = False) -> tuple[str, ...]:
    """argv; empty for a kernel thread, a zombie, or a process that is gone. ``wait``: one in the middle of an exec is
    read again, as in ``_environment``."""
    raw = _read_memory(pid, "cmdline")
    for _ in range(EXEC_LOOKS if wait else 0):
        if raw != b"" or not _executes(pid):
            break
        time.sleep(EXEC_PAUSE)
        raw = _read_memory(pid, "cmdline")
    if not raw:
        return ()
    return tuple(part.decode("utf-8", "replace") for part in raw.rstrip(b"\0").split(b"\0"))


def _executes(pid: int) -> bool:
    """Whether a process without a command may be in the middle of an exec: it lives, and is no kernel thread."""
    status = read_stat(pid)
    return status is not None and status.state not in "ZXx" and KTHREADD not in (pid, status.parent_pid)


def environment_value(pid: int, name: str) -> str | None:
    """One variable, for podwatch's own markers. None when unset, denied or gone."""
    return environment_values(pid, (name,)).get(name)


def environment_values(pid: int, wanted: Collection[str]) -> dict[str, str]:
    """Those of the ``wanted`` variables that are set; empty when denied or gone."""
    items = (item.decode("utf-8", "replace").partition("=") for item in reversed(_environment(pid).split(b"\0")))
    return {name: value for name, _, value in items if name in wanted}


def environment_items(pid: int) -> list[tuple[str, str]]:
    """Names and values, which may be secrets: compare them, never show them. Empty when denied or gone."""
    items = (item.decode("utf-8", "replace").partition("=") for item in _environment(pid).split(b"\0") if item)
    return [(name, value) for name, _, value in items]


def _environment(pid: int) -> bytes:
    """Empty when denied or gone. A process in the middle of an exec shows neither environment nor command (up to 13 ms
    on two busy cores, measured): it is read again. A kernel thread never does."""
    for _ in range(EXEC_LOOKS):
        if raw := _read_memory(pid, "environ"):
            return raw
        if raw is None or not _executes(pid) or command(pid):
            break
        time.sleep(EXEC_PAUSE)
    return _read_memory(pid, "environ") or b""  # the exec may just have finished


def mapped_files(pid: int) -> set[str] | None:
    """Paths mapped into its memory. None when denied, gone, or hanging."""
    raw = _read_memory(pid, "maps")
    if raw is None:
        return None
    lines = raw.decode("utf-8", "replace").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/" in line and line.count(" ") >= 5}


def working_directory(pid: int) -> str | None:
    """None when denied or gone."""
    try:
        return os.readlink(f"{PROC}/{pid}/cwd")  # noqa: PTH115
    except OSError:
        return None


def executable(pid: int) -> str:
    """Path of the running program, whatever its argv is; empty when denied or gone."""
    try:
        return os.readlink(f"{PROC}/{pid}/exe").removesuffix(" (deleted)")  # noqa: PTH115
    except OSError:
        return ""


def users(pid: int) -> tuple[int, int] | None:
    """Real and effective user id; None when it is gone. Not the owner of ``/proc/PID``: that is root for every process
    that must not be dumped."""
    for line in (_read(f"{PROC}/{pid}/status") or b"").splitlines():
        if line.startswith(b"Uid:"):
            words = line.split()
            return int(words[1]), int(words[2])
    return None


def open_files(pid: int) -> dict[int, str] | None:
    """Descriptor -> link target. None when denied or gone; a descriptor closed while we read is left out."""
    base = f"{PROC}/{pid}/fd"
    try:
        names = os.listdir(base)  # noqa: PTH208
    except OSError:
        return None
    links: dict[int, str] = {}
    denied = False
    for name in names:
        try:
            links[int(name)] = os.readlink(f"{base}/{name}")  # noqa: PTH115
        except PermissionError:
            denied = True
        except OSError:
            continue
    return None if denied and not links else links


def open_for_writing(pid: int, links: dict[int, str]) -> list[str]:
    """Those of ``links`` (from ``open_files``) that are open for writing."""
    writable: list[str] = []
    for fd, target in links.items():
        for line in (_read(f"{PROC}/{pid}/fdinfo/{fd}") or b"").splitlines():
            if line.startswith(b"flags:"):
                with contextlib.suppress(ValueError, IndexError):
                    if int(line.split()[1], 8) & (os.O_WRONLY | os.O_RDWR):
                        writable.append(target)
                break
    return writable


@dataclass(frozen=True, slots=True)
class CudaUse:
    """``context``: ``/dev/nvidia-uvm`` is open, so a CUDA context exists. ``gpus``: minors of ``/dev/nvidiaN``."""

    context: bool
    gpus: frozenset[int] = frozenset()


def cuda_use(pid: int) -> CudaUse | None:
    """None when it cannot be read, which is not "no CUDA" (promise 3)."""
    links = open_files(pid)
    return None if links is None else cuda_use_of(links.values())


def cuda_use_of(targets: Iterable[str]) -> CudaUse:
    """The same from link targets already read."""
    context = False
    gpus: set[int] = set()
    for target in targets:
        if target.startswith("/dev/nvidia-uvm"):
            # nvidia-uvm-tools is a profiler's device, not a context
            context = context or target == "/dev/nvidia-uvm"
        elif match := _NVIDIA.fullmatch(target):
            gpus.add(int(match[1]))
    return CudaUse(context, frozenset(gpus))


_reading: dict[int, tuple[int, float]] = {}
"""Thread -> the process whose memory it is reading, and since when (monotonic)."""
_avoided: dict[int, int] = {}
"""Process -> the thread that hangs at it."""


def _read_memory(pid: int, name: str) -> bytes | None:
    """``cmdline``, ``environ`` and ``maps`` wait for the lock of the process's memory. A process that is stuck in the
    kernel (state D: a dead network volume, a driver) may hold it for hours, and no timeout ends the wait. A caller with
    a deadline then calls ``give_up_hung``, and later reads skip that process."""
    if pid in _avoided:
        return None
    thread = threading.get_ident()
    _reading[thread] = (pid, time.monotonic())
    try:
        return _read(f"{PROC}/{pid}/{name}")
    finally:
        _reading.pop(thread, None)
        if _avoided.get(pid) == thread:
            del _avoided[pid]


def give_up_hung(seconds: float) -> list[int]:
    """Processes, newly noticed, whose memory has been read for so long: they are skipped until that read returns."""
    now = time.monotonic()
    found = []
    for thread, (pid, since) in list(_reading.items()):
        if now - since >= seconds and pid not in _avoided:
            _avoided[pid] = thread
            found.append(pid)
            if thread not in _reading:  # it returned at this moment
                _avoided.pop(pid, None)
    return found


def hangs(pid: int) -> bool:
    """Whether only its stat line can be read now."""
    return pid in _avoided


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _raise_if_ours(error)
        return None
    try:
        chunks: list[bytes] = []
        while chunk := os.read(fd, 65_536):
            chunks.append(chunk)
        return b"".join(chunks)
    except OSError as error:
        _raise_if_ours(error)
        return None
    finally:
        os.close(fd)


def _raise_if_ours(error: OSError) -> None:
    if error.errno in _OUT_OF:
        raise error


# -- identity --------------------------------------------------------------------------------------------------------
# Signals never reach an unrelated process that got the same pid (promise 9).

_ENDED = frozenset("ZXx")


@functools.cache
def boot_wall() -> float:
    """When this boot of the kernel began, epoch seconds; 0 where /proc does not show it."""
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0.0


@functools.cache
def boot_id() -> str:
    """Random id of this boot of the kernel; empty where /proc does not show it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@functools.cache
def machine_id() -> str:
    """An id of this machine or container that survives reboots: from its machine id (which containers may share with
    their image) and its host name (which in a container is generated)."""
    try:
        known = Path("/etc/machine-id").read_text().strip()
    except OSError:
        known = ""
    return hashlib.sha256(f"{known}|{socket.gethostname()}".encode()).hexdigest()[:16]


@functools.cache
def pid_namespace() -> int:
    """Inode number of our pid namespace: pids mean nothing in another one. 0 where /proc does not show it."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def start_ticks(pid: int) -> int | None:
    """Clock ticks since boot at which ``pid`` started; None when there is no such process."""
    status = read_stat(pid)
    return None if status is None else status.start_ticks


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of ``pid`` as it is now (a zombie still has one); None when there is no such process."""
    ticks = start_ticks(pid)
    return None if ticks is None else ProcessIdentity(pid, ticks, boot_id(), pid_namespace())


def from_here(identity: ProcessIdentity) -> bool:
    """Whether the record is from this boot and pid namespace. Fields that were not recorded do not count."""
    return identity.boot_id in ("", boot_id()) and identity.pid_namespace in (0, pid_namespace())


def is_alive(identity: ProcessIdentity) -> bool:
    """True while exactly this process runs. Zombies are not alive; a later process with the same pid is not this
    one."""
    if not from_here(identity):
        return False
    status = read_stat(identity.pid)
    return status is not None and status.start_ticks == identity.start_ticks and status.state not in _ENDED


def exists(identity: ProcessIdentity) -> bool:
    """Like ``is_alive``, but a zombie counts: its pid is not free yet."""
    if not from_here(identity):
        return False
    return start_ticks(identity.pid) == identity.start_ticks


def open_pidfd(identity: ProcessIdentity) -> int | None:
    """A descriptor of exactly this process (the caller closes it); None when it is gone.

    The ticks are compared *after* the descriptor is open: from then on the pid cannot be given to another.
    """
    try:
        fd = os.pidfd_open(identity.pid)
    except (ProcessLookupError, OSError):
        return None
    if not exists(identity):
        os.close(fd)
        return None
    return fd


def send_signal(identity: ProcessIdentity, number: int) -> bool:
    """Send a signal to exactly this process. False when it is gone. Raises PermissionDenied."""
    fd = open_pidfd(identity)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise PermissionDenied(
            f"no permission to send {signal.Signals(number).name} to process {identity.pid}",
            fix="run podwatch as root or as the user that started training",
        ) from error
    finally:
        os.close(fd)
    return True


# -- scans that can hang ---------------------------------------------------------------------------------------------
# A process of the pod can hang in the kernel; reading its memory hangs too.

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds for one read of one process. It takes microseconds; a machine that swaps may need some milliseconds."""


async def patiently(worker: Worker, fn: Callable[..., T], *args: Any, timeout: float, patience: float = PATIENCE) -> T:
    """As ``worker.call``, for a read-only scan: if it hangs at one process, it is restarted in a fresh thread, without
    that process. So an unrelated stuck process never delays a restart. Raises TimeoutError as ``worker.call`` does."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    while True:
        call = asyncio.ensure_future(worker.call(fn, *args, timeout=max(patience, end - loop.time())))
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=patience)
                if not call.done() and give_up_hung(patience):
                    break
        except asyncio.CancelledError:
            call.cancel()
            raise
        if call.done():
            return call.result()
        call.cancel()
        await asyncio.wait({call})
        worker.renew()


# -- exit status -----------------------------------------------------------------------------------------------------
# From the kernel, through a pidfd: otherwise only the parent of a process gets it.

_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO: _IOWR(0xFF, 11, struct pidfd_info), of which the first version has 64 bytes."""
_EXIT = 1 << 3
"""PIDFD_INFO_EXIT, Linux 6.15: the exit status, once the parent has reaped the process."""
_SIZE, _CODE_AT = 64, 60


def exit_of(fd: int) -> tuple[int | None, int | None] | None:
    """(exit code, signal) of this pidfd's process, one of them None; None until its parent has reaped it, and always on
    a kernel before 6.15. Never blocks, never raises."""
    answer = bytearray(_SIZE)
    struct.pack_into("<Q", answer, 0, _EXIT)
    try:
        fcntl.ioctl(fd, _GET_INFO, answer)
    except OSError:
        return None
    if not struct.unpack_from("<Q", answer)[0] & _EXIT:
        return None
    status = struct.unpack_from("<i", answer, _CODE_AT)[0]
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None
