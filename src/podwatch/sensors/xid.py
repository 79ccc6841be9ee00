"""XIDs of the NVIDIA driver, collected from NVML's events and, where readable, from the kernel log."""

import contextlib
import errno
import os
import re
import stat
import threading
from collections import deque
from pathlib import Path

from podwatch.domain.snapshot import XidEvent
from podwatch.system.clock import Clock

KEPT = 64
"""Maximum number of events kept. A GPU that dies reports dozens within a second, and the last add nothing to the
first."""
SAME_SECONDS = 10.0
"""Seconds within which the same code of the same GPU is the same fault, reported by both sources or repeatedly by
one."""

_NVRM = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{7,20})\): (\d{1,4})\b")
_PCI = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.[0-7])?")


def pci_key(text: str) -> tuple[int, int, int] | None:
    """(domain, bus, device) of ``00000000:65:00.0`` or ``0000:65:00``: NVML and the kernel write it differently."""
    match = _PCI.fullmatch(text.strip())
    if match is None:
        return None
    return int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16)


def parse_nvrm(message: str) -> tuple[str, int] | None:
    """PCI address and code of a kernel line such as ``NVRM: Xid (PCI:0000:65:00): 79, pid=...``; None for any other."""
    match = _NVRM.search(message)
    return (match[1], int(match[2])) if match is not None else None


class XidInbox:
    """Collects XIDs. Thread-safe. ``kernel`` and ``nvml`` are true while that source reports XIDs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[XidEvent] = deque(maxlen=KEPT)
        self._devices: dict[tuple[int, int, int], int] = {}
        self.nvml = False
        self.kernel = False

    @property
    def watched(self) -> bool:
        return self.nvml or self.kernel

    def devices(self, pci: dict[str, int]) -> None:
        """Set the GPUs of this pod: PCI address -> NVML index."""
        known = {key: index for address, index in pci.items() if (key := pci_key(address)) is not None}
        with self._lock:
            self._devices = known

    def add(self, gpu: int | None, code: int) -> None:
        now = self._clock.monotonic()
        with self._lock:
            for event in reversed(self._events):
                if now - event.at > SAME_SECONDS:
                    break
                if (event.gpu, event.code) == (gpu, code):
                    return
            self._events.append(XidEvent(gpu, code, now))

    def add_kernel(self, address: str, code: int) -> None:
        """Add an XID of the kernel log, which shows the whole machine: GPUs that are not this pod's are ignored."""
        key = pci_key(address)
        with self._lock:
            known = bool(self._devices)
            gpu = self._devices.get(key) if key is not None else None
        if gpu is not None or not known:
            self.add(gpu, code)

    def newest(self) -> tuple[XidEvent, ...]:
        """All kept events, newest last."""
        with self._lock:
            return tuple(self._events)


# -- kernel log ------------------------------------------------------------------------------------------------------
# Where podwatch has permission to read it: OOM kills and NVIDIA's XIDs. Blocks; used by the sensor's thread.
# ``/dev/kmsg`` does not exist in most containers, and a hardened unit cannot open it. Then nothing is counted, which
# does not mean that nothing happened.

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
