"""The sensing loop: reads all sensors, runs detection, passes the findings on. Its turns alone feed the watchdog."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from podwatch.config.settings import Policies
from podwatch.detection.learned import Learned
from podwatch.detection.rules import DetectionState, advance, confirming
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.facts import Facts
from podwatch.domain.finding import Finding, Severity
from podwatch.domain.snapshot import (
    CheckpointMark,
    Desired,
    Reading,
    SensorState,
    Snapshot,
)
from podwatch.sensors.base import Sensor
from podwatch.sensors.disk import DiskSensor, DisksSensor
from podwatch.sensors.gpu import GpuSensor
from podwatch.sensors.host import HostSensor
from podwatch.sensors.inference import InferenceSensor
from podwatch.sensors.match_log_rules import LogRulesSensor
from podwatch.sensors.processes import ProcessSensor
from podwatch.sensors.progress import ProgressSensor
from podwatch.sensors.training_metrics import TrainingSensor
from podwatch.system.clock import Clock, until_beat

LAG = 0.05
"""Fraction of a poll (0.1 s of 2 s) by which the loop runs after the sensors, which answer within milliseconds."""
CONFIRM_POLL = 0.5
"""Seconds between turns while the evidence of a death is incomplete, for some seconds after an engine ended: a small
share of the 5 s to a verdict, and longer than the sensors take to answer."""
CONFIRM_LAG = 0.1
"""Part of ``CONFIRM_POLL`` that the sensors have to answer before the next turn."""
LATE_TURNS = 5
"""The loop counts as stalled after this many polls without a turn, and never sooner than ``LATE_SECONDS``."""
LATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Sensors:
    """All sensors of one daemon, by the names of their fields in ``Snapshot``."""

    gpus: GpuSensor
    trainer: ProcessSensor
    disk: DiskSensor
    inference: InferenceSensor
    progress: ProgressSensor
    host: HostSensor
    logs: LogRulesSensor
    training: TrainingSensor
    disks: DisksSensor

    def all(self) -> Mapping[str, Sensor[Any]]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def look(self, clock: Clock, *, saving: bool, desired: Desired, checkpoint: CheckpointMark) -> Snapshot:
        """A snapshot of the newest reading of each sensor. Never blocks."""
        readings: dict[str, Any] = {name: sensor.latest() for name, sensor in self.all().items()}
        return Snapshot(
            at=clock.monotonic(),
            wall=clock.wall(),
            checkpoint=checkpoint,
            saving=saving,
            desired=desired,
            boot_at=clock.boottime(),
            **readings,
        )

    def wake(self) -> None:
        """Poll the sensors that show the death of an engine now."""
        for sensor in (self.gpus, self.trainer, self.inference, self.progress):
            sensor.wake()

    async def start(self) -> None:
        for sensor in self.all().values():
            await sensor.start()

    async def stop(self) -> None:
        for sensor in self.all().values():
            await sensor.stop()


Turn = Callable[[Facts, tuple[Finding, ...]], None]
"""Gets the facts of each turn and what detection finds in them. Must not block."""


class SensingLoop:
    """Turns every ``poll`` seconds. Each turn begins with new facts, which ``observe`` builds without blocking."""

    def __init__(
        self,
        senses: Sensors,
        observe: Callable[[Learned], Facts],
        *,
        clock: Clock,
        poll: float,
        policies: Policies,
        state: DetectionState,
        emit: Emit,
        hurried: asyncio.Event,
    ) -> None:
        """``hurried``: set it for a turn at once."""
        self._senses, self._clock, self._poll = senses, clock, poll
        self.policies = policies
        self.state = state
        self._observe, self._emit = observe, emit
        self.turns = 0
        self.snapshot = Snapshot(at=clock.monotonic(), wall=clock.wall())
        self.findings: tuple[Finding, ...] = ()
        self._last_turn = clock.monotonic()
        self._armed = state.armed
        self._sensor_states: dict[str, SensorState] = {}
        self._hurried = hurried

    async def run(self, each: Turn) -> None:
        """Run until cancelled, and call ``each`` at each turn: one shortly after each poll of the sensors, sooner
        when hurried, and every ``CONFIRM_POLL`` while the evidence of a death is incomplete."""
        while True:
            self.turn(each)
            rest = until_beat(self._clock.monotonic(), self._poll, LAG * self._poll)
            sooner = confirming(self.state, self.snapshot, self.policies)
            await self._clock.wait(self._hurried, min(rest, CONFIRM_POLL - CONFIRM_LAG) if sooner else rest)
            if sooner or self._hurried.is_set():
                self._hurried.clear()
                self._senses.wake()
                await self._clock.sleep(CONFIRM_LAG)

    def turn(self, each: Turn) -> None:
        facts = self._observe(self.state.learned)
        snapshot = facts.pod
        self.state, findings = advance(self.state, snapshot, self.policies)
        self._tell_sensors(snapshot)
        armed_before, self._armed = self._armed, self.state.armed
        for name in self._armed:
            if name not in armed_before:
                text = f"detector {name} is ready: its signal was seen healthy"
                self._emit(Event(EventName.DETECTOR_ARMED, snapshot.wall, text, fields={"detector": name}))
        self.snapshot, self.findings = snapshot, findings
        self.turns += 1
        self._last_turn = snapshot.at
        each(facts, findings)

    def alive(self) -> tuple[bool, str]:
        """Whether the last turn is within the deadline, and a text about it."""
        age = self._clock.monotonic() - self._last_turn
        limit = max(LATE_SECONDS, LATE_TURNS * self._poll)
        return age <= limit, f"the sensing loop last ran {age:.1f} s ago (limit {limit:.0f} s)"

    def _tell_sensors(self, snapshot: Snapshot) -> None:
        for name in self._senses.all():
            reading: Reading[Any] = getattr(snapshot, name)
            before = self._sensor_states.get(name)
            if reading.state is before:
                continue
            self._sensor_states[name] = reading.state
            if before is None and reading.state in (SensorState.OK, SensorState.PENDING):
                continue
            worse = reading.state in (SensorState.BLIND, SensorState.DENIED)
            text = f"the {name} sensor is {reading.state}" + (f": {reading.detail}" if reading.detail else "")
            self._emit(
                Event(
                    EventName.SENSOR_CHANGED,
                    snapshot.wall,
                    text,
                    Severity.WARNING if worse else Severity.INFO,
                    {"sensor": name, "state": str(reading.state), "detail": reading.detail},
                )
            )
