"""A sensor: docs/contributing.md."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from podwatch.domain.snapshot import Reading, observed
from podwatch.sensors.base import PolledSensor
from podwatch.system.clock import Clock


@dataclass(frozen=True, slots=True)
class LoadSample:
    running: float


class LoadSensor(PolledSensor[float, LoadSample]):
    name = "load"

    def __init__(self, clock: Clock, poll: float = 10.0) -> None:
        super().__init__(clock, poll=poll, deadline=5.0)

    def prepare(self) -> Callable[[], float]:  # on the event loop
        return self._look

    def absorb(self, seen: float) -> Reading[LoadSample]:  # on the event loop
        return observed(LoadSample(seen), self._clock.monotonic())

    @staticmethod
    def _look() -> float:  # in the thread: it can block
        return os.getloadavg()[0]
