"""A stand-in for NVIDIA's ``libnvidia-ml.so.1`` whose world a test controls while the program under test runs.

The real ``pynvml`` loads it; nothing is patched.

In a child process (``podwatch run`` in the end-to-end tests, or any program)::

    library = build_nvml(tmp_path)                      # compiles in about 0.2 s; raises NoCompiler without gcc
    world = NvmlWorld(tmp_path / "world", devices=2)    # writes the control file
    subprocess.Popen([...], env=os.environ | world.environment(library))
    world.set_memory(0, 20 * GIB)
    world.set_memory(0, 0)                              # the engine is gone

In this process: ``load_here(library)``, and ``monkeypatch.setenv("NVML_STANDIN", str(world.path))``. The loader then
finds it by its SONAME. A process cannot unload it, so a test of "no library at all" needs a child process.

In a test, ``nvml_library`` (a session fixture in tests/sensors/conftest.py) or three lines of one's own give the path,
and a single clear skip reason where no compiler is.
"""

import ctypes
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("standin.c")
SONAME = "libnvidia-ml.so.1"
GIB = 1 << 30

NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
UNKNOWN = 999


class NoCompiler(RuntimeError):  # noqa: N818
    """There is no C compiler on this machine."""


def build_nvml(directory: Path, *, old_driver: bool = False) -> Path:
    """Compile the stand-in into ``directory`` and return the library's path; nothing is done if it is there already.

    ``old_driver``: without memory info version 2 and nvmlDeviceGetTemperatureV. Raises NoCompiler.
    """
    target = directory / SONAME
    if target.exists():
        return target
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NoCompiler("the NVML stand-in needs a C compiler: install gcc")
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")
    flags = ["-std=gnu11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{SONAME}"]
    if old_driver:
        flags.append("-DOLD_DRIVER")
    subprocess.run([compiler, *flags, "-o", str(unfinished), str(SOURCE)], check=True)
    unfinished.replace(target)
    return target


def load_here(library: Path) -> None:
    """Load the stand-in into this process; from then on ``dlopen("libnvidia-ml.so.1")`` gives it, for good."""
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@dataclass
class _Gpu:
    uuid: str
    name: str
    total: int
    used: int = 0
    reserved: int = 600 << 20
    utilization: int = 0
    temperature: int = 40
    minor: int = 0
    error: int = 0
    hang: int = 0
    mig: int = 0
    ecc: int = 0
    reasons: int = 0
    unsupported: set[str] = field(default_factory=set)
    processes: list[tuple[int, int]] = field(default_factory=list)


