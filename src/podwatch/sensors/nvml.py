"""NVML through ``pynvml`` (nvidia-ml-py): the real GpuReader, and the health that a device reports.

podwatch uses device memory only: inside containers NVML shows host PIDs or none.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from podwatch.domain.snapshot import GpuSample, GpuState, SensorState
from podwatch.sensors.gpu import ABSENT_FIX, ReaderUnavailable, TrialLoad, load_here
from podwatch.sensors.xid import XidInbox

# -- reader ----------------------------------------------------------------------------------------------------------

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
        if self._events is not None:
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


# -- health of a device ----------------------------------------------------------------------------------------------
# MIG mode, uncorrected ECC errors, the reasons for reduced clocks, and XIDs as events. All of it is optional: an
# error here is not an error of the device.

EVERY = 15
"""Health is read at every n-th poll: every 30 s at the default interval. Throttling counts when it lasts for minutes,
an ECC error also comes as an XID, and the temperature is only shown; four more calls per device at every poll would
cost twice as much as all the others."""
MAX_EVENTS = 32
"""Events read per poll; the rest is read at the next poll."""


@dataclass(frozen=True, slots=True)
class Health:
    mig: bool = False
    ecc_uncorrected: int | None = None
    throttled: tuple[str, ...] = ()
    temperature_celsius: float | None = None


@dataclass(slots=True)
class DeviceHealth:
    """The health of one device, read at every ``EVERY``-th poll. A call that the driver does not support is tried only
    once."""

    index: int
    handle: Any
    looks: int = 0
    newest: Health = Health()
    unknown: set[str] = field(default_factory=set)

    def look(self, nvml: Any) -> Health:
        # Devices take turns, so that no poll reads the health of all of them; the first poll reads each.
        due = self.looks == 0 or (self.looks + 2 * self.index) % EVERY == 0
        self.looks += 1
        if due:
            celsius = self._ask(nvml, "temperature", _celsius)
            self.newest = Health(
                bool(self._ask(nvml, "mig", _mig)),
                self._ask(nvml, "ecc", _ecc),
                _reasons(nvml, self._ask(nvml, "throttled", _bits) or 0),
                None if celsius is None else float(celsius),
            )
        return self.newest

    def _ask(self, nvml: Any, what: str, call: Any) -> int | None:
        if what in self.unknown:
            return None
        try:
            return int(call(nvml, self.handle))
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self.unknown.add(what)
            return None


def _mig(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetMigMode(handle)[0])


def _celsius(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU))
    except nvml.NVMLError as error:
        if error.value not in (
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
            nvml.NVML_ERROR_NOT_SUPPORTED,
        ):
            raise
    return int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))  # before driver 560


def _ecc(nvml: Any, handle: Any) -> int:
    return int(
        nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    )


def _bits(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
    return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # its name before driver 535


def _reasons(nvml: Any, bits: int) -> tuple[str, ...]:
    """The reasons that are faults. A software power cap, idle clocks or a user's own clocks are normal."""
    found = []
    if bits & nvml.nvmlClocksThrottleReasonHwThermalSlowdown:
        found.append("hw-thermal")
    if bits & nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown:
        found.append("hw-power-brake")
    if bits & nvml.nvmlClocksThrottleReasonSwThermalSlowdown:
        found.append("sw-thermal")
    if bits & nvml.nvmlClocksThrottleReasonHwSlowdown and not found:
        found.append("hw-slowdown")  # older boards do not distinguish heat from power
    return tuple(found)


class XidEvents:
    """Puts NVML's critical-XID events of all devices into an inbox. Call it only from the reader's thread."""

    def __init__(self, inbox: XidInbox) -> None:
        self._inbox = inbox
        self._set: Any = None

    def open(self, nvml: Any, handles: dict[int, Any]) -> None:
        """Register for events. XIDs count as watched only if every device could be registered."""
        self.close(nvml)
        registered = 0
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:  # WSL, vGPU and some MIG set-ups have no events
            return
        for handle in handles.values():
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                registered += 1
        if not registered:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(events)
            return
        self._set = events
        self._inbox.watched = registered == len(handles)

    def drain(self, nvml: Any) -> None:
        """Read the pending events; never waits."""
        if self._set is None:
            return
        for _ in range(MAX_EVENTS):
            try:
                data = nvml.nvmlEventSetWait_v2(self._set, 0)
            except nvml.NVMLError as error:
                if error.value not in (nvml.NVML_ERROR_TIMEOUT, nvml.NVML_ERROR_GPU_IS_LOST):
                    self._set, self._inbox.watched = None, False
                return
            if data.eventType & nvml.nvmlEventTypeXidCriticalError:
                self._inbox.add(self._index(nvml, data.device), int(data.eventData))

    def close(self, nvml: Any) -> None:
        events, self._set, self._inbox.watched = self._set, None, False
        if events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(events)

    @staticmethod
    def _index(nvml: Any, handle: Any) -> int | None:
        try:
            return int(nvml.nvmlDeviceGetIndex(handle))
        except nvml.NVMLError:
            return None
