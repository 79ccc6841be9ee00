"""The health of a device as NVML reports it: MIG mode, uncorrected ECC errors, the reasons for reduced clocks, and XIDs
as events. All of it is optional: an error here is not an error of the device.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

from podwatch.sensors.xid import XidInbox

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
        self._inbox.nvml = registered == len(handles)

    def drain(self, nvml: Any) -> None:
        """Read the pending events; never waits."""
        if self._set is None:
            return
        for _ in range(MAX_EVENTS):
            try:
                data = nvml.nvmlEventSetWait_v2(self._set, 0)
            except nvml.NVMLError as error:
                if error.value not in (nvml.NVML_ERROR_TIMEOUT, nvml.NVML_ERROR_GPU_IS_LOST):
                    self._set, self._inbox.nvml = None, False
                return
            if data.eventType & nvml.nvmlEventTypeXidCriticalError:
                self._inbox.add(self._index(nvml, data.device), int(data.eventData))

    def close(self, nvml: Any) -> None:
        events, self._set, self._inbox.nvml = self._set, None, False
        if events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(events)

    @staticmethod
    def _index(nvml: Any, handle: Any) -> int | None:
        try:
            return int(nvml.nvmlDeviceGetIndex(handle))
        except nvml.NVMLError:
            return None


def pci_addresses(nvml: Any, handles: dict[int, Any]) -> dict[str, int]:
    """PCI address -> index, for devices that report one."""
    found = {}
    for index, handle in handles.items():
        with contextlib.suppress(nvml.NVMLError):
            address = nvml.nvmlDeviceGetPciInfo(handle).busId
            found[address.decode() if isinstance(address, bytes) else str(address)] = index
    return found
