"""Check whether the pod is free for a start: GPU memory back to its level before our trainer, and ports closed."""

import errno
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.domain.snapshot import GpuSample, GpuState, Reading, SensorState
from podwatch.system import procfs

GIB = 1 << 30
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Free:
    """``gpus`` describes what is still held on GPUs; ``ports`` are those in use, with the process that listens (empty
    if unknown). ``observed`` is false if GPU memory could not be read."""

    gpus: tuple[str, ...]
    observed: bool
    ports: tuple[tuple[int, str], ...] = ()

    @property
    def free(self) -> bool:
        return not self.gpus and not self.ports

    @property
    def holders(self) -> tuple[str, ...]:
        """As text, GPUs first."""
        return (*self.gpus, *(f"port {port} is in use" + (f" by {by}" if by else "") for port, by in self.ports))


def memory_now(reading: Reading[tuple[GpuSample, ...]]) -> dict[int, int]:
    """Return the bytes in use by NVML index; empty if they could not be read."""
    if not reading.ok or reading.value is None:
        return {}
    return {g.index: g.memory_used_bytes for g in reading.value if g.memory_used_bytes is not None}


def merge_base(old: Mapping[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Return ``old`` updated by ``now``. A base never rises: otherwise every restart would accept another leak of just
    under the margin."""
    return {**old, **{index: min(used, old.get(index, used)) for index, used in now.items()}}


def look(
    reading: Reading[tuple[GpuSample, ...]],
    *,
    since: float,
    configured: Sequence[int],
    base: Mapping[int, int],
    margin: int,
    ports: Sequence[int],
) -> Free:
    """Return what is held now. ``since``: monotonic time at which the stop ended; an older reading does not count.

    Without configured GPUs every visible GPU counts.
    """
    held: list[str] = []
    absent = reading.state is SensorState.ABSENT
    seen = reading.ok and reading.at >= since
    if seen:
        for gpu in reading.value or ():
            if configured and gpu.index not in configured:
                continue
            if gpu.state is GpuState.LOST:
                held.append(f"gpu{gpu.index} fell off the bus: only a reboot or another machine helps")
                continue
            above = (gpu.memory_used_bytes or 0) - base.get(gpu.index, 0)
            if above > margin:
                held.append(f"gpu{gpu.index} holds {above / GIB:.1f} GiB more than before training")
    return Free(tuple(held), seen or absent, tuple((port, "") for port in ports if port_taken(port)))


def named(free: Free, gpu_holders: Sequence[str]) -> Free:
    """Return ``free`` with the processes that hold it, as far as /proc shows them. Blocks."""
    listeners = _listeners([port for port, _ in free.ports])
    gpus = free.gpus
    if gpus:
        gpus += tuple(gpu_holders) or ("no process that podwatch can read holds a CUDA context there",)
    return replace(free, gpus=gpus, ports=tuple((port, listeners.get(port, "")) for port, _ in free.ports))


def _listeners(ports: Sequence[int]) -> dict[int, str]:
    """Return port -> the process that listens on it. Processes of other containers are not visible here."""
    inodes: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            port = int(words[1].rpartition(":")[2], 16)
            if words[3] == _LISTEN and port in ports:
                inodes[f"socket:[{words[9]}]"] = port
    found: dict[int, str] = {}
    for pid in procfs.all_pids() if inodes else ():
        for target in (procfs.open_files(pid) or {}).values():
            if target in inodes and (status := procfs.read_stat(pid)) is not None:
                found.setdefault(inodes[target], f"pid {pid} ({status.name})")
    return found


def port_taken(port: int) -> bool:
    """Return whether the port is in use. TIME_WAIT does not count (SO_REUSEADDR, as servers do)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
