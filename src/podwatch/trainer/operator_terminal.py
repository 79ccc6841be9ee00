"""The terminal that a process runs in, and when a key was last typed there.

The terminal in which an operator started a trainer, and when a key was last typed there (docs/detection.md, "Ended
by an operator"). Typing shows in the terminal's access time, which the kernel moves (in steps of 8 s)
when a program reads from it. Its modification time is useless: the trainer's own output changes it all the time.
"""

import os
import stat
from dataclasses import dataclass

from podwatch.system import procfs


@dataclass(frozen=True, slots=True)
class Terminal:
    """``device`` is its device number, because the path can be reused for another terminal."""

    path: str
    device: int

    def used_wall(self) -> float | None:
        """Return the epoch second of the last key that was read; None if the terminal is gone. Never blocks: no file
        system is asked."""
        try:
            found = os.stat(self.path)  # noqa: PTH116
        except OSError:
            return None
        return found.st_atime if found.st_rdev == self.device else None


def device_of(number: int) -> int:
    """Return ``tty_nr`` of /proc/PID/stat as a device number: minor in bits 31-20 and 7-0, major in 15-8."""
    return os.makedev((number >> 8) & 0xFFF, (number & 0xFF) | ((number >> 12) & 0xFFF00))


def terminal_of(pid: int) -> Terminal | None:
    """Return the controlling terminal of ``pid``; None if it has none (a service, a supervisor's child, nohup with
    setsid), or if that terminal is not visible from here."""
    status = procfs.read_stat(pid)
    if status is None or status.tty == 0:
        return None
    device = device_of(status.tty)
    links = procfs.open_files(pid) or {}
    for path in (*(links.get(fd, "") for fd in (0, 1, 2)), f"/dev/pts/{os.minor(device)}"):
        if not path.startswith("/dev/"):
            continue
        try:
            found = os.stat(path)  # noqa: PTH116
        except OSError:
            continue
        if stat.S_ISCHR(found.st_mode) and found.st_rdev == device:
            return Terminal(path, device)
    return None
