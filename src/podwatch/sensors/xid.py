"""XIDs of the NVIDIA driver, collected from NVML's events and, where readable, from the kernel log."""

import re
import threading
from collections import deque

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
