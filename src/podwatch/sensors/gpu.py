"""GPU memory, utilization and temperature by device, from a child process that can hang or crash (``gpu_child.py``).

podwatch never loads NVIDIA's library itself: its constructors run while Python holds the interpreter lock, so that a
library that hangs there would freeze every thread, and one that aborts or crashes would end podwatch.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from podwatch.domain.snapshot import GpuSample, GpuState, Reading, SensorState, observed, unobserved
from podwatch.sensors.base import PolledSensor, Read
from podwatch.sensors.gpu_child import CRASH_FIX
from podwatch.sensors.xid import XidInbox
from podwatch.system.blocking_calls import in_time
from podwatch.system.clock import Clock
from podwatch.system.environment_without_secrets import scrubbed_environment

REOPEN_MIN = 2.0
REOPEN_MAX = 60.0
"""Seconds between attempts after a failure: reloading a driver takes about this long."""


class ReaderUnavailable(Exception):  # noqa: N818 - reads better at the raise site
    """There is no reading now. ``state`` is how to report it, ``fix`` is what the operator can do. ``underway``: the
    answer can still come, and the next attempt waits for it."""

    def __init__(self, state: SensorState, what: str, fix: str = "", *, underway: bool = False) -> None:
        super().__init__(f"{what}: {fix}" if fix else what)
        self.state, self.underway = state, underway


class GpuReader(Protocol):
    """The source of GPU readings; called in a thread."""

    def read(self) -> tuple[GpuSample, ...]:
        """All devices, in index order. Raises ReaderUnavailable."""
        ...

    def close(self) -> None: ...


class GpuSensor(PolledSensor["tuple[GpuSample, ...] | ReaderUnavailable | None", tuple[GpuSample, ...]]):
    """Reads the GPUs every ``poll`` seconds; BLIND when an answer takes longer than ``deadline`` seconds.

    One hung device hangs the whole reading (NVML has one lock), so all are BLIND; a lost device does not hang.
    """

    name = "gpu"

    def __init__(self, reader: GpuReader, clock: Clock, poll: float = 2.0, deadline: float = 5.0) -> None:
        super().__init__(clock, poll=poll, deadline=deadline)
        self._reader = reader
        self._reopen_at = 0.0
        self._reopen_delay = REOPEN_MIN
        self._failure: Reading[tuple[GpuSample, ...]] | None = None

    def close(self) -> None:
        self._reader.close()

    def prepare(self) -> Read["tuple[GpuSample, ...] | ReaderUnavailable | None"]:
        if self._failure is not None and self._clock.monotonic() < self._reopen_at:
            return lambda: None  # too early to try again; the thread still runs
        return self._read

    def _read(self) -> "tuple[GpuSample, ...] | ReaderUnavailable":
        try:
            return self._reader.read()
        except ReaderUnavailable as error:
            return error

    def absorb(self, result: "tuple[GpuSample, ...] | ReaderUnavailable | None") -> Reading[tuple[GpuSample, ...]]:
        now = self._clock.monotonic()
        if isinstance(result, ReaderUnavailable):
            self._reopen_at = now
            if not result.underway:
                self._reopen_at += self._reopen_delay
                self._reopen_delay = min(self._reopen_delay * 2, REOPEN_MAX)
            self._failure = unobserved(result.state, now, str(result))
        elif result is not None:
            self._reopen_delay = REOPEN_MIN
            self._failure = None
            return observed(result, now)
        return self._failure or unobserved(SensorState.PENDING, now, "not observed yet")


# -- the child ---------------------------------------------------------------------------------------------------------

LIBRARY = "libnvidia-ml.so.1"
WAIT = 3.0
"""Seconds that one reading waits for the child: below the default of gpu.deadline, so that no thread is abandoned."""
DEADLINE = 10.0
"""Seconds until the child counts as hung. Its first answer takes 0.1 s, later ones some milliseconds; the rest is for a
pod whose cores are all busy."""
_REAP = 0.5
"""Seconds to wait for the end of a child that was killed. In uninterruptible sleep it does not end."""
_LOOK = 0.2
"""Seconds between two checks whether the child has ended: a process that the library started can keep its pipe open."""
_PROGRAM = Path(__file__).with_name("gpu_child.py")
_RETRY = f"podwatch tries again within {REOPEN_MAX:.0f} s, in another process"
_HANG_FIX = "check dmesg; if nvidia-smi hangs too, reboot or replace the pod"


class _Child:
    """One child process. ``asked_at``: when the reading began that it has not answered yet; None: it has."""

    def __init__(self, library: str, deadline: float) -> None:
        """Raises OSError."""
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM), library, str(int(deadline) + 10)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=scrubbed_environment(os.environ), cwd="/", start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._questions, self._answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        self._text = b""
        self.asked_at: float | None = None
        self.stage = ""
        self.killed = False

    def ask(self) -> None:
        if self.asked_at is None:
            self.asked_at = time.monotonic()
            with contextlib.suppress(OSError):  # it has ended, which ``answer`` finds out
                os.write(self._questions, b"\n")

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Its answer, if it comes within ``seconds``. Raises EOFError if it has ended without one."""
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        while True:
            left = until - time.monotonic()
            if poll.poll(max(0.0, min(left, _LOOK)) * 1000):
                chunk = os.read(self._answers, 1 << 20)
                self._text += chunk
                if (found := self._next()) is not None:
                    self.asked_at = None
                    return found
                if not chunk and self.reaped(max(left, _REAP)):
                    raise EOFError
            elif self.process.poll() is not None and not poll.poll(0):
                raise EOFError
            if left <= 0:
                return None

    def _next(self) -> dict[str, Any] | None:
        while b"\n" in self._text:
            line, _, self._text = self._text.partition(b"\n")
            found: dict[str, Any] = json.loads(line)
            if "stage" not in found:
                return found
            self.stage = found["stage"]
        return None

    def kill(self) -> bool:
        """Send SIGKILL. Returns whether it has ended; waits at most ``_REAP`` seconds."""
        self.killed = True
        self.process.kill()
        return self.reaped(_REAP)

    def reaped(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    @property
    def file(self) -> str:
        """The path of the library that the running child has mapped: several can be installed. Waits at most ``_REAP``
        seconds, because reading the maps of a process that hangs in the kernel can block."""
        maps = Path(f"/proc/{self.process.pid}/maps")
        try:
            lines = in_time(lambda: maps.read_text(errors="replace"), seconds=_REAP).splitlines()
        except OSError:  # also a time-out
            return ""
        return next((f" ({path})" for line in lines if "/libnvidia-ml.so" in (path := line[73:].strip())), "")


class NvmlReader:
    """Reads through at most one child at a time, even where one cannot be killed (uninterruptible sleep). Its XIDs go
    into ``xids``. Blocks for ``wait`` seconds at most; thread-safe."""

    def __init__(
        self, xids: XidInbox | None = None, *, library: str = LIBRARY, wait: float = WAIT, deadline: float = DEADLINE
    ) -> None:
        self._xids, self._library, self._wait, self._deadline = xids, library, wait, deadline
        self._child: _Child | None = None
        self._lock = threading.Lock()

    def read(self) -> tuple[GpuSample, ...]:
        """Raises ReaderUnavailable: ABSENT and DENIED as the library says, BLIND where it hangs or crashes, PENDING
        where a child that was just started has not answered yet."""
        if not self._lock.acquire(blocking=False):
            raise self._blind("another thread is already waiting for the GPUs", underway=True)
        try:
            return self._read()
        finally:
            self._lock.release()

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.close()
        self._watched(False)

    def _read(self) -> tuple[GpuSample, ...]:
        child = self._child = self._child or self._start()
        child.ask()
        assert child.asked_at is not None
        left = child.asked_at + self._deadline - time.monotonic()
        try:
            answer = child.answer(0.0 if child.killed else max(0.0, min(self._wait, left)))
        except EOFError:
            self._forget(child)
            if child.killed:  # the driver released it: perhaps the library works again
                return self._read()
            raise self._ended(child) from None
        if child.killed:
            raise self._unkillable(child)
        if answer is None:
            raise self._no_answer(child, child.asked_at, last=left <= self._wait)
        return self._judge(child, answer)

    def _judge(self, child: _Child, answer: dict[str, Any]) -> tuple[GpuSample, ...]:
        if "failed" in answer:  # it ends now
            self._forget(child)
            state, what, fix = answer["failed"]
            raise ReaderUnavailable(SensorState(state), what, fix)
        if self._xids is not None:
            for gpu, code in answer["xids"]:
                self._xids.add(gpu, code)
        self._watched(answer["xids_watched"])
        return tuple(_sample(fields) for fields in answer["gpus"])

    def _no_answer(self, child: _Child, asked_at: float, *, last: bool) -> ReaderUnavailable:
        if not last:
            age, first = time.monotonic() - asked_at, child.stage != "in a reading"
            what = f"{self._library} has been loading in a child process for" if first else "no answer from NVML for"
            state = SensorState.PENDING if first else SensorState.BLIND
            return ReaderUnavailable(state, f"{what} {age:.0f} s", underway=True)
        what = f"{self._library}{child.file} hangs {child.stage}: no answer within {self._deadline:.0f} s; {_RETRY}"
        if not child.kill():
            return self._unkillable(child)
        self._forget(child)
        return self._blind(what, _HANG_FIX)

    def _ended(self, child: _Child) -> ReaderUnavailable:
        end = _end(child.process.returncode)
        if not child.stage:
            return self._blind(f"the child process that loads {self._library} could not run ({end}); {_RETRY}")
        return self._blind(f"{self._library} ended its child process {child.stage} ({end}); {_RETRY}", CRASH_FIX)

    def _start(self) -> _Child:
        try:
            return _Child(self._library, self._deadline)
        except OSError as error:
            what = f"cannot start the child process that loads {self._library} ({error.strerror}); {_RETRY}"
            raise self._blind(what) from error

    def _forget(self, child: _Child) -> None:
        self._child = None
        child.close()
        child.reaped(_REAP)
        self._watched(False)

    def _watched(self, watched: bool) -> None:
        if self._xids is not None:
            self._xids.watched = watched

    def _unkillable(self, child: _Child) -> ReaderUnavailable:
        where = f"process {child.process.pid} hangs {child.stage} of {self._library} and cannot be killed"
        return self._blind(f"{where}; podwatch tries again when it has ended", _HANG_FIX)

    @staticmethod
    def _blind(what: str, fix: str = "", *, underway: bool = False) -> ReaderUnavailable:
        return ReaderUnavailable(SensorState.BLIND, what, fix, underway=underway)


def _sample(fields: dict[str, Any]) -> GpuSample:
    fields["state"] = GpuState(fields.get("state", GpuState.OK))
    fields["throttled"] = tuple(fields.get("throttled", ()))
    return GpuSample(**fields)


def _end(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def look_once(seconds: float) -> tuple[GpuSample, ...]:
    """Read all devices once, for a command. Blocks for ``seconds`` at most. Raises ReaderUnavailable."""
    reader = NvmlReader(wait=seconds, deadline=seconds)
    try:
        return reader.read()
    finally:
        reader.close()