class NvmlWorld:
    """The control file of the stand-in. Every change is one atomic replacement, seen by the next call.

    Sizes are in bytes. ``used`` is without the driver's reserve, as memory info version 2 reports it.
    """

    def __init__(
        self, path: Path, *, devices: int = 1, total: int = 80 * GIB, driver: str = "570.86.15", name: str = "Stand-in"
    ) -> None:
        self.path = path
        self._writing = threading.Lock()
        self._driver = driver
        self._init = 0
        self._hang = 0
        self._init_hang = 0
        self._load = self._init_do = ""
        self._xids: list[tuple[int, int]] = []
        self._gpus = [
            _Gpu(f"GPU-00000000-0000-0000-0000-{index:012d}", f"{name} {index}", total, minor=index)
            for index in range(devices)
        ]
        self._write()

    def environment(self, library: Path) -> dict[str, str]:
        """What a child process needs in its environment to use this world."""
        paths = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {"NVML_STANDIN": str(self.path), "LD_LIBRARY_PATH": ":".join(paths)}

    def set_memory(self, index: int, used: int) -> None:
        self._gpus[index].used = used
        self._write()

    def set_reserved(self, index: int, reserved: int) -> None:
        """The driver's own share: in ``used`` by version 1 of the call, apart in version 2."""
        self._gpus[index].reserved = reserved
        self._write()

    def set_minors(self, *minors: int) -> None:
        """N of /dev/nvidiaN, device by device."""
        for gpu, minor in zip(self._gpus, minors, strict=True):
            gpu.minor = minor
        self._write()

    def set_load(self, index: int, *, utilization: int, temperature: int = 60) -> None:
        self._gpus[index].utilization = utilization
        self._gpus[index].temperature = temperature
        self._write()

    def hang(self, index: int, on: bool = True) -> None:
        """Every call on this device sleeps until ``hang(index, False)``."""
        self._gpus[index].hang = int(on)
        self._write()

    def hang_all(self, on: bool = True) -> None:
        """Every call but init sleeps until ``hang_all(False)``."""
        self._hang = int(on)
        self._write()

    def hang_init(self, on: bool = True) -> None:
        self._init_hang = int(on)
        self._write()

    def loading(self, how: str) -> None:
        """What the library does while it is loaded: hang (until this changes), abort, crash, exit; "": nothing."""
        self._load = how
        self._write()

    def initializing(self, how: str) -> None:
        """What nvmlInit does: abort, crash, exit; "": nothing."""
        self._init_do = how
        self._write()

    def lost(self, index: int, on: bool = True) -> None:
        """The device falls off the bus (or, ``on=False``, is back)."""
        self.fail(index, GPU_IS_LOST if on else 0)

    def fail(self, index: int, code: int) -> None:
        """Every call on this device returns this NVML error code; 0 ends it."""
        self._gpus[index].error = code
        self._write()

    def not_supported(self, index: int, *what: str) -> None:
        """``what``: memory, memory_v2, utilization, temperature, processes, uuid, name, minor, mig, ecc, reasons, pci,
        events. None: all supported."""
        self._gpus[index].unsupported = set(what)
        self._write()

    def set_mig(self, index: int, on: bool = True) -> None:
        self._gpus[index].mig = int(on)
        self._write()

    def set_ecc(self, index: int, uncorrected: int) -> None:
        """Uncorrected errors since the driver was loaded (the volatile counter)."""
        self._gpus[index].ecc = uncorrected
        self._write()

    def throttle(self, index: int, reasons: int) -> None:
        """``nvmlClocksThrottleReason...`` bits that hold the clocks down now."""
        self._gpus[index].reasons = reasons
        self._write()

    def xid(self, index: int, code: int) -> None:
        """The driver reports this XID as an event, once, to everyone who registered before."""
        self._xids.append((index, code))
        self._write()

    def processes(self, index: int, *processes: tuple[int, int]) -> None:
        """(host PID, bytes) of the processes with a context on this device."""
        self._gpus[index].processes = list(processes)
        self._write()

    def fail_library(self, code: int) -> None:
        """Init and every other call return this NVML error code, as when the driver goes away; 0 ends it."""
        self._init = code
        self._write()

    def _write(self) -> None:
        with self._writing:  # a test and the cards of its rig change it from two threads
            self._replace()

    def _replace(self) -> None:
        lines = [
            f"init {self._init}",
            f"init_hang {self._init_hang}",
            f"load {self._load}",
            f"init_do {self._init_do}",
            f"hang {self._hang}",
            f"driver {self._driver}",
            f"devices {len(self._gpus)}",
        ]
        for index, gpu in enumerate(self._gpus):
            for key in ("uuid", "name", "total", "used", "reserved", "utilization", "temperature", "minor", "error"):
                lines.append(f"gpu.{index}.{key} {getattr(gpu, key)}")
            for key in ("hang", "mig", "ecc", "reasons"):
                lines.append(f"gpu.{index}.{key} {getattr(gpu, key)}")
            lines.append(f"gpu.{index}.unsupported {','.join(sorted(gpu.unsupported))}")
            lines += [f"gpu.{index}.process {pid} {memory}" for pid, memory in gpu.processes]
        lines += [f"xid {gpu} {code}" for gpu, code in self._xids]
        unfinished = self.path.with_name(self.path.name + ".new")
        unfinished.write_text("\n".join(lines) + "\n")
        unfinished.replace(self.path)
