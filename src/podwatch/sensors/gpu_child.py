"""NVML, in a process of its own for good: a driver that hangs, aborts or crashes does it here and not in podwatch.

Run by path, as ``python -I gpu_child.py LIBRARY SECONDS``: standard library and pynvml only, no podwatch import. For
each line on stdin it reads all devices and writes one line of JSON, in between one for each stage it has reached. It
ends when stdin closes, by its own alarm after SECONDS in one reading, or after a failure of the library as a whole:
podwatch starts another one.

Memory comes from ``nvmlDeviceGetMemoryInfo_v2`` where the driver has it, because its ``used`` excludes the memory that
the driver reserves; else from version 1. Only devices are read: inside containers NVML shows host PIDs or none.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

EVERY = 15
"""Health is read at every n-th poll: every 30 s at the default interval. Throttling counts when it lasts for minutes,
an ECC error also comes as an XID, and the temperature is only shown; four more calls per device at every poll would
cost twice as much as all the others."""
MAX_EVENTS = 32
"""XidEvents read per poll; the rest is read at the next poll."""
NO_PERMISSION_FIX = (
    "give podwatch's user access to /dev/nvidiactl and /dev/nvidia*; in a systemd unit: DeviceAllow=char-nvidia* rw"
)
ABSENT_FIX = (
    "install the NVIDIA driver, or start the container with GPUs (--gpus all, NVIDIA_DRIVER_CAPABILITIES=utility)"
)
CRASH_FIX = "reinstall the NVIDIA driver's libraries; if nvidia-smi fails too, reboot or replace the pod"


class Failed(Exception):  # noqa: N818 - no error of this program
    """The library cannot be used: the state of the sensor, what happened, and what the operator can do."""


def library_failure(nvml: Any, error: Any) -> Failed:
    by_code = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: ("absent", "libnvidia-ml.so.1 was not found", ABSENT_FIX),
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: (
            "absent", "the NVIDIA driver is not loaded", "load it (nvidia-smi must work), or reboot",
        ),
        nvml.NVML_ERROR_NO_PERMISSION: ("denied", "permission denied: cannot use the GPU driver", NO_PERMISSION_FIX),
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "blind", "the NVIDIA library and the loaded driver have different versions",
            "reboot, or restart the container",
        ),
    }  # fmt: skip
    return Failed(*by_code.get(error.value, ("blind", f"NVML failed: {error}", "check whether nvidia-smi works")))


def too_old(nvml: Any, error: Any) -> bool:
    """Whether the driver or the device does not support this version of a call."""
    return error.value in (
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        nvml.NVML_ERROR_INVALID_ARGUMENT,
        nvml.NVML_ERROR_NOT_SUPPORTED,
    )


class Device:
    """One device. ``health``: MIG mode, uncorrected ECC errors, throttling and temperature, all of them optional: an
    error there is not an error of the device. A call that the driver does not support is tried only once."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.nvml, self.index, self.handle = nvml, index, None
        self.names: dict[str, Any] = {"index": index, "uuid": "", "name": ""}
        self.error: Any = None
        self.plain_memory = False
        self.polls = 0
        self.unknown: set[str] = set()
        self.health: dict[str, Any] = {}
        try:
            self.handle = handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            self.error = error
            return
        for key, call in (
            ("uuid", lambda: str(nvml.nvmlDeviceGetUUID(handle))),
            ("name", lambda: str(nvml.nvmlDeviceGetName(handle))),
            ("minor", lambda: int(nvml.nvmlDeviceGetMinorNumber(handle))),
        ):
            with contextlib.suppress(nvml.NVMLError):  # MIG and vGPU devices refuse several
                self.names[key] = call()

    def sample(self) -> dict[str, Any]:
        """The fields of a ``GpuSample``. Raises Failed if the library as a whole failed."""
        nvml = self.nvml
        try:
            if self.error is not None:
                raise self.error
            used, total = self._memory()
        except nvml.NVMLError as error:
            return self.names | self._failed(error)
        use = None
        with contextlib.suppress(nvml.NVMLError):
            use = float(nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu)
        if self.polls % EVERY == 0:
            self.health = self._health()
        self.polls += 1
        figures = {"memory_used_bytes": used, "memory_total_bytes": total, "utilization_percent": use}
        return self.names | self.health | figures

    def _memory(self) -> tuple[int, int]:
        """(used, total) in bytes; ``used`` excludes the driver's reserve where the driver reports it separately."""
        if not self.plain_memory:
            try:
                info = self.nvml.nvmlDeviceGetMemoryInfo(self.handle, version=self.nvml.nvmlMemory_v2)
                return int(info.used), int(info.total)
            except self.nvml.NVMLError as error:
                if not too_old(self.nvml, error):
                    raise
        # Either the driver is older than that call, or the device reports no memory at all: version 1 shows which.
        info = self.nvml.nvmlDeviceGetMemoryInfo(self.handle)
        self.plain_memory = True
        return int(info.used), int(info.total)

    def _failed(self, error: Any) -> dict[str, str]:
        nvml = self.nvml
        if error.value in (
            nvml.NVML_ERROR_UNINITIALIZED,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        ):
            raise library_failure(nvml, error) from error
        state, detail = {
            nvml.NVML_ERROR_GPU_IS_LOST: ("lost", "fell off the bus: reboot, or use another machine"),
            nvml.NVML_ERROR_NOT_SUPPORTED: ("not-supported", "this device does not report its memory"),
            nvml.NVML_ERROR_NO_PERMISSION: ("error", f"no permission: {NO_PERMISSION_FIX}"),
            nvml.NVML_ERROR_RESET_REQUIRED: ("error", "needs a reset (nvidia-smi --gpu-reset) or a reboot"),
        }.get(error.value, ("error", f"NVML: {error}"))
        return {"state": state, "detail": detail}

    def _health(self) -> dict[str, Any]:
        nvml, handle = self.nvml, self.handle
        celsius = self._ask("celsius", lambda: _celsius(nvml, handle))
        return {
            "mig": bool(self._ask("mig", lambda: nvml.nvmlDeviceGetMigMode(handle)[0])),
            "ecc_uncorrected": self._ask(
                "ecc",
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                ),
            ),
            "throttled": _reasons(nvml, self._ask("throttled", lambda: _bits(nvml, handle)) or 0),
            "temperature_celsius": None if celsius is None else float(celsius),
        }

    def _ask(self, what: str, call: Callable[[], Any]) -> int | None:
        if what in self.unknown:
            return None
        try:
            return int(call())
        except self.nvml.NVMLError as error:
            if error.value in (self.nvml.NVML_ERROR_NOT_SUPPORTED, self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self.unknown.add(what)
            return None


def _celsius(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU))
    except nvml.NVMLError as error:
        if not too_old(nvml, error):
            raise
    return int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))  # before driver 560


