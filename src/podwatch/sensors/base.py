"""What every sensor offers, and the base of those that poll."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from podwatch.domain.snapshot import Reading, SensorState, unobserved
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock, until_beat

T_co = TypeVar("T_co", covariant=True)


class Sensor(Protocol[T_co]):
    name: str
    """Stable: the label of ``podwatch_sensor_up``."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Stop. Returns promptly even while a call hangs."""
        ...

    def latest(self) -> "Reading[T_co]":
        """The newest reading; never blocks."""
        ...


@runtime_checkable
class Wakeable(Protocol):
    """A sensor that can read again before its next poll."""

    def wake(self) -> None:
        """Read again now; the result appears in ``latest`` soon. Never blocks."""
        ...


# -- polling ---------------------------------------------------------------------------------------------------------
# Blocking reads that can hang, repeated at an interval and with a deadline, never on the event loop. A thread that
# does not answer in time cannot be interrupted. It is abandoned: its late answer is discarded, and it ends if the
# call ever returns. A limited number of new threads try again meanwhile.

R = TypeVar("R")
T = TypeVar("T")
Read: TypeAlias = Callable[[], R]
"""One blocking read: runs in the thread, which can be abandoned, so it must not change any state."""

SLOTS = ("gpu", "processes", "progress", "host")
MAX_STUCK = 4
"""Maximum number of abandoned threads. More would only queue for the same lock in the driver or file system."""
CLOSE_PATIENCE = 1.0
"""Seconds that stop() waits for an orderly close."""


async def end_task(task: "asyncio.Task[None]") -> None:
    """Cancel the task repeatedly until it has ended: wait_for() of Python 3.11 loses a cancellation that coincides with
    its result."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)


def slot(name: str) -> float:
    """When within an interval this sensor reads, as a share of its poll (12 ms apart at 2 s): one shortly after the
    other, because at the same time they would compete for the interpreter's lock, and all before the sensing loop
    runs."""
    return 0.006 * (SLOTS.index(name) if name in SLOTS else len(SLOTS))


class PolledSensor(ABC, Generic[R, T]):
    """Repeats one blocking read in a daemon thread and keeps the newest reading. An exception in the thread is a BLIND
    reading. ``prepare``, ``absorb`` and all state belong to the event loop: an abandoned thread does no harm."""

    name = ""

    def __init__(self, clock: Clock, *, poll: float, deadline: float, max_stuck: int = MAX_STUCK) -> None:
        self._clock, self._poll, self._deadline, self._max_stuck = clock, poll, deadline, max_stuck
        self._turned_at = clock.monotonic()
        self._reading: Reading[T] = unobserved(SensorState.PENDING, self._turned_at, "not observed yet")
        self._task: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        self._stuck: list[Worker] = []
        self._wake = asyncio.Event()

    @abstractmethod
    def prepare(self) -> Read[R]:
        """Return the read for the thread."""

    @abstractmethod
    def absorb(self, result: R) -> Reading[T]:
        """Return the reading for the result of the thread."""

    def close(self) -> None:
        """Release what the reads use: in the thread, at the end, if it still answers."""

    async def start(self) -> None:
        self.begin()

    def begin(self) -> None:
        """``start``, where nothing can be awaited."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"sensor {self.name}")

    async def stop(self) -> None:
        """Stop polling. Takes at most CLOSE_PATIENCE seconds, even while a call hangs."""
        task, self._task = self._task, None
        if task is not None:
            await end_task(task)
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if not worker.stuck:
            with contextlib.suppress(Exception):  # the reader is not used any more
                await worker.call(self.close, timeout=CLOSE_PATIENCE)
        worker.close()

    def wake(self) -> None:
        """Read again now instead of at the next poll."""
        self._wake.set()

    def latest(self) -> Reading[T]:
        """The newest reading, or BLIND if it is older than a working sensor allows."""
        now = self._clock.monotonic()
        silence = now - self._turned_at
        if self._reading.ok and silence > self._poll + 2 * self._deadline:
            return unobserved(SensorState.BLIND, now, f"no reading for {silence:.0f} s")
        return self._reading

    @property
    def stuck(self) -> int:
        """Number of abandoned threads whose call has not returned."""
        for worker in [w for w in self._stuck if not w.stuck]:
            worker.close()
            self._stuck.remove(worker)
        return len(self._stuck)

    async def _run(self) -> None:
        backoff = self._deadline
        while True:
            began = self._clock.monotonic()
            if self._worker is None:
                self._worker = Worker(self.name)
            self._wake.clear()
            look = self.prepare()
            try:
                result = await self._worker.call(look, timeout=self._deadline)
                reading = self.absorb(result)
            except Exception as error:  # also a bug: it must show as a blind sensor, not end the sensing
                if self._worker.stuck:
                    self._leave_behind(began)
                    await self._wait_for_better(backoff)
                    backoff = min(backoff * 2, 300.0)  # a driver that works again is noticed within five minutes
                    continue
                text = f"{type(error).__name__}: {error}"
                reading = unobserved(SensorState.BLIND, self._clock.monotonic(), text)
            backoff = self._deadline
            self._turned_at = self._clock.monotonic()
            self._reading = reading
            await self._clock.wait(self._wake, until_beat(self._turned_at, self._poll, slot(self.name) * self._poll))

    def _leave_behind(self, began: float) -> None:
        if self._worker is not None:
            self._stuck.append(self._worker)
            self._worker = None
        now = self._clock.monotonic()
        calls = "the call hangs" if self.stuck <= 1 else f"{self.stuck} calls hang"
        self._reading = unobserved(SensorState.BLIND, now, f"no answer within {now - began:.1f} s; {calls}")

    async def _wait_for_better(self, backoff: float) -> None:
        """Wait for ``backoff`` seconds, or until a stuck call returns: then a new attempt is likely to succeed.

        Continues waiting while the maximum number of threads is stuck.
        """
        before = self.stuck
        until = self._clock.monotonic() + backoff
        while self._clock.monotonic() < until or self.stuck >= self._max_stuck:
            await self._clock.sleep(min(self._poll, 1.0))
            if self.stuck < before:
                return
