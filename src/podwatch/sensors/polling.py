"""Blocking looks that may hang, repeated at a rhythm and with a deadline, never on the event loop.

A thread that does not answer in time cannot be interrupted. It is left behind, its late answer is thrown away, and it
ends by itself should the call ever return; a bounded number of fresh threads try again meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

from podwatch.domain.reading import Reading, SensorState, unobserved
from podwatch.system.clock import Clock, until_beat
from podwatch.system.threads import Worker

R = TypeVar("R")
T = TypeVar("T")

SLOTS = ("gpu", "processes", "progress", "host", "training")
MAX_STUCK = 4
"""Threads left behind at one time. More would only pile up behind the same lock in the driver or file system."""
MAX_BACKOFF = 300.0
"""Seconds between tries at most: a driver that works again is noticed within five minutes."""
CLOSE_PATIENCE = 1.0
"""Seconds that stop() waits for an orderly close."""


async def end_task(task: "asyncio.Task[None]") -> None:
    """Cancel until it has ended: wait_for() of Python 3.11 swallows a cancellation that meets its result."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)


def slot(name: str) -> float:
    """When within a beat this sensor looks, as a share of its poll (12 ms apart at 2 s): one shortly after the other,
    because at once they would fight for the interpreter's lock, and all before the sensing loop turns."""
    return 0.006 * (SLOTS.index(name) if name in SLOTS else len(SLOTS))


class Poller(Generic[R, T]):
    """Repeats one blocking look in a daemon thread and keeps the newest reading.

    ``prepare`` runs on the event loop and returns the look for the thread; ``absorb`` runs on the event loop with the
    look's result. So all state lives on the loop and an abandoned thread can spoil nothing. An exception in a look is
    a BLIND reading. ``close``, if given, runs in the thread at the end, if the thread still answers.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        poll: float,
        deadline: float,
        prepare: Callable[[], Callable[[], R]],
        absorb: Callable[[R], Reading[T]],
        close: Callable[[], None] | None = None,
        max_stuck: int = MAX_STUCK,
    ) -> None:
        self._name = name
        self._clock = clock
        self._poll = poll
        self._deadline = deadline
        self._prepare = prepare
        self._absorb = absorb
        self._close = close
        self._max_stuck = max_stuck
        self._turned_at = clock.monotonic()
        self._reading: Reading[T] = unobserved(SensorState.PENDING, self._turned_at, "not observed yet")
        self._task: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        self._stuck: list[Worker] = []
        self._wake = asyncio.Event()

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"sensor {self._name}")

    async def stop(self) -> None:
        """Takes at most CLOSE_PATIENCE seconds, also while a call hangs."""
        task, self._task = self._task, None
        if task is not None:
            await end_task(task)
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if self._close is not None and not worker.stuck:
            with contextlib.suppress(Exception):  # an unclean close of a reader that we leave anyway
                await worker.call(self._close, timeout=CLOSE_PATIENCE)
        worker.close()

    def wake(self) -> None:
        """Look again now instead of at the next turn."""
        self._wake.set()

    def latest(self) -> Reading[T]:
        """The newest reading; one that is older than it can be while all is well counts as blind."""
        now = self._clock.monotonic()
        silence = now - self._turned_at
        if self._reading.ok and silence > self._poll + 2 * self._deadline:
            return unobserved(SensorState.BLIND, now, f"not looked for {silence:.0f} s")
        return self._reading

    @property
    def stuck(self) -> int:
        """Threads left behind whose call still has not come back."""
        for worker in [w for w in self._stuck if not w.stuck]:
            worker.close()
            self._stuck.remove(worker)
        return len(self._stuck)

    async def _run(self) -> None:
        backoff = self._deadline
        while True:
            began = self._clock.monotonic()
            if self._worker is None:
                self._worker = Worker(self._name)
            self._wake.clear()
            look = self._prepare()
            try:
                result = await self._worker.call(look, timeout=self._deadline)
                reading = self._absorb(result)
            except Exception as error:  # also a fault of ours: it must show as a blind sensor, not end the sensing
                if self._worker.stuck:
                    self._leave_behind(began)
                    await self._wait_for_better(backoff)
                    backoff = min(backoff * 2, MAX_BACKOFF)
                    continue
                text = f"{type(error).__name__}: {error}"
                reading = unobserved(SensorState.BLIND, self._clock.monotonic(), text)
            backoff = self._deadline
            self._turned_at = self._clock.monotonic()
            self._reading = reading
            await self._clock.wait(self._wake, until_beat(self._turned_at, self._poll, slot(self._name) * self._poll))

    def _leave_behind(self, began: float) -> None:
        if self._worker is not None:
            self._stuck.append(self._worker)
            self._worker = None
        now = self._clock.monotonic()
        calls = "the call hangs" if self.stuck <= 1 else f"{self.stuck} calls hang"
        self._reading = unobserved(SensorState.BLIND, now, f"no answer within {now - began:.1f} s; {calls}")

    async def _wait_for_better(self, backoff: float) -> None:
        """Wait for ``backoff`` seconds, or until a stuck call comes back: the best sign that trying again is worth it.

        Goes on waiting while as many threads are stuck as may be.
        """
        before = self.stuck
        until = self._clock.monotonic() + backoff
        while self._clock.monotonic() < until or self.stuck >= self._max_stuck:
            await self._clock.sleep(min(self._poll, 1.0))
            if self.stuck < before:
                return
