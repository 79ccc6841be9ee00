"""Simulated GPUs as files: a GpuReader for a machine without a GPU."""

from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.snapshot import GpuSample, GpuState

# -- memory held by a process ----------------------------------------------------------------------------------------
# A file ``<dir>/<gpu>/<pid>`` that counts while that process lives. Standard library only: the simulated processes
# import it.


@dataclass(frozen=True, slots=True)
class Held:
    pid: int
    memory_bytes: int
    utilization_percent: float


def hold(directory: Path, gpu: int, pid: int, memory_bytes: int, utilization_percent: float = 0.0) -> None:
    """Allocate or change the held memory; the file is replaced atomically, so a reader never sees half a line."""
    folder = directory / str(gpu)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{pid}"
    temporary.write_text(f"{memory_bytes} {utilization_percent} {start_ticks(pid) or 0}\n")
    temporary.replace(folder / str(pid))


def held(directory: Path, gpu: int) -> tuple[Held, ...]:
    """The memory that living processes hold on one GPU. A zombie holds none: the driver frees memory when a process
    ends."""
    found = []
    try:
        entries = sorted(directory.joinpath(str(gpu)).iterdir())
    except FileNotFoundError:
        return ()
    for entry in entries:
        if not entry.name.isdigit():
            continue
        try:
            memory, utilization, ticks = entry.read_text().split()
            holder = Held(int(entry.name), int(memory), float(utilization))
            alive = start_ticks(holder.pid) == int(ticks)
        except (FileNotFoundError, ValueError):
            continue
        if alive:
            found.append(holder)
    return tuple(found)


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None when the process is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


# -- reader ----------------------------------------------------------------------------------------------------------

GIB = 1 << 30
TOTAL_BYTES = 80 * GIB


class SimulatedGpus:
    """``count`` GPUs below ``directory``. Their memory and utilization are the sums of what living processes hold
    there.

    A file ``<gpu>/lost`` makes a device fall off the bus.
    """

    def __init__(self, directory: Path, count: int = 2, total_bytes: int = TOTAL_BYTES) -> None:
        self._directory = directory
        self._count = count
        self._total = total_bytes

    def open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)

    def read(self) -> tuple[GpuSample, ...]:
        return tuple(self._sample(index) for index in range(self._count))

    def close(self) -> None:
        """Nothing to do: no file is kept open."""

    def _sample(self, index: int) -> GpuSample:
        name, uuid = "Simulated H100", f"GPU-simulated-{index}"
        if (self._directory / str(index) / "lost").exists():
            return GpuSample(index, uuid, name, GpuState.LOST, detail="simulated: fell off the bus")
        holders = held(self._directory, index)
        memory = sum(holder.memory_bytes for holder in holders)
        use = min(100.0, sum(holder.utilization_percent for holder in holders))
        return GpuSample(
            index,
            uuid,
            name,
            memory_used_bytes=min(memory, self._total),
            memory_total_bytes=self._total,
            utilization_percent=use,
            temperature_celsius=35.0 + use / 4,
        )
