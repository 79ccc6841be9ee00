"""NVML through ``pynvml`` (nvidia-ml-py): the real GpuReader.

podwatch uses device memory only: inside containers NVML shows host PIDs or none.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from podwatch.domain.reading import SensorState
from podwatch.domain.snapshot import GpuSample, GpuState
from podwatch.sensors.gpu import ReaderUnavailable
from podwatch.sensors.nvml_health import DeviceHealth, XidEvents, pci_addresses
from podwatch.sensors.nvml_trial import ABSENT_FIX, TrialLoad, load_here
from podwatch.sensors.xid import XidInbox

T = TypeVar("T")

_NO_PERMISSION_FIX = (
    "give podwatch's user access to /dev/nvidiactl and /dev/nvidia*; in a systemd unit: DeviceAllow=char-nvidia* rw"
)


@dataclass(frozen=True, slots=True)
class _Device:
    """One device as found at open. ``handle`` is None where NVML gave none; ``error`` is the reason."""

    index: int
    handle: Any
    uuid: str
    name: str
    minor: int | None = None
    error: Exception | None = None


class NvmlReader:
    """Reads every device NVML shows. ``pynvml`` is imported by the thread that opens, never earlier, and NVIDIA's
    library is loaded only after ``trial`` has loaded it in a child process.

    Memory comes from ``nvmlDeviceGetMemoryInfo_v2`` where the driver has it, because its ``used`` excludes the memory
    that the driver reserves; else from version 1. XIDs that the driver reports go into ``xids``.
    """

    def __init__(self, xids: XidInbox | None = None, trial: TrialLoad | None = None) -> None:
        self._nvml: Any = None
        self._trial = trial or TrialLoad()
        self._devices: tuple[_Device, ...] = ()
        self._health: dict[int, DeviceHealth] = {}
        self._xids = xids
        self._events = XidEvents(xids) if xids is not None else None
        self._identity: dict[int, tuple[str, str, int | None]] = {}
        self._plain_memory: set[int] = set()  # devices that support only version 1 of the memory call

    def open(self) -> None:
        self._trial.check()
        load_here()
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise ReaderUnavailable(
                SensorState.ABSENT, f"cannot import the Python module pynvml ({error})", "reinstall podwatch"
            ) from error
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise self._library_failure(nvml, error) from error
        try:
            devices = tuple(self._device(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        except nvml.NVMLError as error:
            self._shutdown(nvml)
            raise self._library_failure(nvml, error) from error
        if not devices:
            self._shutdown(nvml)
            raise ReaderUnavailable(
                SensorState.ABSENT,
                "NVML works but shows no GPU",
                "check NVIDIA_VISIBLE_DEVICES and the number of GPUs of the pod",
            )
        self._plain_memory = set()
        handles = {device.index: device.handle for device in devices if device.error is None}
        self._health = {index: DeviceHealth(index, handle) for index, handle in handles.items()}
        if self._xids is not None and self._events is not None:
            self._xids.devices(pci_addresses(nvml, handles))
            self._events.open(nvml, handles)
        self._devices = devices
        self._nvml = nvml

    def read(self) -> tuple[GpuSample, ...]:
        nvml = self._nvml
        if nvml is None:
            raise ReaderUnavailable(SensorState.BLIND, "NVML is not open")
        if self._events is not None:
            self._events.drain(nvml)
        return tuple(self._sample(nvml, device) for device in self._devices)

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        self._devices = ()
        if nvml is not None:
            if self._events is not None:
                self._events.close(nvml)
            self._shutdown(nvml)

    @staticmethod
    def _shutdown(nvml: Any) -> None:
        with contextlib.suppress(nvml.NVMLError):  # e.g. "uninitialized": it is closed already
            nvml.nvmlShutdown()

    def _device(self, nvml: Any, index: int) -> _Device:
        """The handle and the names of one device; the names of an earlier open are used when it fell off the bus."""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            return _Device(index, None, *self._identity.get(index, ("", "", None)), error)
        known = self._identity.get(index, ("", "", None))
        uuid = self._optional(nvml, lambda: str(nvml.nvmlDeviceGetUUID(handle)), known[0])
        name = self._optional(nvml, lambda: str(nvml.nvmlDeviceGetName(handle)), known[1])
        minor = self._optional(nvml, lambda: int(nvml.nvmlDeviceGetMinorNumber(handle)), known[2])
        self._identity[index] = (uuid, name, minor)
        return _Device(index, handle, uuid, name, minor)

    def _sample(self, nvml: Any, device: _Device) -> GpuSample:
        try:
            if device.error is not None:
                raise device.error
            used, total = self._memory(nvml, device)
        except nvml.NVMLError as error:
            return self._failed_sample(nvml, device, error)
        utilization = self._optional(nvml, lambda: float(nvml.nvmlDeviceGetUtilizationRates(device.handle).gpu), None)
        health = self._health[device.index].look(nvml)
        return GpuSample(
            device.index,
            device.uuid,
            device.name,
            memory_used_bytes=used,
            memory_total_bytes=total,
            utilization_percent=utilization,
            temperature_celsius=health.temperature_celsius,
            mig=health.mig,
            ecc_uncorrected=health.ecc_uncorrected,
            throttled=health.throttled,
            minor=device.minor,
        )

    def _failed_sample(self, nvml: Any, device: _Device, error: Any) -> GpuSample:
        """The sample of a device whose memory cannot be read. Raises ReaderUnavailable if the cause is not the
        device."""
        if error.value in (
            nvml.NVML_ERROR_UNINITIALIZED,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        ):
            raise self._library_failure(nvml, error) from error
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            state, detail = GpuState.LOST, "fell off the bus: reboot, or use another machine"
        elif error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            state, detail = GpuState.NOT_SUPPORTED, "this device does not report its memory"
        elif error.value == nvml.NVML_ERROR_NO_PERMISSION:
            state, detail = GpuState.ERROR, f"no permission: {_NO_PERMISSION_FIX}"
        elif error.value == nvml.NVML_ERROR_RESET_REQUIRED:
            state, detail = GpuState.ERROR, "needs a reset (nvidia-smi --gpu-reset) or a reboot"
        else:
            state, detail = GpuState.ERROR, f"NVML: {error}"
        return GpuSample(device.index, device.uuid, device.name, state=state, detail=detail, minor=device.minor)

    def _memory(self, nvml: Any, device: _Device) -> tuple[int, int]:
        """(used, total) in bytes; ``used`` excludes the driver's reserve where the driver reports it separately."""
        if device.index not in self._plain_memory:
            try:
                info = nvml.nvmlDeviceGetMemoryInfo(device.handle, version=nvml.nvmlMemory_v2)
                return int(info.used), int(info.total)
            except nvml.NVMLError as error:
                if not self._too_old(nvml, error):
                    raise
        # Either the driver is older than that call, or the device reports no memory at all: version 1 shows which.
        info = nvml.nvmlDeviceGetMemoryInfo(device.handle)
        self._plain_memory.add(device.index)
        return int(info.used), int(info.total)

    @staticmethod
    def _too_old(nvml: Any, error: Any) -> bool:
        """Whether the driver does not support this version of a call."""
        return error.value in (
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
            nvml.NVML_ERROR_NOT_SUPPORTED,
        )

    @staticmethod
    def _optional(nvml: Any, call: Callable[[], T], otherwise: T) -> T:
        """Read an optional value; errors are ignored (MIG and vGPU devices refuse several)."""
        try:
            return call()
        except nvml.NVMLError:
            return otherwise

    @staticmethod
    def _library_failure(nvml: Any, error: Any) -> ReaderUnavailable:
        value = error.value
        if value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return ReaderUnavailable(SensorState.ABSENT, "libnvidia-ml.so.1 was not found", ABSENT_FIX)
        if value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
            return ReaderUnavailable(
                SensorState.ABSENT, "the NVIDIA driver is not loaded", "load it (nvidia-smi must work), or reboot"
            )
        if value == nvml.NVML_ERROR_NO_PERMISSION:
            return ReaderUnavailable(
                SensorState.DENIED, "permission denied: cannot use the GPU driver", _NO_PERMISSION_FIX
            )
        if value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return ReaderUnavailable(
                SensorState.BLIND,
                "the NVIDIA library and the loaded driver have different versions",
                "restart podwatch if the driver was upgraded while podwatch ran; else reboot, or restart the container",
            )
        return ReaderUnavailable(SensorState.BLIND, f"NVML failed: {error}", "check whether nvidia-smi works")


def look_once(seconds: float) -> tuple[GpuSample, ...]:
    """Read all devices once, for a command. Blocks: at most ``seconds`` while the library loads, and as long as a call
    of the driver hangs. Raises ReaderUnavailable."""
    reader = NvmlReader(trial=TrialLoad(wait=seconds, deadline=seconds))
    reader.open()
    try:
        return reader.read()
    finally:
        reader.close()
