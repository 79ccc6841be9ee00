"""GPU memory, utilization and temperature by device, through a reader that can hang."""

from typing import Protocol

from podwatch.domain.snapshot import GpuSample, Reading, SensorState, observed, unobserved
from podwatch.sensors.base import Poller, Read
from podwatch.system.clock import Clock

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
