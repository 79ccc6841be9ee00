"""Simulated GPUs as files: a GpuReader for a machine without a GPU."""

from pathlib import Path

from podwatch.domain.snapshot import GpuSample, GpuState
from podwatch.simulation.gpu_files import held

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
