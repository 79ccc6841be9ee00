"""Identifies processes, so that a signal never reaches an unrelated process that got the same pid (promise 9)."""

import functools
import hashlib
import os
import signal
import socket
from pathlib import Path

from podwatch.domain.errors import PermissionDenied
from podwatch.domain.process import ProcessIdentity
from podwatch.system.procfs import read_stat

_ENDED = frozenset("ZXx")


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
