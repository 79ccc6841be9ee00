"""GPU memory, utilization and temperature by device, through a reader that can hang, and the trial load of its library.

``dlopen`` runs the library's constructors while Python holds the interpreter lock: a library that hangs there freezes
every thread of podwatch, and one that aborts or crashes ends podwatch. Neither can be caught inside the process. So a
child with a deadline loads it first, and podwatch loads it only if the child succeeded.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from podwatch.domain.snapshot import GpuSample, Reading, SensorState, observed, unobserved
from podwatch.sensors.base import Poller, Read
from podwatch.system.clock import Clock
from podwatch.system.environment_without_secrets import scrubbed_environment

REOPEN_MIN = 2.0
REOPEN_MAX = 60.0
"""Seconds between attempts to open the library again: reloading a driver takes about this long."""


class ReaderUnavailable(Exception):  # noqa: N818 - reads better at the raise site
    """The whole library cannot be used now. ``state`` is how to report it, ``fix`` is what the operator can do."""

    def __init__(self, state: SensorState, what: str, fix: str = "") -> None:
        super().__init__(f"{what}: {fix}" if fix else what)
        self.state = state


class GpuReader(Protocol):
    """The source of GPU readings. Every method can block or hang and is called in its own thread.

    After a hang another thread can call while the first call has not returned.
    """

    def open(self) -> None:
        """Open the library. Raises ReaderUnavailable. Called again after a failure."""
        ...

    def read(self) -> tuple[GpuSample, ...]:
        """All devices, in index order. Raises ReaderUnavailable when the library as a whole failed."""
        ...

    def close(self) -> None: ...


class _Look:
    """One reading: opens the reader if necessary. Exists for one poll, so a late thread leaves nothing behind."""

    def __init__(self, reader: GpuReader, opened: bool) -> None:
        self._reader = reader
        self._opened = opened

    def __call__(self) -> "tuple[GpuSample, ...] | ReaderUnavailable":
        try:
            if not self._opened:
                self._reader.open()
            return self._reader.read()
        except ReaderUnavailable as error:
            if self._opened:
                self._reader.close()
            return error


class GpuSensor:
    """Reads the GPUs every ``poll`` seconds; BLIND when an answer takes longer than ``deadline`` seconds.

    One hung device hangs the whole reading (NVML has one lock), so all are BLIND; a lost device does not hang.
    """

    name = "gpu"

    def __init__(self, reader: GpuReader, clock: Clock, poll: float = 2.0, deadline: float = 5.0) -> None:
        self._reader = reader
        self._clock = clock
        self._opened = False
        self._reopen_at = 0.0
        self._reopen_delay = REOPEN_MIN
        self._failure: Reading[tuple[GpuSample, ...]] | None = None
        self._poller: Poller[tuple[GpuSample, ...] | ReaderUnavailable | None, tuple[GpuSample, ...]] = Poller(
            self.name, clock, self, poll=poll, deadline=deadline, close=self._close
        )

    async def start(self) -> None:
        self._poller.start()

    async def stop(self) -> None:
        await self._poller.stop()

    def latest(self) -> Reading[tuple[GpuSample, ...]]:
        return self._poller.latest()

    def wake(self) -> None:
        self._poller.wake()

    def prepare(self) -> Read["tuple[GpuSample, ...] | ReaderUnavailable | None"]:
        if self._failure is not None and self._clock.monotonic() < self._reopen_at:
            return lambda: None  # too early to open again; the thread still runs
        return _Look(self._reader, self._opened)

    def absorb(self, result: "tuple[GpuSample, ...] | ReaderUnavailable | None") -> Reading[tuple[GpuSample, ...]]:
        now = self._clock.monotonic()
        if isinstance(result, ReaderUnavailable):
            self._opened = False
            self._reopen_at = now
            if result.state is not SensorState.PENDING:  # pending: opening continues at the next poll
                self._reopen_at += self._reopen_delay
                self._reopen_delay = min(self._reopen_delay * 2, REOPEN_MAX)
            self._failure = unobserved(result.state, now, str(result))
        elif result is not None:
            self._opened = True
            self._reopen_delay = REOPEN_MIN
            self._failure = None
            return observed(result, now)
        return self._failure or unobserved(SensorState.PENDING, now, "not observed yet")

    def _close(self) -> None:
        if self._opened:
            self._reader.close()


LIBRARY = "libnvidia-ml.so.1"
WAIT = 3.0
"""Seconds that one poll waits for the child: below the default of gpu.deadline, so that no thread is abandoned."""
DEADLINE = 10.0
"""Seconds until the child counts as hung. It needs 0.1 s; the rest is for a pod whose cores are all busy."""
_REAP = 0.5
"""Seconds to wait for the end of a child that was killed. In uninterruptible sleep it does not end."""
_LOOK = 0.2
"""Seconds between two checks whether the child has ended."""
_CHILD = Path(__file__).with_name("nvml_trial_child.py")
_RETRY = f"podwatch tries again within {REOPEN_MAX:.0f} s, in a child process"
_HANG_FIX = "check dmesg; if nvidia-smi hangs too, reboot or replace the pod"
_CRASH_FIX = "reinstall the NVIDIA driver's libraries; if nvidia-smi fails too, reboot or replace the pod"
ABSENT_FIX = (
    "install the NVIDIA driver, or start the container with GPUs (--gpus all, NVIDIA_DRIVER_CAPABILITIES=utility)"
)


def loaded_here() -> bool:
    """Whether this process has loaded the library already: loading it again runs no code of it."""
    try:
        return "/libnvidia-ml.so" in Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return False


def load_here(library: str = LIBRARY) -> None:
    """Load the library without the interpreter lock, so that a hang holds only the calling thread.

    A failure is not reported here: pynvml loads the library again (then only a look-up) and reports it.
    """
    libc = ctypes.CDLL(None)  # a foreign call releases the lock; Python's own dlopen does not
    with contextlib.suppress(AttributeError):
        libc.dlopen.restype = ctypes.c_void_p
        libc.dlopen(library.encode(), os.RTLD_NOW)


@dataclass(slots=True)
class _Child:
    process: "subprocess.Popen[bytes]"
    stages: int
    """Descriptor of the pipe on which the child reports its stages; it reaches end of file when the child ends."""
    started: float
    text: str = ""
    killed: bool = False

    def wait(self, seconds: float) -> bool:
        """Read stages for at most ``seconds``. Returns whether the child has ended."""
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.stages, select.POLLIN)
        while True:
            left = until - time.monotonic()
            if poll.poll(max(0.0, min(left, _LOOK)) * 1000):
                chunk = os.read(self.stages, 4096)
                if not chunk:
                    return self._reaped(max(left, _REAP))
                self.text += chunk.decode(errors="replace")
            elif self.process.poll() is not None:  # a process that the library started can keep the pipe open
                return True
            elif left <= 0:
                return False

    def kill(self) -> bool:
        """Send SIGKILL to the child. Returns whether it has ended; waits at most ``_REAP`` seconds."""
        self.killed = True
        self.process.kill()
        return self._reaped(_REAP)

    def close(self) -> None:
        os.close(self.stages)

    def _reaped(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def stage(self) -> str:
        """The last stage that the child reported, in words."""
        return "in nvmlInit" if "\nloaded\n" in self.text else "while loading"

    @property
    def file(self) -> str:
        """The path of the library that the running child has mapped: several can be installed. Waits at most ``_REAP``
        seconds, because reading the maps of a process that hangs in the kernel can block."""
        found: list[str] = []

        def read() -> None:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{self.process.pid}/maps").read_text(errors="replace").splitlines():
                    if "/libnvidia-ml.so" in (path := line[73:].strip()):
                        found.append(path)

        reader = threading.Thread(target=read, name="podwatch-gpu-maps", daemon=True)
        reader.start()
        reader.join(_REAP)
        return f" ({found[0]})" if found else ""


class TrialLoad:
    """Runs at most one child at a time, even where one cannot be killed (uninterruptible sleep). Blocks;
    thread-safe."""

    def __init__(self, library: str = LIBRARY, *, wait: float = WAIT, deadline: float = DEADLINE) -> None:
        self._library = library
        self._wait = wait
        self._deadline = deadline
        self._child: _Child | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """Return when the library can be loaded here. Raises ReaderUnavailable: ABSENT where there is none, BLIND where
        the child hangs or crashed, PENDING after ``wait`` seconds without an answer: the next call continues."""
        if loaded_here():
            return
        if not self._lock.acquire(blocking=False):
            raise self._blind(f"{self._library}: another thread is already waiting for its trial load")
        try:
            self._check()
        finally:
            self._lock.release()

    def _check(self) -> None:
        child = self._child = self._child or self._start()
        left = child.started + self._deadline - time.monotonic()
        last = left <= self._wait
        ended = child.wait(0 if child.killed else max(0.0, min(self._wait, left)))
        if not ended and child.killed:
            raise self._unkillable(child)
        if not ended:
            if not last:
                age = time.monotonic() - child.started
                raise ReaderUnavailable(
                    SensorState.PENDING, f"{self._library} has been loading in a child process for {age:.0f} s"
                )
            text = f"{self._library}{child.file} hangs {child.stage}: no answer within {self._deadline:.0f} s"
            if not child.kill():
                raise self._unkillable(child)
            self._forget(child)
            raise self._blind(f"{text}; {_RETRY}", _HANG_FIX)
        self._forget(child)
        if child.killed:  # the driver released it: perhaps the library works again
            self._check()
            return
        self._judge(child)

    def _judge(self, child: _Child) -> None:
        code, stages = child.process.returncode, child.text.splitlines()
        if not stages:
            raise self._blind(f"the child process that loads {self._library} could not run ({_end(code)}); {_RETRY}")
        if code != 0:
            raise self._blind(
                f"{self._library} ended its child process {child.stage} ({_end(code)}); {_RETRY}", _CRASH_FIX
            )
        word, _, said = stages[-1].partition(" ")
        if word != "absent":
            return
        if "No such file" in said and said.startswith(f"{self._library}:"):
            raise ReaderUnavailable(SensorState.ABSENT, f"{self._library} was not found", ABSENT_FIX)
        raise self._blind(f"cannot load {self._library} ({said}); {_RETRY}", _CRASH_FIX)

    def _start(self) -> _Child:
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-E", str(_CHILD),
                 self._library, str(int(self._deadline) + 10), str(writing)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=scrubbed_environment(os.environ), cwd="/", pass_fds=(writing,), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.close(reading)
            raise self._blind(
                f"cannot start the child process that loads {self._library} ({error.strerror}); {_RETRY}"
            ) from error
        finally:
            os.close(writing)
        return _Child(process, reading, time.monotonic())

    def _forget(self, child: _Child) -> None:
        child.close()
        self._child = None

    def _unkillable(self, child: _Child) -> ReaderUnavailable:
        where = f"process {child.process.pid} hangs {child.stage} of {self._library} and cannot be killed"
        return self._blind(f"{where}; podwatch tries again when it has ended", _HANG_FIX)

    @staticmethod
    def _blind(what: str, fix: str = "") -> ReaderUnavailable:
        return ReaderUnavailable(SensorState.BLIND, what, fix)


def _end(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