def _bits(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
    return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # its name before driver 535


def _reasons(nvml: Any, bits: int) -> list[str]:
    """The reasons that are faults. A software power cap, idle clocks or a user's own clocks are normal."""
    found = [
        name
        for name, bit in (
            ("hw-thermal", nvml.nvmlClocksThrottleReasonHwThermalSlowdown),
            ("hw-power-brake", nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown),
            ("sw-thermal", nvml.nvmlClocksThrottleReasonSwThermalSlowdown),
        )
        if bits & bit
    ]
    # Older boards do not distinguish heat from power.
    return found or (["hw-slowdown"] if bits & nvml.nvmlClocksThrottleReasonHwSlowdown else [])


class XidEvents:
    """NVML's critical-XID events of all devices. ``watched`` only if every device could be registered."""

    def __init__(self, nvml: Any, devices: list[Device]) -> None:
        self.nvml, self.watched, self.set = nvml, False, None
        handles = [device.handle for device in devices if device.error is None]
        registered = 0
        with contextlib.suppress(nvml.NVMLError):  # WSL, vGPU and some MIG set-ups have no events
            self.set = nvml.nvmlEventSetCreate()
            for handle in handles:
                with contextlib.suppress(nvml.NVMLError):
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self.set)
                    registered += 1
        self.watched = 0 < registered == len(handles)

    def pending(self) -> list[tuple[int | None, int]]:
        """(GPU, code) of the events since the last call; never waits."""
        nvml, found = self.nvml, []
        for _ in range(MAX_EVENTS if self.set is not None else 0):
            try:
                data = nvml.nvmlEventSetWait_v2(self.set, 0)
            except nvml.NVMLError as error:
                if error.value not in (nvml.NVML_ERROR_TIMEOUT, nvml.NVML_ERROR_GPU_IS_LOST):
                    self.set, self.watched = None, False
                break
            if data.eventType & nvml.nvmlEventTypeXidCriticalError:
                index = None
                with contextlib.suppress(nvml.NVMLError):
                    index = int(nvml.nvmlDeviceGetIndex(data.device))
                found.append((index, int(data.eventData)))
        return found


class NvmlLibrary:
    """``report`` writes one line of JSON."""

    def __init__(self, library: str, report: Callable[[dict[str, Any]], None]) -> None:
        self.library, self.report = library, report
        self.devices: list[Device] = []
        self.events: XidEvents | None = None

    def read(self) -> dict[str, Any]:
        """All devices in index order, and the new XIDs. Raises Failed."""
        if self.events is None:
            self._open()
        assert self.events is not None
        xids = self.events.pending()
        return {"gpus": [d.sample() for d in self.devices], "xids": xids, "xids_watched": self.events.watched}

    def _open(self) -> None:
        self.report({"stage": "while loading"})
        self._load()
        self.report({"stage": "in nvmlInit"})
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise Failed("absent", f"cannot import the Python module pynvml ({error})", "reinstall podwatch") from error
        try:
            nvml.nvmlInit()
            self.devices = [Device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            raise library_failure(nvml, error) from error
        if not self.devices:
            fix = "check NVIDIA_VISIBLE_DEVICES and the number of GPUs of the pod"
            raise Failed("absent", "NVML works but shows no GPU", fix)
        self.events = XidEvents(nvml, self.devices)
        self.report({"stage": "in a reading"})

    def _load(self) -> None:
        try:
            ctypes.CDLL(self.library)
        except OSError as error:
            said = str(error).replace("\n", " ")[:1_000]
            if "No such file" in said and said.startswith(f"{self.library}:"):
                raise Failed("absent", f"{self.library} was not found", ABSENT_FIX) from error
            raise Failed("blind", f"cannot load {self.library} ({said})", CRASH_FIX) from error


def main(library: str, seconds: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a library that aborts every minute would fill the disk
    answers = os.dup(1)  # the library, and what it starts, can write to its standard output, and stay
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def report(line: dict[str, Any]) -> None:
        os.write(answers, json.dumps(line).encode() + b"\n")

    reader = NvmlLibrary(library, report)
    while os.read(0, 4096):
        signal.alarm(int(seconds))  # ends a reading that hangs when podwatch is gone
        try:
            report(reader.read())
        except Failed as failed:
            report({"failed": failed.args})
            return
        signal.alarm(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # skip the library's own clean-up
