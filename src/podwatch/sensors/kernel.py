"""The kernel log, where podwatch has permission to read it: OOM kills and NVIDIA's XIDs. Blocks; used by the sensor's
thread.

``/dev/kmsg`` does not exist in most containers, and a hardened unit cannot open it. Then nothing is counted, which does
not mean that nothing happened.
"""

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

from podwatch.sensors.xid import XidInbox, parse_nvrm

RECORDS_PER_LOOK = 2_000
"""Records read per poll; the rest is read at the next poll."""
RECORD = 8192
"""Maximum bytes of one record (CONSOLE_EXT_LOG_MAX)."""
KMSG = (1, 11)
"""Major and minor number: some containers have something else of that name."""
# One kill is one line of this form; the lines around it describe the same kill.
_OOM = re.compile(r"^(?:Memory cgroup out of memory|Out of memory)(?:: |\b.*: )Kill(?:ed)? process \d+")


def message_of(record: bytes) -> str:
    """The text of one record ``prio,seq,usec,flags;text``; continuation lines are dropped."""
    _, _, text = record.partition(b";")
    return text.split(b"\n", 1)[0].decode("utf-8", "replace")


def is_oom_kill(message: str) -> bool:
    return _OOM.match(message) is not None


class KernelLog:
    """Follows the log from the moment it is opened: older records say nothing about this run."""

    def __init__(self, xids: XidInbox, path: Path = Path("/dev/kmsg"), *, must_be_kmsg: bool = True) -> None:
        self._xids, self._path, self._must_be_kmsg = xids, path, must_be_kmsg
        self._fd: int | None = None
        self._refused = False
        self.ooms: int | None = None
        """OOM kills of this machine since the log was opened; None while it cannot be read."""

    def look(self) -> None:
        if self._fd is None and not self._refused:
            self._open()
        if self._fd is not None:
            self._read(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        self.ooms, self._xids.kernel = None, False

    def _open(self) -> None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError:
            self._refused = True  # it does not appear later, and permissions do not change under a running daemon
            return
        try:
            info = os.fstat(fd)
            device = (os.major(info.st_rdev), os.minor(info.st_rdev))
            if self._must_be_kmsg and not (stat.S_ISCHR(info.st_mode) and device == KMSG):
                raise OSError(errno.ENODEV, "not the kernel log")
            os.lseek(fd, 0, os.SEEK_END)
            with contextlib.suppress(BlockingIOError):
                os.read(fd, RECORD)  # EPERM comes at the first read where the log is restricted
        except BrokenPipeError:
            pass
        except OSError:
            os.close(fd)
            self._refused = True
            return
        self._fd, self.ooms, self._xids.kernel = fd, 0, True

    def _read(self, fd: int) -> None:
        for _ in range(RECORDS_PER_LOOK):
            try:
                record = os.read(fd, RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read continues after the gap
            except OSError:
                self.close()
                self._refused = True
                return
            if not record:
                return
            message = message_of(record)
            if is_oom_kill(message):
                self.ooms = (self.ooms or 0) + 1
            elif (found := parse_nvrm(message)) is not None:
                self._xids.add_kernel(*found)
