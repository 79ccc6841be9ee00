"""A sensor: docs/contributing.md."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from podwatch.domain.snapshot import Reading, observed
from podwatch.sensors.base import Poller
from podwatch.system.clock import Clock


@dataclass(frozen=True, slots=True)
class LoadSample:
    running: float


class LoadSensor:
    name = "load"

    def __init__(self, clock: Clock, poll: float = 10.0) -> None:
        self._clock = clock
        self._poller: Poller[float, LoadSample] = Poller(self.name, clock, self, poll=poll, deadline=5.0)

    async def start(self) -> None:
        self._poller.start()

    async def stop(self) -> None:
        await self._poller.stop()

    def latest(self) -> Reading[LoadSample]:
        return self._poller.latest()

    def prepare(self) -> Callable[[], float]:  # on the event loop
        return self._look

    def absorb(self, seen: float) -> Reading[LoadSample]:  # on the event loop
        return observed(LoadSample(seen), self._clock.monotonic())

    @staticmethod
    def _look() -> float:  # in the thread: it can block
        return os.getloadavg()[0]
